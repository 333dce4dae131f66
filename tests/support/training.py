"""Training with a real engine: a model with parameters of every kind, a config, and values that tests compare."""

from __future__ import annotations

from typing import Any

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

import ds_layerwise
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from tests.support import internals
from tests.support.reference import Recipe, trainable, whole_number_loss


class Net(nn.Module):
    """A model with matrices of several shapes, an embedding, a head that may be tied, vectors, and parts that may be
    frozen.

    Its loss has gradients of whole numbers, different in every step, micro-batch and rank.
    """

    def __init__(self, *, tied=False, frozen=False, odd=False):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Embedding(17, 12)
        self.square, self.tall, self.flat = nn.Linear(12, 12), nn.Linear(12, 40), nn.Linear(40, 12)
        self.twin = nn.Linear(12, 12, bias=False)
        self.norm = nn.LayerNorm(12)
        self.conv = nn.Conv2d(3, 5, 3)
        self.experts = nn.Parameter(torch.randn(3, 6, 9))
        if odd:
            self.empty = nn.Parameter(torch.zeros(0, 12))
            self.transposed = nn.Parameter(torch.randn(24, 12).t())
            self.unused = nn.Linear(12, 8)
        self.head = nn.Linear(12, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if frozen:
            self.tall.weight.requires_grad = self.norm.bias.requires_grad = False

    def forward(self, place):
        skipped = {"unused.weight", "unused.bias"}
        return whole_number_loss(self, place, skipped)


MATRICES = {"square.weight": (1, 12, 12), "tall.weight": (1, 40, 12), "flat.weight": (1, 12, 40),
            "twin.weight": (1, 12, 12), "conv.weight": (1, 5, 27), "experts": (3, 6, 9), "transposed": (1, 12, 24),
            "unused.weight": (1, 8, 12)}

#: Models with parameters of other kinds: tied, frozen, unused, empty and non-contiguous ones.
VARIANTS = {"plain": {}, "tied": {"tied": True}, "frozen": {"frozen": True}, "odd": {"odd": True}}

MUON = {"lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1, "decay_vectors": True, "ns_method": "standard",
        "ns_dtype": "fp32"}


def recipe_for(module, **kwargs):
    """Return the recipe by which the oracle does as ``ds_config`` says."""
    names = trainable(module)
    return Recipe(matrices={n: v for n, v in MATRICES.items() if n in names}, world_size=dist.get_world_size(),
                  muon_lr=0.02, adam_lr=0.003, weight_decay=0.1, **kwargs)


def ds_config(*, gas=1, clip=0.0, bucket_numel=600, overlap=True, stage=1, layerwise=None, params=None, **changes):
    """Return a DeepSpeed config; ``changes`` are top-level sections."""
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas, "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket_numel, "overlap_comm": overlap},
        "optimizer": {"type": "LayerWiseMuon", "params": {**MUON, **(params or {})}},
        "layerwise": layerwise or {}, "steps_per_print": 10**9, **changes,
    }


BF16 = {"bf16": {"enabled": True}}

#: Sections of a config with half of masters and states on the host.
ON_HOST = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 600,
                                 "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}

#: Overrides for :class:`Net`: parts that lie in one piece, between others, and in blocks of rows.
PARTS = [{"name": "tall.weight", "split": {"q": 10, "k": 10}, "split_groups": 2},
         {"name": "flat.weight", "split": {"q": 10, "k": 30}, "split_axis": "in"},
         {"name": "square.weight", "num_heads": 3}]

#: Sections of a config, by the fixture ``precision``.
PRECISIONS = {"fp32": {}, "bf16": BF16}


def allow_fp16():
    """Let the engine train in fp16 on a CPU without fp16 matrix units, where DeepSpeed refuses it as too slow."""
    accelerator = get_accelerator()
    type(accelerator).is_fp16_supported = lambda self: True


def start(module, config, **kwargs):
    """Return a DeepSpeed engine on this backend."""
    engine, *_ = ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=config, **kwargs)
    return engine


def train_engine(engine, num_steps, *, gas=1, first=0, check=None):
    """Train on whole-number gradients; ``check(step, reduced_gradients)`` runs between backward and step. Return the
    engine."""
    for step in range(first, first + num_steps):
        for micro in range(gas):
            engine.backward(engine((step, micro, dist.get_rank())))
            if check and micro == gas - 1:
                check(step, reduced_gradients(engine))
            engine.step()
    return engine


def train_engines(engines, num_steps, **options):
    """Train several engines, one after the other."""
    for engine in engines:
        train_engine(engine, num_steps, **options)


def raises_on_rank_1(kind, message):
    """Return a ``pytest.raises`` for an error of rank 1; on the others, for the error that names rank 1 and its error.
    """
    if dist.get_rank() == 1:
        return pytest.raises(kind, match=f"^{message}")
    return pytest.raises(LayerWiseError, match=f"rank 1 failed: {kind.__name__}: {message}")


def reduced_gradients(engine):
    """Return this rank's pieces of the averaged gradient: {name: (first element in the parameter, values)}."""
    if engine.optimizer.settings.stage > 1:
        # At these stages the sums may be in cuts until the step.
        internals.grad_sync(engine).finish()
    return {piece.name: (piece.param_start, internals.owned(engine).reduced.average(piece.name).clone())
            for piece in internals.pieces(engine)}


def from_all_ranks(value, group=None):
    """Return the values of all ranks, in order."""
    everyone: list[Any] = comm.gather_objects(value, group=group)
    return everyone


def whole_gradients(engine):
    """Return the averaged gradients, whole and 1-D, put together from all ranks."""
    whole: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for pieces in from_all_ranks(reduced_gradients(engine)):
        for name, (first, values) in pieces.items():
            whole.setdefault(name, []).append((first, values))
    return {name: torch.cat([v for _, v in sorted(parts, key=lambda p: p[0])]) for name, parts in whole.items()}


def start_adamw(module):
    """Return an engine of DeepSpeed's own AdamW for the trainable parameters, with this package registered."""
    config = ds_config(optimizer={"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}})
    del config["layerwise"]
    return ds_layerwise.initialize(model=module, config=config, model_parameters=[
        p for p in module.parameters() if p.requires_grad])[0]


def weights(module):
    """Return all parameters as one vector. At ZeRO stage 3 every rank must call this."""
    return torch.cat([whole(param).float().flatten() for param in module.parameters()])


def whole(param):
    """Return a parameter without its graph; a copy at ZeRO stage 3, where every rank must call this."""
    if not hasattr(param, "ds_id"):
        return param.detach()
    with deepspeed.zero.GatheredParameters(param):
        return param.detach().clone()


def assert_same_on_all_ranks(module):
    """Check that every rank's copy of the model is the same, bit for bit."""
    own = weights(module)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    for other in everyone:
        assert torch.equal(other, own)


def relative_error(value, expected):
    """Return the relative error of a tensor as a whole."""
    return float((value - expected).norm() / expected.norm().clamp_min(1e-30))


def poison(engine):
    """Fill the elements of buffers that belong to no parameter with NaN; return how many these are on this rank."""
    optimizer, hit = engine.optimizer, 0
    for bucket in optimizer.layout.buckets:
        used = torch.zeros(bucket.numel, dtype=torch.bool)
        for slot in bucket.slots:
            used[slot.start - bucket.start:slot.stop - bucket.start] = True
        first, last = bucket.shard(optimizer.rank)
        own = ~used[first - bucket.start:last - bucket.start]
        for buffer in internals.buffers(engine):
            buffer.tensors[bucket.index][~used] = float("nan")
            hit += int((~used).sum())
        for shards in internals.shards(engine):
            if shards[bucket.index].untyped_storage().nbytes():
                shards[bucket.index][own] = float("nan")
                hit += int(own.sum())
    internals.poison_sums(engine)
    return hit


def arrive_late(monkeypatch):
    """Send nothing before somebody waits for it, so that a reader that does not wait reads old values."""
    gather = Wire.gather

    def late(wire, memory, **options):
        return comm.Pending(finish=lambda: gather(wire, memory, **options).wait())

    monkeypatch.setattr(Wire, "gather", late)
