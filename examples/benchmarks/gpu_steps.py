"""The ranks of gpu.py for whole training steps beside stock ZeRO and torch's Muon, for the same
steps as rank 0 of many on a network of sleeps."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from gpu_ranks import (
    OURS,
    STOCK,
    Place,
    allocated,
    backward_of,
    engine_of,
    gpt_on,
    windows,
)
from measuring import in_turns
from torch import Tensor, distributed, nn

from tests.support.rank_of_many import Network, rank_of_many

TORCH = "torch.optim.Muon, AdamW"
#: Sides of a whole step: the optimizer, its section ``layerwise``, and keys of
#: ``zero_optimization``.
SIDES: dict[str, tuple[str, Mapping[str, Any] | None, Mapping[str, Any]]] = {
    "ours, ZeRO-1": (OURS, {"overlap_param_gather": True}, {}),
    "ours, ZeRO-1, no overlap": (OURS, {}, {"overlap_comm": False}),
    "ours, ZeRO-2": (OURS, {"overlap_param_gather": True}, {"stage": 2}),
    "ours, ZeRO-2, no overlap": (OURS, {}, {"stage": 2, "overlap_comm": False}),
    "ours, ZeRO-3": (OURS, {}, {"stage": 3}),
    "stock Muon, ZeRO-1": (STOCK, None, {}),
    "stock Muon, ZeRO-2": (STOCK, None, {"stage": 2}),
    # Stock's Muon refuses the other value.
    "stock Muon, ZeRO-3": (STOCK, None, {"stage": 3, "reduce_scatter": False}),
}
#: Bytes for each parameter that all sides hold on one rank, with some room.
BYTES_PER_PARAMETER = 160


def step_of(engine: Any, config: Any) -> Callable[[], object]:
    """Return a function that runs a forward pass, a backward pass, and a step."""
    backward = backward_of(engine, config)

    def step() -> None:
        backward()
        engine.step()

    return step


def step_of_torch(place: Place, config: Any) -> Callable[[], object]:
    """Return the same for a model whose hidden matrices torch's Muon trains, and the rest its
    AdamW."""
    bare = gpt_on(place, config).to(torch.bfloat16)
    hidden = {
        id(module.weight)
        for name, module in bare.named_modules()
        if isinstance(module, nn.Linear) and "head" not in name
    }
    matrices = [p for p in bare.parameters() if id(p) in hidden]
    others = [p for p in bare.parameters() if id(p) not in hidden]
    both = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-3, fused=True)
    model: nn.Module = bare
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(bare)
    tokens = windows(config, place.device)

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()

    return step


def whole_step_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of one whole step of each side. All sides are there at once."""
    config = place.gpt(min(1e9, place.memory_bytes / BYTES_PER_PARAMETER))
    sides = {}
    numel = 0
    for name, (optimizer, layerwise, zero) in SIDES.items():
        model = gpt_on(place, config)
        numel = sum(p.numel() for p in model.parameters())
        sides[name] = step_of(engine_of(optimizer, model, layerwise, **zero), config)
    if hasattr(torch.optim, "Muon"):
        sides[TORCH] = step_of_torch(place, config)
    return {"ms": in_turns(sides, place.repetitions, finish=place.finish), "numel": numel}


# --- as rank 0 of many

#: Numbers of simulated ranks, and how many of them are on each node.
SIZES, PER_NODE = (8, 64, 512), 8
#: Sections ``layerwise`` and ``zero_optimization``, by side.
AS_ONE_OF_MANY: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "ZeRO-1": ({"overlap_param_gather": True}, {}),
    "ZeRO-1, no overlap": ({}, {"overlap_comm": False}),
    "ZeRO-2": ({"overlap_param_gather": True}, {"stage": 2}),
    "ZeRO-2, 2 wait at most": (
        {"overlap_param_gather": True, "max_waiting_buckets": 2},
        {"stage": 2},
    ),
}


class Sleep:
    """A collective that is over at a moment of the host's clock."""

    def __init__(self, until: float) -> None:
        self._until = until

    def is_completed(self) -> bool:
        """Return whether the moment has come."""
        return time.perf_counter() >= self._until

    def wait(self) -> None:
        """Wait for the moment."""
        time.sleep(max(0.0, self._until - time.perf_counter()))


class OnStream:
    """A collective on a stream of its own. Like NCCL's, it keeps its tensors until waited for."""

    def __init__(self, stream: Any, tensors: Sequence[Tensor]) -> None:
        self._event, self._tensors = stream.record_event(), tensors

    def is_completed(self) -> bool:
        """Return whether the collective is over."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Let the current stream wait. The host goes on."""
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()


#: Bandwidths of one rank, 10^9 bytes a second: NVLink 4, and a card of 400 Gbit/s.
INSIDE_GB_S, BETWEEN_GB_S = 450.0, 50.0


class Sleeping(Network):
    """A network that sleeps as long as a collective's bytes take at the bandwidth of one rank."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.takes_time, self._is_cuda = True, place.device == "cuda"
        self._streams: dict[Any, Any] = {}
        self._free_at: dict[Any, float] = {}
        self.busy_s = 0.0
        if self._is_cuda:
            self._cycles_per_s = cycles_per_second()

    def begin(self, kind: str, nbytes: int, group: Any, tensors: Sequence[Tensor]) -> Any:
        """Sleep after all earlier work of its stream, and of the current one."""
        super().begin(kind, nbytes, group, tensors)
        ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        rate = INSIDE_GB_S if ranks[-1] < PER_NODE else BETWEEN_GB_S
        seconds = self.takes_time * nbytes * (len(ranks) - 1) / len(ranks) / rate / 1e9
        self.busy_s += seconds
        key = tuple(ranks[:2]), len(ranks)
        if not self._is_cuda:
            begun = max(time.perf_counter(), self._free_at.get(key, 0.0))
            self._free_at[key] = begun + seconds
            return Sleep(begun + seconds)
        stream = self._streams.setdefault(key, torch.cuda.Stream())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
        return OnStream(stream, tensors)


def cycles_per_second() -> float:
    """Return the rate of the clock that a sleep on the device counts."""
    cycles, taken = 100_000_000, []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return cycles / statistics.median(taken)


def rank_times(place: Place) -> list[dict[str, Any]]:
    """Return milliseconds of a whole step of rank 0 by ranks and side, those of its network and of
    a network that takes no time, and bytes."""
    dist.destroy_process_group()
    config, rows = place.gpt(min(1e9, place.memory_bytes / 32)), []
    for size in SIZES[-1:] if place.tiny else SIZES:
        for name, (layerwise, zero) in AS_ONE_OF_MANY.items():
            network = Sleeping(place)
            with rank_of_many(size, PER_NODE, network):
                rows.append(
                    {
                        "ranks": size,
                        "side": name,
                        **_of_one_rank(place, config, network, layerwise, zero),
                    }
                )
            gc.collect()
    # The end of a rank asks for a group.
    get_accelerator().synchronize()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_distributed(
            "gloo" if place.device == "cpu" else "nccl",
            verbose=False,
            auto_mpi_discovery=False,
            init_method=f"file://{folder}/store",
            rank=0,
            world_size=1,
        )
    return rows


def _of_one_rank(
    place: Place,
    config: Any,
    network: Sleeping,
    layerwise: Mapping[str, Any],
    zero: Mapping[str, Any],
) -> dict[str, Any]:
    before = allocated(place)
    engine = engine_of(
        OURS,
        gpt_on(place, config),
        {"reduction": "native", **layerwise},
        **zero,
    )
    whole = step_of(engine, config)
    whole()
    network.begun.clear()
    network.busy_s = 0.0
    whole()
    collectives, busy_ms = len(network.begun), 1000 * network.busy_s
    held, peak = allocated(place) - before, None
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ms = in_turns({"": whole}, place.repetitions, finish=place.finish)[""]
    if place.device == "cuda":
        peak = torch.cuda.max_memory_allocated() - before
    network.takes_time = False
    computing = in_turns({"": whole}, place.repetitions, finish=place.finish)[""]
    network.takes_time = True
    engine.destroy()
    return {
        "ms": ms,
        "network_ms": busy_ms,
        "computing_ms": computing,
        "collectives": collectives,
        "held": held,
        "peak": peak,
    }
