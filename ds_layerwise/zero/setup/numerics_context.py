"""A context in which a script's settings do not affect the arithmetic of a step, and the dtype of
matrix products if the config leaves it open: it follows from the device, and checkpoints have it.

Note: which settings this covers
    Autocast and the precision of float32 products change the result of a product, so both are off
    inside. Default dtypes and devices stay as they are, because all threads of the process share
    them; code that runs in a step names the dtype and the device of every tensor it makes.

Note: why all ranks agree on a dtype
    All ranks use a dtype only if it is fast on all of them. A resumed run reports if its choice
    differs from that of the run that saved the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from ds_layerwise.errors import few
from ds_layerwise.optimizers.devices import fast_dtypes
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, dtype_name

#: The backends whose float32 products may run in a shorter dtype.
_BACKENDS = ("cuda", "mkldnn")

#: The switches of ``torch.backends.cuda.matmul`` that allow half-precision sums in half-precision
#: products.
_HALF_SUMS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)


@contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """Compute on ``device`` with torch's own settings: no autocast, no gradients, products in full
    precision.

    All settings are restored afterwards. The weights that autocast has cached are dropped, because
    an update changes them.
    """
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _exact_float32(),
        _sums_in_float32(),
    ):
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Compute float32 products from float32 inputs, not in TF32 or bf16."""
    overall = None
    # If a setting was made through the newer interface, this getter raises.
    with suppress(RuntimeError):
        overall = torch.get_float32_matmul_precision()
    by_backend = {}
    for backend in _BACKENDS:
        by_backend[backend] = _precision(backend)
    if overall not in (None, "highest"):
        torch.set_float32_matmul_precision("highest")
    for backend, precision in by_backend.items():
        if precision not in ("none", "ieee"):
            _set(backend, "ieee")
    try:
        yield
    finally:
        if overall not in (None, "highest"):
            torch.set_float32_matmul_precision(overall)
        for backend, precision in by_backend.items():
            if precision not in ("none", "ieee"):
                # Unset first: an unset backend follows the setting for all of its operations, which
                # may be where the precision came from.
                _set(backend, "none")
            if _precision(backend) != precision:
                _set(backend, precision)


def _precision(backend: str) -> str:
    precision: str = torch._C._get_fp32_precision_getter(backend, "matmul")
    return precision


def _set(backend: str, precision: str) -> None:
    torch._C._set_fp32_precision_setter(backend, "matmul", precision)


@contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Sum products of half-precision matrices in float32."""
    matmul = torch.backends.cuda.matmul
    before = {name: value for name in _HALF_SUMS if (value := getattr(matmul, name, False))}
    for name in before:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


@dataclass(frozen=True)
class Products:
    """The dtypes in which the devices multiply faster than in float32, by rank."""

    by_rank: tuple[frozenset[torch.dtype] | None, ...]
    """The dtypes of each rank; None for a rank where no recipe leaves the dtype open."""

    @classmethod
    def agree(cls, recipes: Iterable[Recipe], device: torch.device) -> Products:
        """Gather them. Every rank of the world must call this at the same point."""
        mine = None
        if any(map(_is_open, recipes)):
            mine = fast_dtypes(device)
        return cls(tuple(comm.gather_objects(mine, group=None)))

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
