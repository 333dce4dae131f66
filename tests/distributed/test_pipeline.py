"""Pipelines against the same model in one piece."""

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.harness import DistributedTest
from tests.models import Block
from tests.reference import LossScale, Recipe, train, trainable
from tests.training import allow_fp16, ds_config, relative_error, start

VOCAB, LENGTH, WIDTH, GAS, STEPS = 24, 8, 16, 2, 8

#: The gradient of a key's bias is nothing but rounding, which Adam would make as large as every other.
EPS = 1e-4


class Embedding(nn.Module):
    """Token and position embeddings; with ``weight`` tied, also what turns activations into logits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.1)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight) + self.positions.weight


def logits(embedding, x):
    return F.linear(x, embedding.weight)


def layers(tied):
    """The layers of a language model, with weights that depend on their place alone."""
    if tied:
        first, last = TiedLayerSpec("embed", Embedding), TiedLayerSpec("embed", Embedding, forward_fn=logits)
    else:
        first, last = LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB, bias=False)
    return [first, LayerSpec(Block, WIDTH, 2), LayerSpec(Block, WIDTH, 2), LayerSpec(nn.LayerNorm, WIDTH), last]


def token_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def pipeline(stages, *, tied=True, **options):
    return PipelineModule(layers(tied), num_stages=stages, loss_fn=token_loss, seed_layers=True,
                          partition_method="uniform", **options)


def batch(step, micro, pipe):
    """Tokens to read, and to predict, of one of the pipelines."""
    generator = torch.Generator().manual_seed(1 + pipe + 100 * micro + 10_000 * step)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class InOnePiece(nn.Module):
    """The same layers by the same names, on one rank."""

    def __init__(self, tied):
        super().__init__()
        self.tied = tied
        specs = layers(tied)
        if tied:
            self.tied_modules = nn.ModuleDict()
        for index, spec in enumerate(specs):
            torch.manual_seed(1234 + index)
            if not tied or 0 < index < 4:
                self.add_module(str(index), spec.build())
            elif index == 0:
                self.tied_modules["embed"] = spec.build()

    def forward(self, x):
        modules = dict(self.named_children())
        embed = self.tied_modules["embed"] if self.tied else None
        x = embed(x) if self.tied else modules["0"](x)
        for index in "123":
            x = modules[index](x)
        return logits(embed, x) if self.tied else modules["4"](x)


#: Linear layers of the blocks, as (batch, rows, cols).
MATRICES = {f"{i}.{name}.weight": (1, rows, cols) for i in (1, 2)
            for name, rows, cols in (("qkv", 48, 16), ("proj", 16, 16), ("up", 64, 16), ("down", 16, 64))}


def oracle(tied, pipes, num_steps=STEPS, **kwargs):
    recipe = Recipe(matrices=MATRICES, world_size=pipes, gas=GAS, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1,
                    eps=EPS, **kwargs)
    return train(lambda: InOnePiece(tied), batch, lambda module, data: token_loss(module(data[0]), data[1]), recipe,
                 num_steps)


def config(**changes):
    return ds_config(gas=GAS, params={"eps": EPS}, **changes)


def train_pipeline(engine, num_steps, *, first=0):
    """Returns the losses."""
    pipe = engine.grid.get_data_parallel_id()
    return [float(engine.train_batch(iter([batch(step, micro, pipe) for micro in range(GAS)])))
            for step in range(first, first + num_steps)]


def whole_weights(engine):
    """Of all stages, by name, from the first pipeline; copies of tied weights are the same bit for bit."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {name: p.detach().clone() for name, p in engine.module.named_parameters()})
    whole = {}
    for mine in everyone:
        for name, value in mine.items():
            if name != "tied_modules.embed.positions.weight":
                assert torch.equal(whole.setdefault(name, value), value), name
            whole.setdefault(name, value)
    return whole


class TestAgainstOnePiece(DistributedTest):
    world_size = [2, 4]

    @pytest.mark.filterwarnings("ignore:c10d")
    @pytest.mark.parametrize("tied", [True, False])
    def test_two_stages(self, tied):
        self.compare(2, tied, clip=0.3)

    def compare(self, stages, tied, *, clip, tolerance=1e-5, module_options={}, **changes):
        pipes = dist.get_world_size() // stages
        expected = oracle(tied, pipes, clip=clip)
        engine = start(pipeline(stages, tied=tied, **module_options), config(clip=clip, **changes))
        assert (engine.grid.pipe_parallel_size, engine.optimizer.world_size) == (stages, pipes)
        for step in range(STEPS):
            loss, = train_pipeline(engine, 1, first=step)
            assert loss == pytest.approx(expected.steps[step].loss, rel=1e-5)
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step].norm, rel=1e-5)
        found = whole_weights(engine)
        assert found.keys() == expected.model_params.keys()
        for name, value in expected.model_params.items():
            assert relative_error(found[name], value) < tolerance, name
