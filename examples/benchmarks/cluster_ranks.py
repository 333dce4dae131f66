"""The ranks of a cluster for cluster.py: engines and synchronisations take turns, and their seconds
and bytes are noted."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed.comm as dist
import torch
from deepspeed.runtime.zero.muon import original_muon
from namespaces import Cluster, sent_bytes
from torch import Tensor, nn

import ds_layerwise
from ds_layerwise.optimizers.rules import muon_family
from ds_layerwise.plan.layout.layout import Layout, ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.comm import comm, nodes
from ds_layerwise.ranks.owned.buffers import FlatBuffer, dtype_name
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync.bucket_transfers import Wires, make_wires
from ds_layerwise.ranks.sync.grad_sync import GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from model import GPT, VOCABULARY, GPTConfig

OURS, STOCK, ADAMW = "LayerWiseMuon", "stock Muon", "stock AdamW"
#: The name of our synchronisations without an engine.
SYNCS = "ours, no engine"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    OURS: {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3}},
    STOCK: {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 3e-3, "torch_adam": True}},
    ADAMW: {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
}
#: Elements of a bucket of ours, where there are several. Stock would gain nothing from several, and
#: has one.
BUCKET_NUMEL = 2_500_000
#: Whole steps in a turn.
STEPS_A_TURN = 2


class Spent(NamedTuple):
    """The cost of one operation of all ranks: seconds until the last is done, and the bytes that
    the mean node sent."""

    seconds: float
    sent: float


class Steps(NamedTuple):
    """The cost of one step: all of it, and its passes through the model alone."""

    whole: Spent
    passes: Spent

    @property
    def optimizer_seconds(self) -> float:
        """Return the seconds of gradients' way to their owners, updates, and weights' way back."""
        return self.whole.seconds - self.passes.seconds


class Side(NamedTuple):
    """A side of a comparison: the operations that are measured, and the calls before and after
    them."""

    operations: Sequence[Callable[[], object]]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def spent_by(operation: Callable[[], object], cluster: Cluster) -> Spent:
    """Do ``operation`` on all ranks together."""
    dist.barrier()
    before, start = sent_bytes(), time.monotonic()
    operation()
    dist.barrier()
    seconds, sent = time.monotonic() - start, sent_bytes() - before
    everyone = comm.gather_objects((seconds, sent), group=None)
    return Spent(
        max(each for each, _ in everyone), sum(each for _, each in everyone) / cluster.ranks
    )


def take_turns(sides: Mapping[str, Side], cluster: Cluster, rounds: int) -> dict[str, list[Spent]]:
    """Return the median of each operation of each side, after one round that does not count."""
    taken: dict[str, list[list[Spent]]] = {
        name: [[] for _ in side.operations] for name, side in sides.items()
    }
    for turn in range(rounds + 1):
        for name, side in sides.items():
            side.before()
            for operation, all_of_it in zip(side.operations, taken[name], strict=True):
                spent = spent_by(operation, cluster)
                if turn:
                    all_of_it.append(spent)
            side.after()
        if int(os.environ["RANK"]) == 0:
            print(
                turn,
                {
                    name: [f"{costs[-1].seconds:.2f}" for costs in of_side if costs]
                    for name, of_side in taken.items()
                },
                file=sys.stderr,
                flush=True,
            )
    return {
        name: [Spent(*map(statistics.median, zip(*costs, strict=True))) for costs in of_side]
        for name, of_side in taken.items()
    }


class Parameters(nn.Module):
    """The parameters of ``model`` under their names, and a loss that costs next to nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        """Return the sum of all parameters."""
        return torch.stack([param.sum() for param in self.model.parameters()]).sum()


def make_engine(
    optimizer: str,
    model: nn.Module,
    bucket_numel: int,
    *,
    overlap: bool = False,
    zero: Mapping[str, Any] | None = None,
) -> Any:
    """Return an engine in the configuration that is best here: float32, stage 1. Without streams,
    stock has nothing to overlap.

    Args:
        zero: further keys of ``zero_optimization``, of all sides.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 1},
        "optimizer": OPTIMIZERS[optimizer],
    }
    if optimizer == OURS:
        config["zero_optimization"] = {
            "stage": 1,
            "overlap_comm": True,
            "reduce_bucket_size": bucket_numel,
        }
        config["layerwise"] = {"overlap_param_gather": overlap}
    config["zero_optimization"] |= zero or {}
    if optimizer == STOCK and config["zero_optimization"]["stage"] == 3:
        # Stock refuses to start without this.
        config["zero_optimization"]["reduce_scatter"] = False
    return ds_layerwise.initialize(model=model, model_parameters=model.parameters(), config=config)[
        0
    ]


def leave_out_newton_schulz() -> None:
    """Let matrices stay as they are on all sides, for the rest of this process."""
    original_muon.zeropower_via_gram_newtonschulz = lambda matrix, steps: matrix
    muon_family.newton_schulz = lambda matrix, coefficients, **kwargs: matrix


class Syncs:
    """Reduction and gather of ``layout`` without an engine, on numbers whose averages are known."""

    def __init__(self, layout: Layout, wires: Wires, dtype: torch.dtype) -> None:
        self.layout, rank = layout, dist.get_rank()
        self._values, grads = (
            FlatBuffer(layout, torch.device("cpu"), dict.fromkeys(layout.buffers, dtype))
            for _ in range(2)
        )
        self._trained = {
            slot.name: nn.Parameter(torch.zeros(1, dtype=dtype).expand(slot.numel))
            for bucket in layout.buckets
            for slot in bucket.slots
        }
        self._reduced = ReducedGradients(layout, rank, grads, torch.device("cpu"))
        self._grads = GradSync(
            self._trained,
            self._reduced,
            grads,
            wires=wires,
            divide_by=float(layout.world_size),
            sent_as=[dtype_name(dtype)] * len(layout.buckets),
        )
        self._params = ParamSync(rank, self._trained, self._values, wires=wires)

    @property
    def side(self) -> Side:
        """Return the two operations as a side."""
        return Side((self.reduce, self.gather), self.prepare, self.check)

    def prepare(self) -> None:
        """Fill in gradients and updated shards of this rank."""
        rank = dist.get_rank()
        self._grads.reset()
        for name, param in self._trained.items():
            param.grad = torch.full_like(param, rank)
            self._grads.accumulate(name, launch=False)
        for bucket in self.layout.buckets:
            self._values.tensors[bucket.index].fill_(-1)
            self._values.shard(bucket, rank).fill_(rank)

    def reduce(self) -> None:
        """Send all gradients' averages to the owners."""
        self._grads.reduce()
        self._grads.finish()

    def gather(self) -> None:
        """Send all updated shards to all ranks."""
        for index in reversed(range(len(self.layout.buckets))):
            self._params.launch(index)
        self._params.finish()

    def check(self) -> None:
        """Raise unless every element arrived."""
        mean, size = (self.layout.world_size - 1) / 2, self.layout.world_size
        for bucket in self.layout.buckets:
            pieces = [
                self._reduced.piece(piece.name) for piece in self._reduced.pieces[bucket.index]
            ]
            if any(not torch.all(piece == mean) for piece in pieces):
                raise ValueError(f"bucket {bucket.index} was not averaged")
            for rank in range(size):
                for piece in bucket.pieces(rank):
                    whole = self._values.tensors[bucket.index]
                    place = whole[piece.start - bucket.start :][: piece.numel]
                    if not torch.all(place == rank):
                        raise ValueError(f"bucket {bucket.index} did not arrive")


def wires_here() -> Wires:
    """Return the wires of all ranks, with sums in rank order."""
    return make_wires(
        {1: None}, nodes.node_of_each_rank(), native=False, device=torch.device("cpu")
    )


class Wire(NamedTuple):
    """The cost of reductions and gathers of one layout, or of one side."""

    reduce: Spent
    gather: Spent

    @property
    def seconds(self) -> float:
        """Return the seconds of both."""
        return self.reduce.seconds + self.gather.seconds


def on_the_wire(
    cluster: Cluster, *, config: GPTConfig, bucket_numel: int, rounds: int, names: Sequence[str]
) -> Any:
    """Return the cost by side, for engines without computation and our synchronisations alone; the
    bytes of the model; and the transports of its buckets.
    """
    leave_out_newton_schulz()
    numel = sum(param.numel() for param in GPT(config).parameters())
    sides, layout = {}, None
    for name in names:
        engine = make_engine(name, Parameters(GPT(config)), bucket_numel)
        layout = engine.optimizer.layout if name == OURS else layout
        sides[name] = Side((lambda engine=engine: engine.backward(engine()), engine.step))
    assert layout is not None
    wires = wires_here()
    sides[SYNCS] = Syncs(layout, wires, torch.float32).side
    taken = {name: Wire(*costs) for name, costs in take_turns(sides, cluster, rounds).items()}
    return taken, 4 * numel, [bucket.transport for bucket in layout.buckets]


def whole_steps(
    cluster: Cluster,
    *,
    config: GPTConfig,
    tokens: int,
    rounds: int,
    zero: Mapping[str, Any] | None = None,
    updates: bool = True,
) -> dict[str, Steps]:
    """Measure real steps by side: forward, backward, and the optimizer's. Their passes are two
    forward passes without gradients: at stage 3 they fetch parameters as a forward and a backward
    pass do, and compute a third less.

    A turn is several steps, and over when all messages have arrived: those sent during the next
    forward pass count, too.

    Args:
        zero: further keys of ``zero_optimization``, of all sides.
        updates: False to leave out Newton-Schulz on all sides.
    """
    if not updates:
        leave_out_newton_schulz()
    sides = {}
    for name in OPTIMIZERS:
        overlap = not zero or zero.get("stage") != 3
        engine = make_engine(name, GPT(config), BUCKET_NUMEL, overlap=overlap, zero=zero)
        windows = torch.randint(
            VOCABULARY,
            (tokens // config.context, config.context + 1),
            generator=torch.Generator().manual_seed(dist.get_rank()),
        )

        def step(engine: Any = engine, windows: Tensor = windows) -> None:
            for _ in range(STEPS_A_TURN):
                engine.backward(engine(windows[:, :-1], windows[:, 1:]))
                engine.step()
            for param in engine.module.parameters():
                param.sum()

        def passes(engine: Any = engine, windows: Tensor = windows) -> None:
            with torch.no_grad():
                for _ in range(2 * STEPS_A_TURN):
                    engine(windows[:, :-1], windows[:, 1:])

        sides[name] = Side((step, passes))
    return {
        name: Steps(*(Spent(*(each / STEPS_A_TURN for each in spent)) for spent in taken))
        for name, taken in take_turns(sides, cluster, rounds).items()
    }


def one_matrix_a_bucket(cluster: Cluster, *, numel: int, rounds: int) -> Any:
    """Measure as many matrices as ranks, no two of the same shape, so that nothing goes in rows: in
    cuts, and the same bytes evenly."""
    wires, size = wires_here(), cluster.ranks
    sides = {}
    # Each is a little larger than the one before. Together they are size x numel elements.
    rows = [numel // 1024 + 8 * (2 * index - size + 1) for index in range(size)]
    for dtype in (torch.float32, torch.bfloat16):
        wire = dtype_name(dtype)
        for whole, name in ((False, f"even {wire}"), (True, f"matrices {wire}")):
            layout = plan_layout(
                [
                    ParamSpec(
                        f"matrix{index}",
                        (number, 1024),
                        wire,
                        whole,
                        number if whole else 0,
                        wire=wire,
                    )
                    for index, number in enumerate(rows)
                ],
                size,
                bucket_numel=1,
            )
            transports = {bucket.transport for bucket in layout.buckets}
            if transports != {"cuts" if whole else "even"} or len(layout.buckets) != size:
                raise ValueError(
                    f"{name} was meant to be {size} buckets alike, and is {layout.buckets}"
                )
            sides[name] = Syncs(layout, wires, dtype).side
    return {name: Wire(*costs) for name, costs in take_turns(sides, cluster, rounds).items()}
