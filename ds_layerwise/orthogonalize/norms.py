"""Frobenius norms of matrices of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements whose squares torch adds up at a time on a CPU: one after another, in float32. Of normal
#: entries 2^20 lose 1e-5 of their norm there, 2^27 1.4 %, and these 1e-7; of others these lose 3e-4
#: at worst.
_AT_A_TIME = 1 << 16


def frobenius_norms(matrices: Sequence[Tensor]) -> Tensor:
    """The norm of each of ``k`` matrices of any shape, ``(k,)``; of contiguous ones whatever else
    is among them.
    """
    if matrices[0].device.type != "cpu" or all(matrix.numel() <= _AT_A_TIME for matrix in matrices):
        # One norm a matrix: over a batch, the order of the sum would depend on its size.
        return torch.stack(torch._foreach_norm(list(matrices)))
    parts = [torch.split(matrix.reshape(-1), _AT_A_TIME) for matrix in matrices]
    norms = torch.stack(torch._foreach_norm([part for each in parts for part in each]))
    return torch.stack(
        [
            torch.linalg.vector_norm(of_matrix, dtype=torch.float64).to(norms.dtype)
            for of_matrix in torch.split(norms, [len(each) for each in parts])
        ]
    )


def norms_of(stacked: Tensor) -> Tensor:
    """:func:`frobenius_norms` of ``(..., rows, cols)``, as ``(..., 1, 1)``."""
    return frobenius_norms(list(stacked.reshape(-1, *stacked.shape[-2:]).unbind())).view(
        *stacked.shape[:-2], 1, 1
    )
