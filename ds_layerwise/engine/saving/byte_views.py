"""Parameters in a form that DeepSpeed's broadcast of a model can view as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def viewable_as_bytes(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make ``params`` contiguous permanently, and 0-d ones 1-D while this context is open."""
    scalars = []
    for param in params:
        if not param.dim():
            scalars.append(param)
            param.data = param.data.view(1)
        elif not param.data.is_contiguous():
            param.data = param.data.contiguous()
        elif param.data.stride(-1) != 1:
            # A single column that was a row is contiguous, but has the stride of the row.
            param.data = param.data.view(-1).view(param.shape)
    try:
        yield
    finally:
        for param in scalars:
            if param.numel():
                # Else ZeRO stage 3 has cut it in between.
                param.data = param.data.view(())
