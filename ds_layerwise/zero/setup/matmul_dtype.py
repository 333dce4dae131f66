"""The dtype of products where the config leaves it open: measured, agreed on, and kept in
checkpoints.

Note: why it is decided once
    A dtype that changed from step to step, or from one start to the next, would change results. So
    every process measures once, before the first step, with a margin that noise does not reach; all
    ranks take what all of them found faster; and a run that goes on from a checkpoint says so where
    it decides otherwise than the one that saved it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch

from ds_layerwise.errors import few
from ds_layerwise.optimizers.devices import fast_dtypes
from ds_layerwise.optimizers.rule_registry import rule_of
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, dtype_name
from ds_layerwise.recipes.base.recipe import Recipe
from ds_layerwise.zero.setup import numerics_context


@dataclass(frozen=True, slots=True)
class Products:
    """In which dtypes the devices of all ranks multiply much faster than in float32, by torch's
    names.
    """

    by_rank: tuple[tuple[str, ...] | None, ...]
    """None for a rank of which no setting asks."""

    @classmethod
    def agree(cls, recipes: Iterable[Recipe], device: torch.device) -> Products:
        """Measure on all ranks. Every rank of the world must call this at the same point.

        Raises:
            LayerWiseError: on every rank, if one cannot multiply at all.
        """
        with comm.errors_on_all_ranks(None), numerics_context.set_aside(device):
            asks = any(_is_open(recipe) for recipe in recipes)
            mine = (
                tuple(sorted(dtype_name(dtype) for dtype in fast_dtypes(device))) if asks else None
            )
        return cls(tuple(comm.gather_objects(mine, group=None)))

    @property
    def fast(self) -> tuple[str, ...] | None:
        """The dtypes that are fast on all ranks that ask; None if no rank asks."""
        asked = [set(names) for names in self.by_rank if names is not None]
        return tuple(sorted(set.intersection(*asked))) if asked else None

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The fast dtypes for rules, see :meth:`.optimizers.rule.UpdateRule.on_device`."""
        return _dtypes(self.fast or ())

    def told(self, recipe: Recipe) -> str | None:
        """Return the dtype of ``recipe``'s products, for the start-up table, and why; None if it
        multiplies no matrices.
        """
        taken = _products_in(recipe, self.fast or ())
        if taken is None or not _is_open(recipe):
            return taken
        anywhere = sorted(set().union(*(names or () for names in self.by_rank)))
        wanted = _products_in(recipe, anywhere)
        if wanted == taken:
            return f"{taken} (measured)"
        ranks = [str(rank) for rank, names in enumerate(self.by_rank) if wanted in (names or ())]
        some = f"{len(ranks)} of {len(self.by_rank)} ranks alone: {few(ranks)}"
        return f"{taken} ({wanted} is faster on {some})"

    def changes(self, recipes: Iterable[Recipe], saved: Sequence[str] | None) -> list[str]:
        """A line for each of ``recipes`` that multiplies in something else than where ``saved``
        were the fast ones.
        """
        if saved is None or self.fast is None:
            return []
        lines = []
        for recipe in recipes:
            before, now = _products_in(recipe, saved), _products_in(recipe, self.fast)
            if before != now:
                lines.append(
                    f"{recipe.rule} multiplied matrices in {before} where this was saved, and does "
                    f"in {now} here, so results differ by rounding; set optimizer.params.ns_dtype "
                    "in place of 'auto'"
                )
        return list(dict.fromkeys(lines))


def _products_in(recipe: Recipe, fast: Collection[str]) -> str | None:
    dtype = rule_of(recipe).on_device(_dtypes(fast)).products_in
    return None if dtype is None else dtype_name(dtype)


def _is_open(recipe: Recipe) -> bool:
    """Tell whether the dtype of its products depends on the device."""
    return _products_in(recipe, ("bfloat16", "float16")) != _products_in(recipe, ())


def _dtypes(names: Iterable[str]) -> frozenset[torch.dtype]:
    return frozenset(DTYPES[name] for name in names)
