"""Warnings about calls that bypass the engine and have no effect; each is printed once, on
rank 0.
"""

from __future__ import annotations

from functools import lru_cache

from deepspeed.utils import logger

from ds_layerwise.ranks.comm import comm


@lru_cache(maxsize=None)
def warn_once(message: str) -> None:
    """Warn on rank 0, once per process."""
    if comm.rank_of(None) == 0:
        logger.warning(f"ds_layerwise: {message}")
