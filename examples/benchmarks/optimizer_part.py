"""The optimizer's part of a step, all but forward and backward: ours against stock DeepSpeed's
Muon, on one machine.

    python examples/benchmarks/optimizer_part.py >
    examples/benchmarks/results/YYYY-MM_<hardware>_optimizer_part.md

The model is a GPT of 29 M parameters in float32, ZeRO 1, gloo, one thread a rank. Gradients are
there at once, so that a step is their reduction, the update, and the gather of weights. The time in
which autograd hands them out is measured alone, and subtracted. All sides take turns in the same
processes, and a turn is as long as its slowest rank's; numbers are medians.

"Textbook products" are the three products of each of five Newton-Schulz iterations, in float32, of
the matrices that a rank owns, and nothing else: neither collectives nor momentum. A ratio to them
says the same on different CPUs.

With ``--products`` stock is left out: where a CPU has no fast bfloat16, its steps take minutes.

Stock's Newton-Schulz runs in one dtype for each method: "standard" in bfloat16 where the CPU has
it, "gram" in float32 where the CPU has no float16. Ours has the same number of steps in the same
dtype, and "auto" is compared with the faster of both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from conditions import commit, processor
from deepspeed.runtime.zero.muon.original_muon import ns_compute_dtype
from measuring import run_ranks
from torch import Tensor, nn

import ds_layerwise
from ds_layerwise.ranks.comm import comm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from model import GPT, GPTConfig

STEPS = 5
#: Bounds by number of ranks, for ours over stock's in the same dtype of Newton-Schulz; and for
#: "auto" over the faster.
BARS = {2: 0.70, 4: 0.60}
AUTO_BAR = 0.55
#: For ours in float32 over the textbook products, on two ranks.
PRODUCTS_BAR = 0.72
BARE = "autograd alone"
TEXTBOOK = "textbook products, float32"
#: The coefficients of five equal iterations, https://kellerjordan.github.io/posts/muon/.
_A, _B, _C = 3.4445, -4.7750, 2.0315

#: Names of dtypes in ``ns_dtype``.
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

Seconds = dict[str, float]


class _GradientsAtHand(torch.autograd.Function):
    """A loss whose gradients have been computed."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


class Parameters(nn.Module):
    """The parameters of ``model`` under their names, and a loss that has ``gradients``, in their
    order.
    """

    def __init__(self, model: nn.Module, gradients: list[Tensor]) -> None:
        super().__init__()
        self.model, self._gradients = model, gradients

    def forward(self) -> Tensor:
        """Return the loss."""
        return _GradientsAtHand.apply(  # type: ignore[no-untyped-call]
            self._gradients, *self.model.parameters()
        )


def optimizers(*, with_stock: bool) -> dict[str, dict[str, Any]]:
    """Return the ``optimizer`` section of each side, by name: stock's for each dtype that it
    computes in here, and ours in these, in its own choice, and in float32; or that one alone.
    """
    rates = {"muon_lr": 0.02, "adam_lr": 3e-3}
    stock = {
        _named(ns_compute_dtype(method)): {
            "type": "Muon",
            "params": {**rates, "torch_adam": True, "ns_method": method, "ns_steps": STEPS},
        }
        for method in (("standard", "gram") if with_stock else ())
    }
    ours = {
        dtype: {
            "type": "LayerWiseMuon",
            "params": {**rates, "ns_dtype": _SHORT.get(dtype, dtype), "ns_steps": STEPS},
        }
        for dtype in (*stock, *(["auto"] * with_stock), "float32")
    }
    return {
        **{f"stock Muon, {dtype}": section for dtype, section in stock.items()},
        **{f"LayerWiseMuon, {dtype}": section for dtype, section in ours.items()},
    }


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sides_of(config: GPTConfig, *, with_stock: bool) -> dict[str, Callable[[], object]]:
    """Return a step of each engine, and the backward pass of a module without one."""
    torch.manual_seed(dist.get_rank())
    gradients = [torch.randn_like(param) for param in GPT(config).parameters()]
    bare = Parameters(GPT(config), gradients)

    def autograd() -> None:
        bare().backward()
        bare.zero_grad()

    sides: dict[str, Callable[[], object]] = {BARE: autograd}
    for name, section in optimizers(with_stock=with_stock).items():
        module = Parameters(GPT(config), gradients)
        engine = ds_layerwise.initialize(
            model=module,
            model_parameters=module.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 1.0,
                "steps_per_print": 10**9,
                "zero_optimization": {"stage": 1},
                "optimizer": section,
            },
        )[0]
        sides[name] = partial(_step, engine)
    sides[TEXTBOOK] = partial(_multiply, _owned(engine))
    return sides


def _owned(engine: Any) -> list[Tensor]:
    """Return matrices with the shapes of those that this rank owns, wide or square."""
    routes = engine.optimizer.routes
    matrices = []
    for bucket in engine.optimizer.layout.buckets:
        for slot in bucket.slots if bucket.whole else ():
            if engine.global_rank in bucket.owners(slot):
                matrix = torch.randn(routes[slot.name].matrix_shape)
                matrices.append(matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT)
    return matrices


def _multiply(matrices: list[Tensor]) -> None:
    for matrix in matrices:
        found = matrix / matrix.norm()
        for _ in range(STEPS):
            gram = found @ found.mT
            found = torch.addmm(
                found, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), found, beta=_A
            )


def _step(engine: Any) -> None:
    engine.backward(engine())
    engine.step()


def measure(config: GPTConfig, rounds: int, with_stock: bool, into: Path, _: object) -> None:
    """Let all sides take turns, and write the median of each, over turns, of its slowest rank."""
    # Messages of starting engines do not belong to the report.
    sys.stdout = sys.stderr
    sides = sides_of(config, with_stock=with_stock)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            dist.barrier()
            start = time.monotonic()
            side()
            seconds = time.monotonic() - start
            slowest = max(comm.gather_objects(seconds, group=None))
            # The first turn compiles, and allocates the memory of all later ones.
            if turn:
                taken[name].append(slowest)
    if dist.get_rank() == 0:
        into.write_text(
            "\n".join(f"{name}\t{statistics.median(each)}" for name, each in taken.items())
        )


def seconds_on(ranks: int, config: GPTConfig, rounds: int, *, with_stock: bool) -> Seconds:
    """Return the seconds of each side on so many ranks, without those of autograd."""
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "taken"
        run_ranks(folder, ranks, partial(measure, config, rounds, with_stock, into))
        found = {
            name: float(seconds)
            for name, _, seconds in (line.partition("\t") for line in into.read_text().splitlines())
        }
    bare = found.pop(BARE)
    of_products = found.pop(TEXTBOOK)
    steps = {name: seconds - bare for name, seconds in found.items()}
    return {BARE: bare, TEXTBOOK: of_products, **steps}


def rows_of(ranks: int, taken: Mapping[str, float]) -> list[str]:
    """Return rows of the table of bars."""
    stock = {
        name.partition(", ")[2]: seconds
        for name, seconds in taken.items()
        if name.startswith("stock")
    }
    bars = [
        (f"both in {dtype}", taken[f"LayerWiseMuon, {dtype}"] / seconds, BARS.get(ranks))
        for dtype, seconds in stock.items()
    ]
    if stock:
        ratio = taken["LayerWiseMuon, auto"] / min(stock.values())
        bars.append(('"auto" over stock\'s faster', ratio, AUTO_BAR))
    ratio = taken["LayerWiseMuon, float32"] / taken[TEXTBOOK]
    bars.append(("in float32 over textbook products", ratio, PRODUCTS_BAR if ranks == 2 else None))
    return [
        f"| {ranks} ranks, {what} | {found:.3f} | "
        + ("| |" if bar is None else f"{bar:.2f} | {'yes' if found <= bar else 'no'} |")
        for what, found, bar in bars
    ]


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side (default: 9)")
    parser.add_argument(
        "--products", action="store_true", help="leave stock out: ours over textbook products"
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="a tiny model, to see that it runs; its times say nothing",
    )
    args = parser.parse_args()
    config = (
        GPTConfig(layers=2, width=64) if args.small else GPTConfig(layers=9, width=512, heads=8)
    )
    load = os.getloadavg()[0]
    taken = {}
    for ranks in args.ranks:
        taken[ranks] = seconds_on(ranks, config, args.rounds, with_stock=not args.products)
    numel = sum(param.numel() for param in GPT(config).parameters()) / 1e6
    print(
        "The optimizer's part of a step, ours over stock Muon's. " + " ".join(["python", *sys.argv])
    )
    print(
        f"{processor()}, gloo, deepspeed {deepspeed.__version__}, torch {torch.__version__}; "
        f"commit {commit()}; load before {load:.1f}, after {os.getloadavg()[0]:.1f}.\nGPT of "
        f"{numel:.1f} M parameters; medians of {args.rounds} turns.\n"
    )
    print("| what | found | at most | reached |\n|---|---|---|---|")
    print(
        "\n".join(row for ranks, each in taken.items() for row in rows_of(ranks, each)), end="\n\n"
    )
    print("| ranks | side | s |\n|---|---|---|")
    print(
        "\n".join(
            f"| {ranks} | {name} | {seconds:.3f} |"
            for ranks, each in taken.items()
            for name, seconds in each.items()
        )
    )


if __name__ == "__main__":
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
