"""The ranks of gpu.py for the first minutes on a GPU: steps that are verified, waits of the host,
DeepSpeed's timer, launches, and buckets as shards or in cuts."""

from __future__ import annotations

import gc
import time
import traceback
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from gpu_ranks import OURS, Place, backward_of, engine_of, gpt_on, planned
from gpu_steps import step_of
from measuring import in_turns
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import ds_layerwise

STAGES = (1, 2, 3)
#: Steps that are trained at each stage, and those between two readings of a clock.
STEPS, BLOCK = 12, 5
#: The line of the package in which the host may wait in a step: the decision that all ranks make.
AGREEMENT = "ds_layerwise/ranks/comm/step_agreement.py"
#: Kernels of a step that are named, those that take longest.
NAMED = 8


def setups(place: Place, stages: Sequence[int]) -> list[tuple[str, int, dict[str, Any]]]:
    """Return a name, a stage and a ``layerwise`` section for each of ``stages``, and for captured
    updates, where there are graphs."""
    found: list[tuple[str, int, dict[str, Any]]] = [(str(stage), stage, {}) for stage in stages]
    if place.device == "cuda":
        for stage in (stages[0], stages[-1]):
            found.append((f"{stage}, captured", stage, {"cuda_graph": True}))
    return found


def first_steps(place: Place) -> list[dict[str, Any]]:
    """Return the losses of some steps at each stage, the first of which is verified, and
    milliseconds of one."""
    config, rows = place.gpt(2e8), []
    for name, stage, layerwise in setups(place, STAGES):
        section = {"verify_first_step": True, **layerwise}
        engine = engine_of(OURS, gpt_on(place, config), section, stage=stage)
        backward, losses = backward_of(engine, config), []
        for _ in range(2 if place.tiny else STEPS):
            losses.append(backward())
            engine.step()
        place.finish()
        began = time.perf_counter()
        for _ in range(1 if place.tiny else BLOCK):
            backward()
            engine.step()
        place.finish()
        taken = (time.perf_counter() - began) / (1 if place.tiny else BLOCK)
        rows.append({"stage": name, "losses": [float(loss) for loss in losses], "ms": 1e3 * taken})
        ended(engine)
    return rows


def ended(engine: Any) -> None:
    """Give back what an engine holds."""
    engine.destroy()
    gc.collect()
    get_accelerator().empty_cache()


def before_step(place: Place, stage: int, layerwise: Mapping[str, Any]) -> Any:
    """Return an engine that has made some steps, and whose next one has its gradients."""
    config = place.gpt(2e8)
    engine = engine_of(OURS, gpt_on(place, config), layerwise, stage=stage)
    step = step_of(engine, config)
    for _ in range(2 if place.tiny else 4):
        step()
    backward_of(engine, config)()
    place.finish()
    return engine


@contextmanager
def waits_counted(place: Place) -> Iterator[Counter[str]]:
    """Count the lines at which the host waits for the device: those that torch warns of, and whole
    synchronizations."""
    found: Counter[str] = Counter()

    def line() -> str:
        roots = [Path(module.__file__).parents[1] for module in (ds_layerwise, deepspeed)]
        for frame in reversed(traceback.extract_stack()):
            for root in roots:
                path = Path(frame.filename)
                if path.is_relative_to(root / "ds_layerwise") or path.is_relative_to(
                    root / "deepspeed"
                ):
                    return f"{path.relative_to(root)}:{frame.lineno}"
        return "torch"

    def warned(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            found[line()] += 1

    synchronize = get_accelerator().synchronize

    def synchronized(*args: Any) -> Any:
        found[line()] += 1
        return synchronize(*args)

    patch = unittest.mock.patch.object
    with (
        warnings.catch_warnings(),
        patch(warnings, "showwarning", warned),
        patch(get_accelerator(), "synchronize", synchronized),
    ):
        warnings.simplefilter("always")
        if place.device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if place.device == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def waits(place: Place) -> list[dict[str, Any]]:
    """Return, for each stage, the lines at which the host waits in a step, and when a step returns,
    beside when the device has done it."""
    rows = []
    for name, stage, layerwise in setups(place, STAGES):
        engine = before_step(place, stage, layerwise)
        with waits_counted(place) as found:
            began = time.perf_counter()
            engine.step()
            returned = time.perf_counter() - began
        place.finish()
        done = time.perf_counter() - began
        rows.append({"stage": name, "waits": found, "returned": 1e3 * returned, "done": 1e3 * done})
        ended(engine)
    return rows


def blocks_of(sides: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Return sides of :data:`BLOCK` steps each, with nothing that waits between them."""

    def block(step: Callable[[], object]) -> Callable[[], object]:
        def several() -> None:
            for _ in range(BLOCK):
                step()

        return several

    return {name: block(step) for name, step in sides.items()}


def timer_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of :data:`BLOCK` whole steps with DeepSpeed's throughput timer as it is
    by default, which waits for the device, and without these waits."""
    config, sides = place.gpt(2e8), {}
    for name, waits_for_device in (("without waits", False), ("by default", True)):
        engine = engine_of(
            OURS,
            gpt_on(place, config),
            {"overlap_param_gather": True},
            synchronized=waits_for_device,
        )
        sides[name] = step_of(engine, config)
    return {"ms": in_turns(blocks_of(sides), place.repetitions, finish=place.finish)}


def ways_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of an optimizer step without overlap, buckets as planned, as equal
    shards, and in cuts."""
    config = place.gpt(2e8)
    ways: dict[str, AbstractContextManager[object]] = {
        "as planned": nullcontext(),
        "as shards of one length": planned(lambda bucket: False, even=True),
        "in cuts": planned(lambda bucket: True),
    }
    engines = {}
    for name, way in ways.items():
        with way:
            engines[name] = engine_of(OURS, gpt_on(place, config), {}, overlap_comm=False)
    ms = in_turns(
        {name: engine.step for name, engine in engines.items()},
        place.repetitions,
        before={name: backward_of(engine, config) for name, engine in engines.items()},
        finish=place.finish,
    )
    sent = {name: engine.optimizer.forecast().sent_in_step for name, engine in engines.items()}
    return {"ms": ms, "sent": sent}


def launches(place: Place) -> list[dict[str, Any]]:
    """Return what the host launches in one step at stages 1 and 3, how long the device is busy with
    it, and the kernels that take longest. A trace of each is left in the folder of the report."""
    rows = []
    for name, stage, layerwise in setups(place, (1, 3)):
        engine = before_step(place, stage, layerwise)
        activities = [ProfilerActivity.CPU]
        if place.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as seen:
            began = time.perf_counter()
            engine.step()
            place.finish()
            taken = 1e3 * (time.perf_counter() - began)
        events = seen.events() or []
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        longest: Counter[str] = Counter()
        for kernel in kernels:
            longest[kernel.name[:60]] += kernel.time_range.elapsed_us()
        if place.folder and torch.distributed.get_rank() == 0:
            trace = f"step_stage{name.replace(', ', '_')}.json.gz"
            seen.export_chrome_trace(str(Path(place.folder, trace)))
        rows.append(
            {
                "stage": name,
                "ms": taken,
                "launches": sum("Launch" in event.name for event in events),
                "busy_ms": busy_us((k.time_range.start, k.time_range.end) for k in kernels) / 1e3,
                "longest": {name: us / 1e3 for name, us in longest.most_common(NAMED)},
            }
        )
        ended(engine)
    return rows


def busy_us(ranges: Iterator[tuple[float, float]]) -> float:
    """Return how long at least one of the ranges lasts."""
    busy = last = 0.0
    for start, end in sorted(ranges):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    return busy
