"""DeepSpeed's timers around parts of a step, and the engine's state after an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ds_layerwise.zero.setup.run_settings import Timers


def norm_tensor(norm: float, device: torch.device) -> torch.Tensor:
    """What ``get_global_grad_norm`` gives, as with DeepSpeed's own optimizers: 0-d float32. Nothing
    waits for it.
    """
    return torch.full((), norm, dtype=torch.float32, device=device)


@contextmanager
def timed(timers: Timers, name: str) -> Iterator[None]:
    """Run a phase under one of DeepSpeed's named timers."""
    timers(name).start()
    try:
        yield
    finally:
        timers(name).stop()


@contextmanager
def survivable(engine: Any) -> Iterator[None]:
    """Leave ``engine`` so that an exception in its step can be survived: it would else take the
    step to be still on, and its timers refuse to start again."""
    done = False
    try:
        yield
        done = True
    finally:
        if not done and engine is not None:
            engine._running_engine_step = False
            for name in engine.engine_timers.step_timers:
                engine.timers(name).reset()
