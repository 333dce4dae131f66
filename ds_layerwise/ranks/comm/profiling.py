"""The ranges of a step in a profiler: ``ds_layerwise.reduce``, ``.update`` and ``.gather``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

_NOTHING = nullcontext()


def profiled(what: Literal["reduce", "update", "gather"]) -> AbstractContextManager[object]:
    """Return a range of :mod:`torch.profiler` around the work on one bucket.

    Without a profiler it does nothing: a range takes some microseconds, and a step has three for
    each bucket.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"ds_layerwise.{what}")
