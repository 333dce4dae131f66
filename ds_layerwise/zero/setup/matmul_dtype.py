"""The dtype of matrix products if the config leaves it open: it follows from the device, all ranks
agree on it, and checkpoints have it.

Note: why all ranks agree
    All ranks use a dtype only if it is fast on all of them. A resumed run reports if its choice
    differs from that of the run that saved the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_layerwise.errors import ConfigError, few
from ds_layerwise.optimizers.devices import fast_dtypes
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.orthogonalize.symmetric import kernel_on
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, dtype_name


@dataclass(frozen=True)
class Products:
    """The dtypes in which the devices multiply faster than in float32, by rank."""

    by_rank: tuple[frozenset[torch.dtype] | None, ...]
    """The dtypes of each rank; None for a rank where no recipe leaves the dtype open."""
    has_kernel: bool
    """True if a kernel computes one half of large symmetric products."""

    @classmethod
    def agree(cls, recipes: Iterable[Recipe], device: torch.device) -> Products:
        """Gather them. Every rank of the world must call this at the same point.

        Raises:
            ConfigError: on every rank, if some have a kernel and others none, or one does not work.
        """
        mine = None
        if any(map(_is_open, recipes)):
            mine = fast_dtypes(device)
        with comm.errors_on_all_ranks():
            has_kernel = kernel_on(device) is not None
        dtypes, kernels = zip(*comm.gather_objects((mine, has_kernel), group=None), strict=True)
        if len({*kernels}) > 1:
            raise ConfigError(
                f"rank {kernels.index(True)} multiplies symmetric matrices by quack-kernels, and "
                f"rank {kernels.index(False)} does not; install it on every node, or on none"
            )
        return cls(dtypes, has_kernel)

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes that are fast on all ranks with an open choice, for updates; see
        :attr:`.Site.fast_dtypes`.
        """
        asked = []
        for dtypes in self.by_rank:
            if dtypes is not None:
                asked.append(dtypes)
        return frozenset.intersection(*asked or [frozenset()])

    @property
    def fast(self) -> tuple[str, ...] | None:
        """The names of :attr:`dtypes`, as stored in a checkpoint; None if no choice is
        open."""
        if all(dtypes is None for dtypes in self.by_rank):
            return None
        return tuple(sorted(map(dtype_name, self.dtypes)))

    def told(self, recipe: Recipe) -> str | None:
        """Return the dtype of the products of ``recipe``, with the reason, for the start-up table;
        None if it multiplies no matrices.
        """
        taken = _products_in(recipe, self.dtypes)
        if taken is None or not _is_open(recipe):
            return taken
        wanted = _products_in(recipe, frozenset().union(*filter(None, self.by_rank)))
        if wanted == taken:
            return f"{taken} (auto)"
        ranks = []
        for rank, dtypes in enumerate(self.by_rank):
            if DTYPES[str(wanted)] in (dtypes or ()):
                ranks.append(str(rank))
        some = f"only {len(ranks)} of {len(self.by_rank)} ranks: {few(ranks)}"
        return f"{taken} ({wanted} is faster on {some})"

    def changes(self, recipes: Iterable[Recipe], saved: Sequence[str] | None) -> list[str]:
        """Return a line for each of ``recipes`` whose products now have another dtype than in the
        run that saved the checkpoint.

        Args:
            saved: the names of the dtypes that were fast in that run; None if no choice was open.
        """
        if saved is None or self.fast is None:
            return []
        lines: dict[str, None] = {}
        for recipe in recipes:
            before = _products_in(recipe, frozenset(map(DTYPES.__getitem__, saved)))
            now = _products_in(recipe, self.dtypes)
            if before != now:
                line = (
                    f"{recipe.rule} multiplied matrices in {before} where this was saved, and does "
                    f"in {now} here, so results differ by rounding; set optimizer.params.ns_dtype "
                    "in place of 'auto'"
                )
                lines[line] = None
        return list(lines)


def _products_in(recipe: Recipe, fast: frozenset[torch.dtype]) -> str | None:
    dtype = recipe.products_in(fast)
    return None if dtype is None else dtype_name(dtype)


def _is_open(recipe: Recipe) -> bool:
    """Tell whether the dtype of the recipe's products depends on the device."""
    half = frozenset((torch.bfloat16, torch.float16))
    return _products_in(recipe, half) != _products_in(recipe, frozenset())
