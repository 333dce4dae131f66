"""The ranks of gpu.py for Newton-Schulz, steps, offload, a race with the streams, and memory. They
are its forks."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import random
import sys
import time
import unittest.mock
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero.muon import original_muon
from measuring import in_turns
from memory import Job, start, tensor_bytes, train
from newton_schulz import gflop
from torch import Tensor, nn

import ds_layerwise
from ds_layerwise.optimizers.devices import fast_dtypes
from ds_layerwise.orthogonalize import symmetric
from ds_layerwise.orthogonalize.batching import MAX_BATCH_NUMEL
from ds_layerwise.orthogonalize.newton_schulz import coefficients, compute_dtype, newton_schulz
from ds_layerwise.plan.layout.layout import Bucket
from ds_layerwise.ranks.comm import nodes
from ds_layerwise.ranks.comm.streams import SideStream
from ds_layerwise.ranks.owned import host_memory
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.ranks.sync import transfer
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.transfer import Transfer
from ds_layerwise.zero.setup import run_plan

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from model import GPT, VOCABULARY, GPTConfig

from tests.support.transports import in_cuts

OURS, STOCK, FUSED = "LayerWiseMuon", "stock Muon", "torch AdamW, fused"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    OURS: {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3}},
    # torch_adam: FusedAdam would be compiled first.
    STOCK: {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3, "torch_adam": True}},
}
#: Bytes for each parameter that all engines of the largest comparison hold together, with some
#: room.
BYTES_PER_PARAMETER = 48


@dataclass(frozen=True)
class Place:
    """The device, the ranks and the size of a run."""

    device: str
    ranks: int
    tiny: bool
    memory_bytes: int = 0
    """Bytes of one device; 0 for a CPU."""
    spawns: bool = False
    """True if ranks are no forks, as this process may have used the device."""
    nodes: int = 1
    node: int = 0
    master: str = ""
    """The host of node 0 and the first of the ports on which ranks meet, if there are several
    nodes."""
    folder: str = ""
    """The folder for traces; empty for none."""

    @property
    def repetitions(self) -> int:
        """Return the number of repetitions of each side."""
        return 2 if self.tiny else 7

    def finish(self) -> None:
        """Wait until the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def gpt(self, params: float) -> GPTConfig:
        """Return the shape of a model of about so many parameters, or of as many as there is room
        for."""
        if self.tiny:
            return GPTConfig(layers=2, width=64, heads=1, context=16)
        params = min(params, self.memory_bytes / BYTES_PER_PARAMETER)
        return GPTConfig(
            layers=max(1, round(params / (12 * 2048**2))), width=2048, heads=16, context=256
        )


def describe(place: Place) -> dict[str, Any]:
    """Describe the device of this rank."""
    if place.device == "cpu":
        return {"name": "CPU", "memory": 0, "nccl": "gloo", "cuda": "none"}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": device.name,
        "memory": device.total_memory,
        "cuda": torch.version.cuda,
        "nccl": f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}",
    }


# --- Newton-Schulz

#: Shapes of matrices, by model.
SHAPES = {
    "GPT-2": [(768, 768), (3072, 768)],
    "Llama-8B": [(4096, 4096), (14336, 4096), (1024, 4096)],
    "Llama-70B": [(8192, 8192), (28672, 8192), (1024, 8192)],
}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def torchs(matrices: Tensor) -> None:
    """Run torch.optim.Muon's iteration, which takes one matrix at a time."""
    from torch.optim import _muon

    for matrix in matrices:
        _muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)


def by_strips(x: Tensor, strips: int) -> Tensor:
    """Return ``x @ x.mT`` of ``(k, m, n)``. The lower triangle is computed in so many strips of
    rows and mirrored, as symmetric.py does on a CPU."""
    if strips == 1:
        return torch.bmm(x, x.mT)
    side = x.shape[-2]
    out, width = x.new_empty(len(x), side, side), -(-side // strips)
    for first in range(0, side, width):
        stop = min(first + width, side)
        strip = out[:, first:stop, :stop]
        torch.bmm(x[:, first:stop], x[:, :stop].mT, out=strip)
        out[:, :first, first:stop] = strip[..., :first].mT
    return out


def strip_times(place: Place) -> list[dict[str, Any]]:
    """Return milliseconds of one symmetric product by the number of strips, for each shape."""
    rows = []
    for m, n in [(32, 48)] if place.tiny else [(512, 2048), (2048, 2048)]:
        batch = 2 if place.tiny else max(1, min(12, MAX_BATCH_NUMEL // (m * n)))
        x = torch.randn(batch, m, n, generator=torch.Generator().manual_seed(0)).to(
            place.device, torch.bfloat16
        )
        sides = {str(strips): functools.partial(by_strips, x, strips) for strips in (1, 2, 4, 8)}
        if kernel := symmetric.kernel_on(x.device):
            sides["by quack"] = functools.partial(kernel, x, x.mT)
        rows.append(
            {
                "shape": f"{batch} x {m} x {n}",
                "ms": in_turns(sides, place.repetitions, finish=place.finish),
            }
        )
    return rows


def newton_schulz_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of each side and of strips for each shape, and the rate of the machine's
    own product of two squares."""
    device, rows = torch.device(place.device), []
    fast = fast_dtypes(device)
    shapes = {"tiny": [(32, 48)]} if place.tiny else SHAPES
    for model, of_model in shapes.items():
        for m, n in of_model:
            batch = 2 if place.tiny else max(1, min(12, MAX_BATCH_NUMEL // (m * n)))
            matrices = torch.randn(batch, m, n, generator=torch.Generator().manual_seed(0)).to(
                device
            )
            side, sides, kinds = 64 if place.tiny else 8192, {}, {}
            for method, stock in (
                ("gram", original_muon.zeropower_via_gram_newtonschulz),
                ("standard", original_muon.zeropower_via_newtonschulz5),
            ):
                kinds[f"ours {method}"] = compute_dtype("auto", method, fast)
                kinds[f"stock {method}"] = original_muon.ns_compute_dtype(method)
                sides[f"ours {method}"] = functools.partial(
                    newton_schulz,
                    matrices,
                    coefficients("simple", 5),
                    method=method,
                    dtype=kinds[f"ours {method}"],
                )
                sides[f"stock {method}"] = functools.partial(stock, matrices, 5)
            if hasattr(torch.optim, "Muon"):
                kinds["torch"], sides["torch"] = torch.bfloat16, functools.partial(torchs, matrices)
            squares = {
                kind: torch.randn(side, side, device=device).to(kind)
                for kind in set(kinds.values())
            }
            own = {
                f"own {NAMES[kind]}": functools.partial(torch.mm, square, square)
                for kind, square in squares.items()
            }
            ms = in_turns({**sides, **own}, place.repetitions, finish=place.finish)
            rates = {
                name: gflop((batch, m, n), "gram" if "gram" in name else "standard", kinds[name])
                / ms[name]
                for name in sides
            }
            rows.append(
                {
                    "model": model,
                    "shape": f"{batch} x {m} x {n}",
                    "ms": {name: ms[name] for name in sides},
                    "dtypes": {name: NAMES[kinds[name]] for name in sides},
                    "share": {
                        name: rates[name] / (2 * side**3 / 1e9 / ms[f"own {NAMES[kinds[name]]}"])
                        for name in sides
                    },
                }
            )
            del matrices, squares, sides, own
    return {"rows": rows, "strips": strip_times(place)}


# --- steps


class QuickGpt(GPT):
    """A GPT with torch's own first weights, which a device makes at once: the example's take a host
    minutes for a billion."""

    def _init_weights(self) -> None:
        pass


def gpt_on(place: Place, config: GPTConfig) -> GPT:
    """Return a model that is the same on every rank."""
    torch.manual_seed(config.seed)
    with torch.device(place.device):
        return QuickGpt(config)


def engine_of(
    optimizer: str,
    model: nn.Module,
    layerwise: Mapping[str, Any] | None = None,
    *,
    synchronized: bool = False,
    **zero: Any,
) -> Any:
    """Return an engine in bf16, at stage 1.

    Args:
        synchronized: True for DeepSpeed's throughput timer as it is by default.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"synchronized": synchronized}},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": OPTIMIZERS[optimizer],
        "zero_optimization": {
            "stage": 1,
            "overlap_comm": True,
            "reduce_bucket_size": 50_000_000,
            **zero,
        },
        **({} if layerwise is None else {"layerwise": layerwise}),
    }
    return ds_layerwise.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]


def windows(config: GPTConfig, device: Any) -> Tensor:
    """Return one sequence and the byte after it, different on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(VOCABULARY, (1, config.context + 1), generator=generator).to(device)


def backward_of(engine: Any, config: GPTConfig) -> Callable[[], Tensor]:
    """Return a function that runs a forward and a backward pass, and returns the loss."""
    tokens = windows(config, engine.device)

    def backward() -> Tensor:
        loss: Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        return loss.detach()

    return backward


def step_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of one optimizer step of each side."""
    config = place.gpt(1e9)
    engines = {name: engine_of(name, gpt_on(place, config)) for name in OPTIMIZERS}
    bare = gpt_on(place, config).to(torch.bfloat16)
    fused = torch.optim.AdamW(bare.parameters(), fused=True)

    def backward_bare() -> None:
        bare.zero_grad()
        tokens = windows(config, place.device)
        bare(tokens[:, :-1], tokens[:, 1:]).backward()

    before = {name: backward_of(engine, config) for name, engine in engines.items()}
    ms = in_turns(
        {**{name: engine.step for name, engine in engines.items()}, FUSED: fused.step},
        place.repetitions,
        before={**before, FUSED: backward_bare},
        finish=place.finish,
    )
    return {"ms": ms, "numel": sum(p.numel() for p in bare.parameters())}


def batch_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of one step with as few matrices a bucket as possible, and with all in
    one.

    An owner then has a matrix of each bucket, as among many ranks, or none.
    """
    config = (
        place.gpt(2e8) if place.tiny else GPTConfig(layers=16, width=1024, heads=8, context=256)
    )
    sides: dict[str, tuple[int, bool]] = {
        "one by one": (1, False),
        "batches over buckets": (1, True),
        "one bucket": (10**9, True),
    }
    engines = {
        name: engine_of(
            OURS, gpt_on(place, config), {"batch_matrices": batched}, reduce_bucket_size=numel
        )
        for name, (numel, batched) in sides.items()
    }
    ms = in_turns(
        {name: engine.step for name, engine in engines.items()},
        place.repetitions,
        finish=place.finish,
        before={name: backward_of(engine, config) for name, engine in engines.items()},
    )
    few = {
        len(bucket.slots)
        for bucket in engines["one by one"].optimizer.layout.buckets
        if bucket.whole
    }
    return {
        "ms": ms,
        "numel": sum(p.numel() for p in engines["one bucket"].module.parameters()),
        "in_a_bucket": sorted(few),
    }


def offload_times(place: Place) -> dict[str, Any]:
    """Return milliseconds of one step with masters and states on the device, and on the host in
    each way."""
    config, host = place.gpt(5e8), {"device": "cpu", "ratio": 1.0}
    engines = {
        "device": engine_of(OURS, gpt_on(place, config)),
        **{
            name: engine_of(
                OURS, gpt_on(place, config), offload_optimizer={**host, "pin_memory": pin_memory}
            )
            for name, pin_memory in (("pinned", True), ("pageable", False))
        },
    }
    memory = engines["pinned"].optimizer._run.owned.host
    none = SideStream()
    none._stream = None

    def one_after_another() -> None:
        streams = memory._incoming, memory._outgoing
        # Without streams of their own, copies queue with the updates.
        memory._incoming = memory._outgoing = none
        engines["pinned"].step()
        place.finish()
        memory._incoming, memory._outgoing = streams

    sides = {
        "on the device": (engines["device"], engines["device"].step),
        "on the host, copies beside updates": (engines["pinned"], engines["pinned"].step),
        "on the host, one after another": (engines["pinned"], one_after_another),
        "on the host, pageable memory": (engines["pageable"], engines["pageable"].step),
    }
    ms = in_turns(
        {name: run for name, (_, run) in sides.items()},
        place.repetitions,
        finish=place.finish,
        before={name: backward_of(engine, config) for name, (engine, _) in sides.items()},
    )
    moved = sum(t.nbytes for t in memory.tensors)
    return {
        "ms": ms,
        "moved": moved,
        "numel": sum(p.numel() for p in engines["device"].module.parameters()),
    }


# --- streams


@dataclass(frozen=True)
class Setup:
    """The settings of a race."""

    stage: int = 1
    reduction: str = "native"
    zero: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=lambda: {"bf16": {"enabled": True}})
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """The context in which the engine is made."""
    prepare: Callable[[Place, Any], object] | None = None
    """A change of the engine."""
    has_experts: bool = False
    least_ranks: int = 1


class Experts(nn.Module):
    """Four experts, of which each token takes one. Every other rank has others."""

    def __init__(self, width: int, ep_size: int) -> None:
        super().__init__()
        self.moe = MoE(width, nn.Linear(width, width), 4, ep_size, k=1, use_rts=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output without the loss that balances experts."""
        result: Tensor = x + self.moe(x)[0]
        return result


class Mlp(nn.Module):
    """Layers whose gradients are sums in one order, whatever runs beside."""

    def __init__(self, width: int, layers: int, *, has_experts: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())
                for _ in range(layers)
            )
        )
        if has_experts:
            ep_size = 2 - dist.get_world_size() % 2
            self.layers.append(Experts(width, ep_size))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last layer's output."""
        result: Tensor = self.layers(x).float().square().mean()
        return result


def disturb(place: Place, seed: int) -> None:
    """Let streams be late at random, for the rest of this process: each before its own work, which
    is forward passes, sums, the exchange with owners, updates, gathers, and copies from and to the
    host."""
    luck = random.Random(seed + dist.get_rank())

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def delayed(*args: Any, **kwargs: Any) -> Any:
            if place.device == "cuda":
                torch.cuda._sleep(luck.randrange(5_000_000))
            else:
                time.sleep(luck.random() / 1000)
            return function(*args, **kwargs)

        return delayed

    Wire.reduce, Wire.gather = late(Wire.reduce), late(Wire.gather)
    Transfer.all_to_owners = late(Transfer.all_to_owners)
    Transfer.to_cuts = late(Transfer.to_cuts)
    Owned.update, nn.LayerNorm.forward = late(Owned.update), late(nn.LayerNorm.forward)
    # The stream of the copy is the current one in these calls.
    host_memory.transfer = late(host_memory.transfer)
    transfer.unpack = late(transfer.unpack)


def planned(
    only: Callable[[Bucket], bool], *, even: bool = False
) -> AbstractContextManager[object]:
    """Let engines that are made inside have the whole buckets that ``only`` selects in cuts, and
    with ``even`` the others as shards of one length."""
    plan = run_plan.plan_layout
    return unittest.mock.patch.object(
        run_plan,
        "plan_layout",
        lambda *args, **kwargs: in_cuts(plan(*args, **kwargs), only, even=even),
    )


def every_other_in_cuts() -> AbstractContextManager[object]:
    """Let engines that are made inside have every other whole bucket in cuts, which few ranks
    choose by themselves."""
    turns = itertools.cycle((True, False))
    return planned(lambda bucket: next(turns))


def two_nodes() -> AbstractContextManager[object]:
    """Let engines that are made inside take the ranks for those of two nodes."""
    half = dist.get_world_size() // 2
    return unittest.mock.patch.object(nodes, "node_of_each_rank", lambda: [0] * half + [1] * half)


def compiled(place: Place, engine: Any) -> None:
    """Compile the whole model. A CPU has no compiler, so graphs run as they are."""
    torch._dynamo.config.disable = False
    engine.compile(backend="eager" if place.device == "cpu" else "inductor")


def captured(place: Place, engine: Any) -> None:
    """Replay every layer as a graph. Without CUDA, replace the layer's calls, as graphs do."""
    engine.optimizer.wait_for_params()
    for number, layer in enumerate(engine.module.layers):
        if place.device == "cpu":
            layer.forward = functools.partial(type(layer).forward, layer)
            continue
        width = layer[0].in_features
        sample = torch.zeros(
            BATCH, width, dtype=torch.bfloat16, device=engine.device, requires_grad=number > 0
        )
        # This function takes no module that has hooks.
        hooks, layer._forward_pre_hooks = layer._forward_pre_hooks, OrderedDict()
        torch.cuda.make_graphed_callables(layer, (sample,))
        layer._forward_pre_hooks = hooks


#: Samples of a micro-batch of a race.
BATCH = 4
#: Setups by name. Compiled ones come last: after them no engine of the process leaves parameters
#: pending.
SETUPS = {
    "stage 1, native": Setup(),
    # One rank alone cuts nothing.
    "stage 1, ordered, in cuts": Setup(reduction="ordered", around=every_other_in_cuts),
    "stage 2, ordered, on the host": Setup(
        2,
        "ordered",
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5, "pin_memory": True}},
    ),
    "stage 3": Setup(3),
    # Then nothing of DeepSpeed's waits between the step and the first fetches.
    "stage 3, nothing persistent": Setup(
        3,
        zero={
            "stage3_param_persistence_threshold": 0,
            "stage3_model_persistence_threshold": 0,
        },
    ),
    "stage 3, cuts on the host": Setup(
        3,
        zero={
            "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_param_persistence_threshold": 0,
        },
    ),
    "two levels": Setup(2, around=two_nodes, least_ranks=4),
    "fp16": Setup(precision={"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "experts": Setup(has_experts=True),
    "captured": Setup(2, prepare=captured),
    "compiled": Setup(prepare=compiled),
}


def race(
    place: Place, *, overlap: bool, seed: int | None, without: Sequence[str] = ()
) -> dict[str, str]:
    """Return a digest of losses and weights after some steps for each setup, or the reason why
    there is none.

    Args:
        without: the names of setups that the environment makes impossible.
    """
    if seed is not None:
        disturb(place, seed)
    if place.device == "cpu":
        # DeepSpeed refuses fp16 as too slow.
        type(get_accelerator()).is_fp16_supported = lambda self: True
    digests = {}
    for name, setup in SETUPS.items():
        if name in without or dist.get_world_size() < setup.least_ranks:
            continue
        try:
            digests[name] = _digest(place, setup, overlap=overlap)
        except Exception as error:
            # A setup that fails on all ranks leaves the others.
            digests[name] = f"{type(error).__name__}: {error}"
    return digests


def _digest(place: Place, setup: Setup, *, overlap: bool) -> str:
    width, layers = (16, 3) if place.tiny else (1024, 24)
    gathers_late = {} if setup.stage == 3 else {"overlap_param_gather": overlap}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"synchronized": False}},
        "gradient_clipping": 1.0,
        # Each process that measures the faster dtype may find another one.
        "optimizer": {
            **OPTIMIZERS[OURS],
            "params": {**OPTIMIZERS[OURS]["params"], "ns_dtype": "bf16"},
        },
        "layerwise": {"reduction": setup.reduction, **gathers_late},
        "zero_optimization": {
            "stage": setup.stage,
            "overlap_comm": overlap,
            "reduce_bucket_size": 2 * width**2,
            **setup.zero,
        },
        **setup.precision,
    }
    model = Mlp(width, layers, has_experts=setup.has_experts)
    with setup.around():
        engine = ds_layerwise.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
    if setup.prepare is not None:
        setup.prepare(place, engine)
    dtype = torch.float16 if "fp16" in setup.precision else torch.bfloat16
    digest, losses = hashlib.sha256(), []
    for step in range(2 if place.tiny else 8):
        for micro in range(2):
            generator = torch.Generator().manual_seed(1000 * step + 100 * micro + dist.get_rank())
            loss = engine(torch.randn(BATCH, width, generator=generator).to(engine.device, dtype))
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
    # The parameters of the last step may be pending. At stage 3 a rank has no whole one.
    engine.optimizer.wait_for_params()
    for value in (torch.stack(losses), *engine.module.parameters()):
        digest.update(value.detach().float().cpu().numpy().tobytes())
    engine.destroy()
    return digest.hexdigest()[:16]


# --- memory


def allocated(place: Place) -> int:
    """Return the bytes of all tensors, with the allocator's rounding."""
    return torch.cuda.memory_allocated() if place.device == "cuda" else tensor_bytes()


def memory_of(place: Place) -> list[dict[str, Any]]:
    """Return this rank's memory between two steps and in a step, against the forecast, for each
    job."""
    rows = []
    jobs = [
        Job(
            folder="",
            layers=1 if place.tiny else 6,
            width=64 if place.tiny else 2048,
            stage=stage,
            bf16=bf16,
            bucket_numel=20_000 if place.tiny else 50_000_000,
            ranks=place.ranks,
        )
        for stage, bf16 in ((1, True), (2, True), (1, False))
    ]
    # Memory of the first engine of a process beside its tensors does not belong to the model.
    first, *_ = start(replace(jobs[0], layers=1, width=64))
    train(first, jobs[0])
    first.destroy()
    del first
    for job in jobs[:1] if place.tiny else jobs:
        gc.collect()
        before = allocated(place)
        engine, model = start(job)
        train(engine, job)
        place.finish()
        gc.collect()
        forecast, rank = engine.optimizer.forecast(), engine.optimizer.rank
        held = allocated(place) - before
        peak = None
        if place.device == "cuda":
            tokens = torch.randint(VOCABULARY, (1, job.context + 1)).to(engine.device)
            for _ in range(2):
                engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
                get_accelerator().synchronize()
                now = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                engine.step()
            get_accelerator().synchronize()
            peak = torch.cuda.max_memory_allocated() - now
        rows.append(
            {
                "job": job.name,
                "predicted": forecast.memory[rank].total,
                "held": held,
                "workspace": forecast.working.update,
                "peak": peak,
            }
        )
        engine.destroy()
        del engine, model
    return rows
