"""Matrix products. If the result is known to be symmetric, one half is computed and mirrored.

Note: kernels
    On Hopper and on data-centre Blackwell, quack-kernels (Apache 2.0), if it is installed, computes
    one half of symmetric products in half precision and mirrors it; its authors measured up to
    twice the speed of whole ones. Below 1,024 rows there is too little to save. It is used only
    after one product of it was compared with torch's, and not with DS_LAYERWISE_KERNELS=0 in the
    environment.

Note: strips
    The lower triangle is computed as ``n`` strips of rows, each up to its diagonal, and mirrored
    into the upper one. This takes (n + 1) / 2n of the full product, 0.56 with eight strips, with
    plain matrix products on any device.

Note: how many strips
    Measured on a CPU with AVX-512 and bfloat16 units (1 thread;
    examples/benchmarks/newton_schulz.py has the table): the products of narrow strips lose more
    speed than they save work. There is no gain below 80 rows in float32 and below 144 in half
    precision; more than eight strips save almost nothing more. On an accelerator every strip is a
    launch, and it was not measured, so no strips are used there.

Note: the distance of rows
    Products write into parts of the result, and mirroring reads along columns. If the distance of
    rows is a multiple of 1,024 bytes, a column maps to few cache lines, and mirroring takes as long
    as copying each strip twice. So such results have a gap after every row: they are not
    contiguous.

Note: one by one
    On a CPU, matrices of a batch with a smaller side of at least 256 are multiplied one after
    another. In half precision, a batched product copies a transposed operand in every call and
    takes up to twice as long. Below that size, starting a product costs more than it saves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError

#: Matrices are padded with zeros, which stay zeros, to sides that are multiples of this. On a CPU,
#: the start of a matrix in memory changes the last bits of a product; with this padding, every
#: matrix of a batch starts as it would alone.
ALIGNMENT = 16

#: The largest number of strips.
_MOST = 8

#: The smallest number of rows in a strip, by bytes of an element.
_NARROWEST = {4: 80, 2: 144}

#: The product, and the product with an addend, by the number of axes: of matrices and of batches.
_BY_AXES: dict[int, Any] = {2: (torch.mm, torch.addmm), 3: (torch.bmm, torch.baddbmm)}

#: The least number of rows of a symmetric product for a kernel; see the note on kernels.
KERNEL_FROM = 1024

#: The generations of CUDA devices with kernels.
_KERNEL_ON = (9, 10)

#: Matrices with a smaller side of at least this size are multiplied one by one on a CPU.
_ONE_BY_ONE_FROM = 256


def num_strips(side: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the number of strips for a symmetric ``(side, side)`` product; see the note."""
    if dtype.itemsize not in _NARROWEST or not one_by_one(side, device):
        return 1
    return min(_MOST, side // _NARROWEST[dtype.itemsize])


def one_by_one(side: int, device: torch.device) -> bool:
    """Tell whether matrices with that smaller side are multiplied one after another; see
    the note.
    """
    return device.type == "cpu" and side >= _ONE_BY_ONE_FROM


def _generation(device: torch.device) -> int:
    """Return the first number of the compute capability of an NVIDIA GPU; 0 for other devices."""
    if device.type == "cuda" and torch.version.cuda is not None:
        return torch.cuda.get_device_capability(device)[0]
    return 0


@cache
def kernel_on(device: torch.device) -> Any:
    """Return quack's function for symmetric products on ``device``; None if it is not installed, or
    has none for it.

    Raises:
        ConfigError: it is installed, and does not work here.
    """
    is_wanted = os.environ.get("DS_LAYERWISE_KERNELS") != "0" and find_spec("quack") is not None
    if not is_wanted or _generation(device) not in _KERNEL_ON:
        return None
    try:
        from quack.gemm_interface import gemm_symmetric

        # Whole numbers, which float16 holds, and so do all of their sums.
        x = torch.randint(
            -1,
            2,
            (1, KERNEL_FROM, KERNEL_FROM),
            generator=torch.Generator(device).manual_seed(0),
            dtype=torch.float16,
            device=device,
        )
        base = x + x.mT
        found = gemm_symmetric(x, x.mT, C=base, alpha=1.0, beta=-1.0)
        is_right = torch.equal(found, torch.baddbmm(base, x, x.mT, alpha=1.0, beta=-1.0))
        why = "its product of two matrices is another than torch's"
    except FOREIGN_ERRORS as error:
        is_right = False
        why = f"{type(error).__name__}: {error}"
    if not is_right:
        raise ConfigError(
            f"quack-kernels is installed, and cannot multiply on {device} ({why}); upgrade it, or "
            "set DS_LAYERWISE_KERNELS=0 in the environment of all ranks, so that torch multiplies"
        )
    return gemm_symmetric


def padded(x: Tensor) -> Tensor:
    """Return ``(k, m, n)`` padded with zeros to multiples of :data:`.ALIGNMENT`."""
    rows, cols = x.shape[-2:]
    below = -rows % ALIGNMENT
    right = -cols % ALIGNMENT
    if below or right:
        return F.pad(x, (0, right, 0, below))
    return x


def upright(x: Tensor) -> Tensor:
    """Return ``x.mT`` of ``(k, m, n)`` in the memory order in which products read it: a copy if
    they go one by one.
    """
    if not one_by_one(min(x.shape[-2:]), x.device):
        return x.mT
    turned = x.new_empty(x.shape[0], x.shape[2], x.shape[1])
    for into, matrix in zip(turned, x, strict=True):
        into.copy_(matrix.mT)
    return turned


def product(
    left: Tensor, right: Tensor, base: Tensor | None = None, *, beta: float = 1.0
) -> Tensor:
    """Return ``beta * base + left @ right`` of ``(k, m, m)`` and ``(k, m, n)``; without ``base``,
    ``left @ right``.
    """
    if not one_by_one(left.shape[-2], left.device):
        return _product(left, right, base, beta, 1.0)
    out = left.new_empty(*left.shape[:-1], right.shape[-1])
    for into, one, other, added in zip(out, left, right, _each(base, out), strict=True):
        _product(one, other, added, beta, 1.0, into)
    return out


def gram(x: Tensor) -> Tensor:
    """Return ``x @ x.mT`` of ``(k, m, n)``. It may have gaps between its rows; see the note."""
    return _symmetric(x, x.mT, x, None, 1.0, 1.0)


def commuting(
    base: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0
) -> Tensor:
    """Return ``beta * base + alpha * left @ right`` of symmetric ``(k, m, m)`` matrices that
    commute.

    Polynomials in one matrix commute; the product is then symmetric, too. The result may have gaps
    between its rows.
    """
    return _symmetric(left, right, right, base, beta, alpha)


def _symmetric(
    left: Tensor, right: Tensor, right_rows: Tensor, base: Tensor | None, beta: float, alpha: float
) -> Tensor:
    """Return the symmetric product. ``right_rows`` is the transpose of ``right``."""
    side = left.shape[-2]
    if side >= KERNEL_FROM and left.itemsize == 2 and (kernel := kernel_on(left.device)):
        result: Tensor = kernel(left, right, C=base, alpha=alpha, beta=beta)
        return result
    if not one_by_one(side, left.device):
        return _product(left, right, base, beta, alpha)
    strips = num_strips(side, left.dtype, left.device)
    gap = 0
    if strips > 1 and side * left.itemsize % 1024 == 0:
        gap = ALIGNMENT
    out = left.new_empty(*left.shape[:-1], side + gap)[..., :side]
    for into, one, rows, added in zip(out, left, right_rows, _each(base, out), strict=True):
        _fill(into, one, rows, added, beta, alpha, strips)
    return out


def _each(base: Tensor | None, like: Tensor) -> Sequence[Tensor | None]:
    """Return each matrix of ``base``, or None for each of ``like``."""
    if base is None:
        return [None] * len(like)
    return base.unbind()


def _fill(
    out: Tensor,
    left: Tensor,
    right_rows: Tensor,
    base: Tensor | None,
    beta: float,
    alpha: float,
    strips: int,
) -> None:
    """Compute the lower triangle of ``(side, side)`` strip by strip, and mirror it; see the note on
    strips.
    """
    side = len(out)
    width = -(-side // (strips * ALIGNMENT)) * ALIGNMENT
    for start in range(0, side, width):
        stop = min(start + width, side)
        strip = out[start:stop, :stop]
        added = base
        if added is not None:
            added = added[start:stop, :stop]
        _product(left[start:stop], right_rows[:stop].mT, added, beta, alpha, strip)
        out[:start, start:stop] = strip[:, :start].mT


def _product(
    left: Tensor,
    right: Tensor,
    base: Tensor | None,
    beta: float,
    alpha: float,
    out: Tensor | None = None,
) -> Tensor:
    """Return the product of matrices, or of batches of them; without ``base``, only ``left @
    right``.
    """
    if left.device.type == "cpu" and left.itemsize == 2 and left.shape == (1, *2 * [ALIGNMENT]):
        # torch multiplies a single matrix of that size otherwise than those of a batch, with other
        # bits where a CPU has units for float16.
        return _product(left.expand(2, -1, -1), right.expand(2, -1, -1), base, beta, alpha)[:1]
    multiply, add = _BY_AXES[left.dim()]
    if base is None:
        result: Tensor = multiply(left, right, out=out)
    else:
        result = add(base, left, right, beta=beta, alpha=alpha, out=out)
    return result
