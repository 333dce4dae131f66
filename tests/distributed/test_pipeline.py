"""Pipelines against the same model in one piece."""

import subprocess
import sys

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from tests.checkpoints import assert_equal_states, on_rank_0
from tests.harness import DistributedTest
from tests.models import Block
from tests.reference import LossScale, Recipe, train, trainable
from tests.training import allow_fp16, ds_config, relative_error, start

#: DeepSpeed sends tied weights through torch's autograd, which that cannot follow and need not.
pytestmark = pytest.mark.filterwarnings("ignore:c10d")

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


#: The last stage has it, too, and has no use for it.
UNUSED = "tied_modules.embed.positions.weight"


def of_all_stages(mine):
    """Tensors by key, those of the first rank that has a key; all ranks have the same, bit for bit."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole = {}
    for theirs in everyone:
        for key, value in theirs.items():
            if UNUSED not in key:
                assert torch.equal(whole.setdefault(key, value), value), key
            whole.setdefault(key, value)
    return whole


def whole_weights(engine):
    """Every parameter of every stage, by name."""
    return of_all_stages({name: p.detach().clone() for name, p in engine.module.named_parameters()})


def whole_states(engine):
    """Every master and state of every stage, by parameter and key, whole and 1-D."""
    mine = {}
    for piece in engine.optimizer._owned.record().pieces:
        for key, value in {"fp32": piece.master, **piece.state}.items():
            mine[piece.name, key] = (piece.param_start, value.clone())
    everyone = [None] * dist.get_world_size()
    everyone = everyone[:engine.optimizer.world_size]
    dist.all_gather_object(everyone, mine, group=engine.optimizer.dp_process_group)
    whole = {}
    for name, key in {k for theirs in everyone for k in theirs}:
        parts = sorted((theirs[name, key] for theirs in everyone if (name, key) in theirs), key=lambda part: part[0])
        whole[name, key] = parts[0][1] if key == "step" else torch.cat([value for _, value in parts])
    return of_all_stages(whole)


class TestAgainstOnePiece(DistributedTest):
    world_size = [2, 4]

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


class TestCheckpoints(DistributedTest):
    """Of one training, by different numbers of stages and pipelines; 4 x 3 micro-batches a pipeline are the same."""

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("tied", [True, False])
    def test_1_resume_bit_for_bit(self, tied, class_tmpdir):
        folder = class_tmpdir / f"{tied}"
        first, resumed = (start(pipeline(2, tied=tied), config(layerwise={"save_universal": True}, bf16={
            "enabled": True}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}})) for _ in range(2))
        train_pipeline(first, 3)
        first.save_checkpoint(folder, client_state={"key": "value"})
        saved = whole_states(first)
        expected = train_pipeline(first, 3, first=3)
        train_pipeline(resumed, 2, first=70)
        assert resumed.load_checkpoint(folder)[1]["key"] == "value"
        assert (resumed.global_steps, resumed.optimizer.step_count) == (3, 3)
        assert train_pipeline(resumed, 3, first=3) == expected
        assert_equal_states(whole_states(resumed), whole_states(first))
        assert_equal_states(whole_weights(resumed), whole_weights(first))
        on_rank_0(lambda: torch.save(saved, folder / "saved.pt"))

    @pytest.mark.world_size([1, 2, 4])
    @pytest.mark.parametrize("tied", [True, False])
    def test_2_any_number_of_stages_and_pipelines(self, tied, class_tmpdir):
        """Every weight and state is found by its name."""
        folder, expected = class_tmpdir / f"{tied}", torch.load(class_tmpdir / f"{tied}" / "saved.pt")
        for stages in {1: [1], 2: [2, 1], 4: [4]}[dist.get_world_size()]:
            engine = start(pipeline(stages, tied=tied), config(bf16={"enabled": True}))
            for tag in ("global_step3", "global_step3_universal"):
                train_pipeline(engine, 1, first=70)
                engine.load_checkpoint(folder, tag=tag)
                assert_equal_states(whole_states(engine), expected)
                for name, value in whole_weights(engine).items():
                    assert torch.equal(value.flatten(), expected[name, "fp32"].bfloat16()), name
                assert engine.optimizer.step_count == engine.global_steps == 3

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("tied", [True, False])
    def test_3_deepspeeds_converter(self, tied, class_tmpdir):
        folder = class_tmpdir / f"{tied}"
        on_rank_0(lambda: subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder",
                                          folder / "global_step3", "--output_folder", folder / "converted"], check=True))
        engine = start(pipeline(2, tied=tied), config(bf16={"enabled": True}))
        train_pipeline(engine, 1, first=70)
        engine.load_checkpoint(folder, tag="converted")
        assert_equal_states(whole_states(engine), torch.load(folder / "saved.pt"))
