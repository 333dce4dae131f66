"""Memory of a rank in real training, at ZeRO stages 1 to 3, against what ``ds-layerwise plan``
says.

    python examples/benchmarks/memory.py > examples/benchmarks/results/YYYY-MM_<hardware>_memory.md

*held* is what the plan says of the memory between two steps: parameters, gradients, masters and
states. Two numbers measure a rank's memory. *tensors* adds up every tensor of the process that is
alive between two steps and was not before the model was built, each memory once: exact, whoever
made them. On a CPU the buffers in which two buckets travel stay, so it is more than what is held,
by at most the *transfers* of the plan. *process* is anonymous memory (``Pss_Anon`` in /proc, so
Linux alone) over that before the model was built; it includes the allocator's reserves. The peak of
gradients comes from the same count of tensors, at every moment of a backward pass when a bucket
starts, over the memory between two steps. That of a step is counted after every operation, over the
same, and is at most the *update* and the transfers of the plan.

A plan counts updates as accelerators make them: with as many matrices in a batch as fill one. It
does not know the device, so products are in float32. These runs batch and multiply in the same way.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import torch
from conditions import conditions
from measuring import anonymous_mb, run_ranks, settle
from torch import Tensor, nn

import ds_layerwise
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.optimizers.rules import muon_family
from ds_layerwise.orthogonalize.batching import MAX_BATCH_NUMEL
from ds_layerwise.plan.forecast.forecast import forecast, specs_of
from ds_layerwise.ranks.owned import owned
from ds_layerwise.ranks.sync.bucket_transfers import Wire

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.support.live_memory import LiveMemory

#: The most that an update may take beyond the plan's bound, in percent.
BAR_PERCENT = 2.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a training."""

    folder: str
    layers: int = 15
    width: int = 768
    context: int = 16
    bucket_numel: int = 8_000_000
    ranks: int = 2
    stage: int = 1
    bf16: bool = False

    @property
    def name(self) -> str:
        """Return the name of its results."""
        return f"stage-{self.stage}-{'bf16' if self.bf16 else 'fp32'}"

    def ds_config(self) -> dict[str, Any]:
        """Return the config of the engine and of the plan."""
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "steps_per_print": 10**9,
            "bf16": {"enabled": self.bf16},
            # Two steps of Newton-Schulz are enough: any further one takes the same memory.
            "optimizer": {
                "type": "LayerWiseMuon",
                "params": {"muon_lr": 0.01, "adam_lr": 0.01, "ns_steps": 2, "ns_dtype": "fp32"},
            },
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.bucket_numel,
                "overlap_comm": True,
            },
        }


def example_model() -> ModuleType:
    """Import examples/model.py by its path: the name ``model`` could find another one."""
    path = Path(__file__).resolve().parents[1] / "model.py"
    spec = importlib.util.spec_from_file_location("examples_model", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def build(job: Job) -> nn.Module:
    """Return the GPT of the examples."""
    model = example_model()
    built: nn.Module = model.GPT(
        model.GPTConfig(
            layers=job.layers, width=job.width, heads=job.width // 64, context=job.context
        )
    )
    return built


def live_tensors() -> list[Tensor]:
    """Return all tensors that are alive."""
    return [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]


def tensor_bytes() -> int:
    """Return the memory of every tensor that is alive, each memory once."""
    held: dict[int, int] = {}
    for item in live_tensors():
        storage = item.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


class Peak:
    """The most of :func:`tensor_bytes` over ``base``, counted when a bucket starts and before it is
    sent."""

    def __init__(self, optimizer: Any, base: int) -> None:
        self.base, self.most, self._sync = base, 0, optimizer._run.grad_sync._scheduler
        self._launch, self._reduce = self._sync._launch, Wire.reduce

    def look(self, then: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Count, do ``then``, count again."""
        self.most = max(self.most, tensor_bytes() - self.base)
        result = then(*args, **kwargs)
        self.most = max(self.most, tensor_bytes() - self.base)
        return result

    def __enter__(self) -> Peak:
        self._sync._launch = functools.partial(self.look, self._launch)
        Wire.reduce = lambda wire, *args, **kwargs: self.look(self._reduce, wire, *args, **kwargs)
        return self

    def __exit__(self, *_: object) -> None:
        self._sync._launch, Wire.reduce = self._launch, self._reduce


def batch_as_accelerators_do() -> None:
    """Replace the size of a batch on a CPU."""
    for module in (muon_family, owned):
        module.max_batch_numel = lambda device: MAX_BATCH_NUMEL


def start(job: Job) -> tuple[Any, nn.Module]:
    """Return an engine and its model."""
    model = build(job)
    return ds_layerwise.initialize(
        model=model, model_parameters=model.parameters(), config=job.ds_config()
    )[0], model


def train(engine: Any, job: Job, update: AbstractContextManager[Any] | None = None) -> None:
    """Take one step of two micro-batches, under ``update`` while it updates."""
    for under in (nullcontext(), update or nullcontext()):
        tokens = torch.randint(256, (1, job.context + 1)).to(engine.device)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        with under:
            engine.step()


def measure(job: Job, watched: Any) -> None:
    """Train for three steps and write this rank's memory down."""
    batch_as_accelerators_do()
    # Memory of the first engine of a process beside its tensors does not belong to the model.
    first, *_ = start(replace(job, layers=1, width=64))
    train(first, job)
    first.destroy()
    del first
    gc.collect()
    settle()
    before, others = anonymous_mb(os.getpid()), tensor_bytes()
    engine, model = start(job)
    optimizer = engine.optimizer
    shapes = optimizer.saved_shapes
    train(engine, job)
    gc.collect()
    settle()
    tensors, process = tensor_bytes() - others, anonymous_mb(os.getpid()) - before
    with Peak(optimizer, tensors + others) as peak:
        train(engine, job)
    update = LiveMemory(live_tensors())
    train(engine, job, update)
    run = RunConfig.from_ds_config(job.ds_config())
    params = [(name, shapes[name], run.param_dtype) for name, _ in model.named_parameters()]
    routes = optimizer.routes
    wires = dict.fromkeys(shapes, run.sent_as(run.param_dtype))
    plan = forecast(specs_of(params, routes, wires=wires), routes, run, job.ranks)
    if plan.layout.digest() != optimizer.layout.digest():
        raise RuntimeError("the plan is for another layout than the engine's")
    held = plan.memory[optimizer.rank]
    itemsize = 2 if job.bf16 else 4
    Path(job.folder, f"{job.name}-{optimizer.rank}").write_text(
        json.dumps(
            {
                "job": job.name,
                "rank": optimizer.rank,
                "held": held.total,
                "tensors": tensors,
                "beside": tensors - held.total,
                "transfers": plan.working.transfers,
                "process": process * 1e6,
                "grads": held.grads,
                "peak": peak.most,
                "update": update.peak - tensors - others,
                "update_said": max(plan.working.update, plan.working.exchange),
                "bucket": max(bucket.numel for bucket in plan.layout.buckets) * itemsize,
                "numel": plan.report.numel,
                "buckets": plan.report.num_buckets,
            }
        )
    )


def rows(results: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "| run | rank | held | tensors | beside | transfers, at most | process | gradients held | "
        "one bucket of gradients | peak over what is held | peak of a step over it | update, at "
        "most |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        mb = {
            key: f"{r[key] / 1e6:.1f}"
            for key in r
            if key not in ("job", "rank", "numel", "buckets")
        }
        lines.append(
            f"| {r['job']} | {r['rank']} | {mb['held']} | {mb['tensors']} | {mb['beside']} | "
            f"{mb['transfers']} | {mb['process']} | {mb['grads']} | {mb['bucket']} | "
            f"{mb['peak']} | {mb['update']} | {mb['update_said']} |"
        )
    return lines


def is_as_said(result: dict[str, Any]) -> bool:
    """Tell whether a rank holds what the plan says, and works in no more."""
    of_transfers = 0 <= result["beside"] <= result["transfers"]
    most = result["update_said"] + result["transfers"]
    return bool(of_transfers and result["update"] <= (1 + BAR_PERCENT / 100) * most)


def main() -> None:
    """Print one markdown table, after all output of the engines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="one run of a tiny model: shows that all of it works"
    )
    small: dict[str, Any] = (
        {"layers": 2, "width": 64, "bucket_numel": 20_000} if parser.parse_args().small else {}
    )
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in (2, 3) if small else (1, 2, 3):
            for bf16 in (True,) if small else (False, True):
                job = Job(folder=folder, stage=stage, bf16=bf16, **small)
                Path(folder, f"store-{job.ranks}").unlink(missing_ok=True)
                run_ranks(folder, job.ranks, functools.partial(measure, job))
                results += [
                    json.loads(Path(folder, f"{job.name}-{rank}").read_text())
                    for rank in range(job.ranks)
                ]
    print(
        "Memory of a rank between two steps and in a backward pass, in MB. python "
        "examples/benchmarks/memory.py"
    )
    print(
        f"{conditions()}; deepspeed {deepspeed.__version__}, torch {torch.__version__}. "
        f"{results[0]['numel'] / 1e6:.1f} M parameters in {results[0]['buckets']} buckets, "
        f"{job.ranks} ranks over gloo, two micro-batches a step, overlap_comm.\n"
    )
    print("\n".join(rows(results)))
    if not all(map(is_as_said, results)):
        sys.exit("a rank holds or works in something else than the plan says")


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
