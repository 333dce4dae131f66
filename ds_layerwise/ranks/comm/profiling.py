"""What a profiler shows of a step: ranges of the names ``ds_layerwise.reduce``, ``.update`` and
``.gather``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

_NOTHING = nullcontext()


def profiled(what: Literal["reduce", "update", "gather"]) -> AbstractContextManager[object]:
    """A range of :mod:`torch.profiler` around the work on one bucket; nothing where no profiler
    runs.

    A range would take some microseconds there, too, and a step has three for each bucket.
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    return torch.profiler.record_function(f"ds_layerwise.{what}")
