"""A published recipe here and with its authors' own optimizer, side by side on the same batches.

    python examples/benchmarks/published_recipe.py --theirs ../modded-nanogpt
    python examples/benchmarks/published_recipe.py --steps 20 --width 32 --layers 1 --context 16

The recipe is result 36 of KellerJordan/modded-nanogpt, records/track_3_optimization: Muon for
matrices, AdamW with three learning rates for the rest, constant rates and then a linear cooldown
over the last 70 % of 3,250 steps. Here it is ds_configs/modded_nanogpt.json under an engine of one
rank. Model and data are small: their architecture at --width, on the bytes of examples/data.py.

With --theirs, a checkout of that repository (or MODDED_NANOGPT in the environment), the other side
is its own code: the Muon of train_gpt_simple.py, its choice of parameters, rates and schedule, run
as they stand, except that bfloat16 becomes float32. Its model is compared with the one written
here, too. Without, the other side is the same rule as it is written down below.

Their loss is a sum over tokens, ours the mean that everybody has. Muon and AdamW do not see the
difference, except for AdamW's eps. So ours is theirs over the tokens of a step: 1e-10 / 524288 in
the config, and here over those of --batch and --context. Into --out go losses.csv and losses.png.
"""

from __future__ import annotations

import argparse
import ast
import copy
import csv
import importlib.util
import json
import math
import os
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ds_layerwise

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "ds_configs" / "modded_nanogpt.json"
#: The file with the recipe in a checkout of its repository.
SOURCE = Path("records") / "track_3_optimization" / "train_gpt_simple.py"
VOCABULARY, HEAD_WIDTH, STEPS, COOLDOWN, EPS = 256, 32, 3250, 0.7, 1e-10
#: Bounds of the relative difference of losses, at the first steps and at all.
FIRST, FIRST_BAR, BAR = 50, 1e-5, 1e-2


# --- the model, with the names of parameters that the recipe goes by


class Norm(nn.Module):
    """RMSNorm with a gain for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gains.shape, weight=self.gains)


def turned(x: Tensor) -> Tensor:
    """Return ``x`` (B, T, H, D) with its first half of pairs (i, i + D/2) turned by position. The
    other half stays."""
    half = x.shape[-1] // 2
    turns = half // 2
    frequencies = 1024 ** -(torch.arange(turns) / max(1, turns - 1))
    angles = F.pad(torch.outer(torch.arange(x.shape[1]), frequencies), (0, half - turns))[:, None]
    first, second = x.split(half, dim=-1)
    return torch.cat(
        (
            first * angles.cos() + second * angles.sin(),
            second * angles.cos() - first * angles.sin(),
        ),
        -1,
    )


class Attention(nn.Module):
    """Causal attention with normalised queries and keys, whose products are scaled by 0.12."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD_WIDTH)) for layer in (self.q, self.k, self.v))
        q, k = (turned(F.rms_norm(each, (HEAD_WIDTH,))) for each in (q, k))
        mixed = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), scale=0.12, is_causal=True
        )
        return self.proj(mixed.transpose(1, 2).flatten(-2))


class Mlp(nn.Module):
    """A network of squares of positive parts, four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.fc(x).relu().square())


class Block(nn.Module):
    """Attention, then the MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.mlp, self.norm1, self.norm2 = (
            Attention(width),
            Mlp(width),
            Norm(width),
            Norm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A model that takes inputs and targets ``(B, T)``, and returns the mean loss of a byte. Logits
    stay within 15 of 0."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.proj = nn.Linear(width, VOCABULARY)
        self.norm1, self.norm2 = Norm(width), Norm(width)
        for name, param in self.named_parameters():
            if name.endswith("bias") or "proj" in name:
                nn.init.zeros_(param)
            elif param.ndim > 1 and "embed" not in name:
                nn.init.normal_(param, std=math.sqrt(0.33 / param.shape[-1]))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.norm1(self.embed(inputs))
        for block in self.blocks:
            x = block(x)
        logits = self.proj(self.norm2(x))
        logits = 15 * logits / (logits.square() + 225).sqrt()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- the other side


@dataclass(frozen=True)
class Side:
    """The optimizers that update a model after its gradients are there, and the function that sets
    the rates of a step before."""

    optimizers: list[torch.optim.Optimizer]
    schedule: Callable[[int], object]
    whose: str


class StatedMuon(torch.optim.Optimizer):
    """The recipe's Muon as its formula reads: an average of gradients, Nesterov's look ahead,
    twelve steps of 2 X - 1.5 A X + 0.5 A A X with A = X Xᵀ, decoupled weight decay."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, weight_decay: float, mu: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "mu": mu})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.mul_(group["mu"]).add_((1 - group["mu"]) * param.grad)
                x = (1 - group["mu"]) * param.grad + group["mu"] * average
                rows, cols = x.shape
                x = x.T if rows > cols else x
                x = x / (x.norm() + 1e-7)
                for _ in range(12):
                    gram = x @ x.T
                    x = 2 * x + (0.5 * gram @ gram - 1.5 * gram) @ x
                x = (x.T if rows > cols else x) * math.sqrt(max(1, rows / cols))
                param.sub_(group["lr"] * group["weight_decay"] * param + group["lr"] * x)


def eta(step: int, num_steps: int = STEPS) -> float:
    """Return the factor of rates at ``step``, counted from 0, of so many."""
    return min(1.0, (1 - step / num_steps) / COOLDOWN)


def stated(model: Gpt, num_steps: int) -> Side:
    """Return the recipe as it is written down in this file."""
    groups = [
        ([model.embed.weight], 0.7),
        ([model.proj.weight], 0.004),
        ([param for param in model.parameters() if param.ndim < 2], 0.015),
    ]
    adamw = torch.optim.AdamW(
        [{"params": params, "lr": lr} for params, lr in groups],
        betas=(0.8, 0.95),
        eps=EPS,
        weight_decay=0.001,
    )
    muon = StatedMuon(
        [param for param in model.blocks.parameters() if param.ndim >= 2],
        lr=0.025,
        weight_decay=0.05,
    )
    every: list[torch.optim.Optimizer] = [adamw, muon]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda step: eta(step, num_steps)) for each in every
    ]

    def schedule(step: int) -> None:
        for each in schedules if step else ():
            each.step()

    return Side(every, schedule, "the recipe as written down here")


class _InFloat32(ast.NodeTransformer):
    """A transformer after which nothing is bfloat16, and nothing is compiled."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = "float" if node.attr == "bfloat16" else node.attr
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = [
            each for each in node.decorator_list if "compile" not in ast.unparse(each)
        ]
        return node


def published(checkout: Path, model: Gpt, num_steps: int) -> tuple[Side, nn.Module]:
    """Return the recipe's own code on ``model``, whose weights it sets, and its own model with the
    same weights.

    Raises:
        SystemExit: the checkout lacks the file or a name.
    """
    path = checkout / SOURCE
    if not path.is_file():
        raise SystemExit(f"published_recipe.py: --theirs {checkout}: there is no {SOURCE} in it")
    tree = _InFloat32().visit(ast.parse(path.read_text(), filename=str(path)))
    defined = [node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    trials = [node for node in tree.body if isinstance(node, ast.For)]
    setup = list(_until(trials[0].body, "set_hparams")) if trials else []
    if not setup:
        raise SystemExit(
            f"published_recipe.py: {path} sets up no training with set_hparams() in a loop"
        )
    names = {
        "torch": torch,
        "nn": nn,
        "F": F,
        "Tensor": Tensor,
        "AdamW": torch.optim.AdamW,
        "Path": Path,
        "os": os,
        "dist": torch.distributed,
        "model": model,
        "__name__": "published_recipe",
    }
    exec(
        compile(ast.fix_missing_locations(ast.Module([*defined, *setup], [])), str(path), "exec"),
        names,
    )
    names["train_steps"] = num_steps
    names["CausalSelfAttention"].__init__.__defaults__ = (HEAD_WIDTH,)
    width = model.embed.weight.shape[1]
    theirs: nn.Module = names["GPT"](VOCABULARY, len(model.blocks), width)
    missing, unknown = theirs.load_state_dict(model.state_dict(), strict=False)
    if unknown or not all("freq" in key for key in missing):
        raise SystemExit(
            f"published_recipe.py: the model of {path} has other parameters: {missing}, {unknown}"
        )
    return Side(names["optimizers"], names["set_hparams"], "its own code, in float32"), theirs


def _until(body: list[ast.stmt], function: str) -> Iterator[ast.stmt]:
    """Yield the statements up to the definition of ``function``; none if it is not there."""
    last = next(
        (
            i
            for i, node in enumerate(body)
            if isinstance(node, ast.FunctionDef) and node.name == function
        ),
        -1,
    )
    yield from body[: last + 1]


# --- both


def our_engine(model: Gpt, args: argparse.Namespace) -> Any:
    """Return the engine of our config."""
    config = json.loads(CONFIG.read_text())
    config["train_micro_batch_size_per_gpu"], config["steps_per_print"] = args.batch, 10**9
    config["optimizer"]["params"]["eps"] = EPS / (args.batch * args.context)
    engine, *_ = ds_layerwise.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: eta(step, args.of)
        ),
    )
    return engine


def batches(args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of one step after another."""
    data = runpy.run_path(str(ROOT / "examples" / "data.py"))
    tokens = data["load_corpus"](None, args.context).train
    for step in range(args.steps):
        windows = data["training_windows"](
            tokens, seed=args.seed, first=step * args.batch, size=args.batch, context=args.context
        )
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(args: argparse.Namespace) -> tuple[list[tuple[float, float]], str]:
    """Return the losses of every step, ours and theirs, before its update; and the name of the
    other side."""
    torch.manual_seed(args.seed)
    model = Gpt(args.layers, args.width)
    their_model = None
    if args.theirs is None:
        side = stated(model, args.of)
    else:
        side, their_model = published(args.theirs, model, args.of)
    engine, losses, tokens = our_engine(copy.deepcopy(model), args), [], args.batch * args.context
    for step, (inputs, targets) in enumerate(batches(args)):
        loss = engine(inputs, targets)
        their_loss = model(inputs, targets)
        if their_model is not None and not step:
            check_model(their_model, model, inputs, targets)
        losses.append((loss.item(), their_loss.item()))
        engine.backward(loss)
        engine.step()
        (their_loss * tokens).backward()
        side.schedule(step)
        for optimizer in side.optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if (step + 1) % 50 == 0:
            ours, theirs = losses[-1]
            print(f"step {step + 1}: {ours:.6f}, theirs {theirs:.6f}", file=sys.stderr, flush=True)
    return losses, side.whose


def check_model(theirs: nn.Module, ours: Gpt, inputs: Tensor, targets: Tensor) -> None:
    """Check that their model computes the same as ours, with weights other than those of the start,
    where most are zero.

    Raises:
        SystemExit: the outputs differ.
    """
    with torch.no_grad():
        some = copy.deepcopy(ours)
        for param in some.parameters():
            param.add_(0.1 * torch.randn(param.shape, generator=torch.Generator().manual_seed(1)))
        theirs.load_state_dict(some.state_dict(), strict=False)
        here, other = some(inputs, targets).item(), theirs(inputs, targets).item() / targets.numel()
    if abs(here - other) > 1e-5 * other:
        raise SystemExit(
            f"published_recipe.py: the loss of their model is {other}, and of the one here {here}"
        )


def apart(losses: list[tuple[float, float]]) -> float:
    """Return the largest difference of losses, over theirs."""
    return max(abs(ours - theirs) / theirs for ours, theirs in losses)


def table(losses: list[tuple[float, float]]) -> str:
    """Return losses at a few steps, and their largest difference until there."""
    rows = ["| step | ours | theirs | largest relative difference so far |", "|--:|--:|--:|--:|"]
    for step in (1, 2, 5, 10, 20, FIRST, 100, 200, 300, 400, 500, len(losses)):
        if step <= len(losses) and not rows[-1].startswith(f"| {step} |"):
            ours, theirs = losses[step - 1]
            rows.append(f"| {step} | {ours:.6f} | {theirs:.6f} | {apart(losses[:step]):.1e} |")
    return "\n".join(rows)


def write_out(losses: list[tuple[float, float]], out: Path) -> None:
    """Write losses.csv and, where matplotlib is installed, losses.png."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "losses.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [("step", "ours", "theirs"), *((i + 1, *row) for i, row in enumerate(losses))]
        )
    if importlib.util.find_spec("matplotlib") is None:
        print("no losses.png: pip install matplotlib draws one", file=sys.stderr)
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    ours, theirs = zip(*losses)
    left.plot(theirs, label="theirs", linewidth=2.5, alpha=0.5)
    left.plot(ours, label="ours", linewidth=0.8)
    left.set(xlabel="step", ylabel="training loss (nats per byte)")
    left.legend()
    right.semilogy([max(apart([each]), 1e-9) for each in losses])
    right.set(xlabel="step", ylabel="relative difference of losses")
    figure.savefig(out / "losses.png", dpi=80, bbox_inches="tight")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--theirs",
        type=Path,
        default=os.environ.get("MODDED_NANOGPT"),
        metavar="CHECKOUT",
        help="a checkout of KellerJordan/modded-nanogpt (default: MODDED_NANOGPT; else none)",
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--of", type=int, default=STEPS, help=f"steps that the schedule is for (default: {STEPS})"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/published_recipe"))
    args = parser.parse_args()
    args.theirs = None if args.theirs is None else Path(args.theirs)
    if (
        args.width % HEAD_WIDTH
        or min(args.width, args.steps, args.layers, args.batch, args.context) < 1
    ):
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, and all of at least 1")
    if args.of < args.steps:
        parser.error(f"--of {args.of} is shorter than --steps {args.steps}")
    return args


def main() -> None:
    """Train both, print the table; the exit code is 1 if they are further apart than the bars."""
    args = parse_arguments()
    torch.set_num_threads(1)
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    dist.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(minutes=5),
        rank=0,
        world_size=1,
    )
    began = time.perf_counter()
    losses, whose = train(args)
    first, every = apart(losses[:FIRST]), apart(losses)
    print(
        f"{args.steps} steps of a schedule of {args.of}, theirs: {whose}; {args.layers} layers of "
        f"width {args.width}, {args.batch} x {args.context} bytes a step, seed {args.seed}; "
        f"{time.perf_counter() - began:.0f} s\n\n{table(losses)}\n\nlargest relative difference of "
        f"losses: {first:.1e} in the first {min(FIRST, args.steps)} steps (bar {FIRST_BAR:g}), "
        f"{every:.1e} in all (bar {BAR:g})"
    )
    write_out(losses, args.out)
    dist.destroy_process_group()
    if first > FIRST_BAR or every > BAR:
        raise SystemExit("published_recipe.py: the two are further apart than that")


if __name__ == "__main__":
    main()
