"""The keys that decide how many parameters DeepSpeed makes whole at a time, at ZeRO stage 3."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ds_layerwise.optimizers.fields import NonNegative, check

#: DeepSpeed's defaults, by keys without their prefix ``stage3_``, in elements.
_DEFAULTS = {
    "max_live_parameters": 1_000_000_000,
    "param_persistence_threshold": 100_000,
    "model_persistence_threshold": sys.maxsize,
}


class Whole(NamedTuple):
    """The bytes of parameters that are whole on a rank, beside its cuts."""

    always: int
    """The bytes of persistent parameters, also between two steps."""
    most: int
    """The most bytes during a forward or backward pass, with the persistent ones."""


@dataclass(frozen=True)
class Fetching:
    """The limits of DeepSpeed's fetching, in elements."""

    max_live_parameters: int
    param_persistence_threshold: int
    model_persistence_threshold: int

    @classmethod
    def of(cls, zero: Mapping[str, Any]) -> Fetching:
        """Read them from the section ``zero_optimization``; "auto" stands for the default."""
        found = {}
        for key, default in _DEFAULTS.items():
            value = zero.get(f"stage3_{key}", zero.get(key, "auto"))
            if value != "auto":
                default = check(NonNegative, f"zero_optimization.stage3_{key}", value)
            found[key] = int(default)
        return cls(**found)

    def whole(self, params: Iterable[tuple[int, int]]) -> Whole:
        """Return what is whole of ``params``: the elements and bytes of each, in model order."""
        stays = always = numel = nbytes = largest = 0
        for size, its_bytes in params:
            numel += size
            nbytes += its_bytes
            largest = max(largest, size)
            if (
                size <= self.param_persistence_threshold
                and stays + size <= self.model_persistence_threshold
            ):
                stays += size
                always += its_bytes
        # A parameter larger than the limit is fetched all the same.
        elements = min(numel, max(self.max_live_parameters, largest, stays))
        return Whole(always, nbytes * elements // numel if numel else 0)
