"""Several kinds of parallelism in one run, against one process that has the whole model."""

import dataclasses
from functools import partial

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups
from torch import nn

import ds_layerwise
from ds_layerwise import cli
from ds_layerwise.errors import ConfigError, LayerWiseError, StepError
from tests.distributed.parallel import test_auto_ep as auto_ep
from tests.distributed.parallel import test_experts as experts
from tests.distributed.parallel.test_sequence_parallel import sequence_groups
from tests.support import internals
from tests.support import tensor_parallel as tensors
from tests.support.checkpoints import assert_equal_states, on_rank_0, whole_states
from tests.support.cli import assert_refused
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import Recipe, Reference, train, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import (
    Linear,
    Mpu,
    VocabParallelEmbedding,
    enter,
    leave,
    part,
)
from tests.support.training import (
    BF16,
    ON_HOST,
    allow_fp16,
    ds_config,
    from_all_ranks,
    reduced_gradients,
    relative_error,
    start,
)

#: DeepSpeed sends tied weights through torch's autograd, which that cannot follow and need not.
pytestmark = [*rooms("pipeline", "tensor", "sequence", "exports"), pytest.mark.filterwarnings("ignore:c10d")]

VOCAB, WIDTH, LENGTH, GAS, STEPS = 16, 12, 5, 2, 4
EPS = 1e-4
HALF_ON_HOST = {**BF16, **ON_HOST}


class Tokens(nn.Module):
    """An embedding that is cut along its rows; tied, also what turns activations into this rank's logits."""

    def __init__(self, mpu):
        super().__init__()
        self.mpu = mpu
        self.table = VocabParallelEmbedding(VOCAB, WIDTH, mpu)

    @property
    def weight(self):
        return self.table.weight

    def forward(self, tokens):
        local = tokens - self.table.first
        inside = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local.clamp(0, self.weight.shape[0] - 1), self.weight)
        return leave(rows * inside.unsqueeze(-1), self.mpu)


def scores(tokens, x):
    """The mean square of all logits, of which each rank has its part."""
    own = F.linear(enter(x, tokens.mpu), tokens.weight)
    return leave(own.square().sum(-1, keepdim=True), tokens.mpu)


class Pair(nn.Module):
    """A layer that is cut along its rows and one along its columns, after a norm that every part has whole."""

    def __init__(self, mpu):
        super().__init__()
        self.mpu, self.norm = mpu, nn.LayerNorm(WIDTH)
        self.rows, self.columns = Linear(3 * WIDTH, WIDTH, 0, mpu), Linear(WIDTH, 3 * WIDTH, 1, mpu)

    def forward(self, x):
        inner = torch.tanh(F.linear(enter(self.norm(x), self.mpu), self.rows.weight, self.rows.bias))
        return x + leave(F.linear(inner, self.columns.weight), self.mpu) + self.columns.bias


def layers(mpu):
    return [TiedLayerSpec("embed", Tokens, mpu, forward_fn=Tokens.forward, tied_weight_attr=["weight"]),
            LayerSpec(Pair, mpu), LayerSpec(Pair, mpu),
            TiedLayerSpec("embed", Tokens, mpu, forward_fn=scores, tied_weight_attr=["weight"])]


def loss_of(outputs, _):
    return outputs.mean()


class InOnePiece(nn.Module):
    """The same layers by the same names, on one rank."""

    def __init__(self):
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        for index, spec in enumerate(layers(None)[:3]):
            torch.manual_seed(1234 + index)
            (self if index else self.tied_modules).add_module(str(index) if index else "embed", spec.build())

    def forward(self, tokens):
        x = self.tied_modules["embed"](tokens)
        for index in "12":
            x = self.get_submodule(index)(x)
        return scores(self.tied_modules["embed"], x)


MATRICES = {f"{i}.{name}.weight": (1, *shape) for i in (1, 2)
            for name, shape in (("rows", (3 * WIDTH, WIDTH)), ("columns", (WIDTH, 3 * WIDTH)))}
CUT = {"rows.weight": 0, "rows.bias": 0, "columns.weight": 1, "table.weight": 0}


def axis_of(name):
    """The axis along which a parameter is cut; None if it is not."""
    return next((axis for ending, axis in CUT.items() if name.endswith(ending)), None)


def part_of(name, whole, mpu):
    """This rank's part of a whole parameter."""
    return whole if axis_of(name) is None else part(whole, axis_of(name), mpu)


def batch(step, micro, pipe):
    generator = torch.Generator().manual_seed(1 + pipe + 100 * micro + 10_000 * step)
    return torch.randint(0, VOCAB, (3, LENGTH), generator=generator), torch.zeros(3)


def start_3d(stages, mpu, params=None, **changes):
    world, parts = dist.get_world_size(), mpu.get_model_parallel_world_size()
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=parts, num_dp=world // stages // parts)
    model = PipelineModule(layers(mpu), topology=topology, loss_fn=loss_of, seed_layers=True,
                           partition_method="uniform")
    return start(model, ds_config(gas=GAS, params={"eps": EPS, **(params or {})}, **changes))


def train_3d(engine, steps):
    pipe = engine.grid.get_data_parallel_id()
    return [float(engine.train_batch(iter([batch(step, micro, pipe) for micro in range(GAS)]))) for step in steps]


def weights_of(engine):
    engine.optimizer.wait_for_params()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class TestPipelineAndTensors(DistributedTest):
    world_size = [4, 8]
    thorough_on = (4,)

    def test_against_one_piece(self):
        mpu, pipes = Mpu(2), dist.get_world_size() // 4
        recipe = Recipe(matrices=MATRICES, world_size=pipes, gas=GAS, clip=0.01, muon_lr=0.02, adam_lr=0.003,
                        weight_decay=0.1, eps=EPS)
        expected = train(InOnePiece, batch, lambda module, data: loss_of(module(data[0]), None), recipe, STEPS)
        assert expected.steps[0].clip_factor > 1.5
        engine = start_3d(2, mpu, clip=0.01, params={"muon_tp_mode": "distributed"})
        for step in range(STEPS):
            loss, = train_3d(engine, [step])
            assert loss == pytest.approx(expected.steps[step].loss, rel=1e-5)
            assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step].norm, rel=1e-5)
        for name, value in weights_of(engine).items():
            assert relative_error(value, part_of(name, expected.params[name], mpu)) < 1e-5, name
        everyone = from_all_ranks({name: value.shape for name, value in weights_of(engine).items()})
        assert set().union(*everyone) == expected.params.keys()

    @pytest.mark.world_size(4)
    @pytest.mark.parametrize("parts", [1, 2])
    def test_resumes_with_other_stages(self, parts, tmp_path):
        """Parts of a stage are resumed as parts; the number of stages and of pipelines may change. No layer's file has
        the shared module, of which each layer has a function of its own."""
        mpu = Mpu(parts)
        for saved_on, changes in ((2, {}), (1, HALF_ON_HOST))[:parts]:
            engine = start_3d(saved_on, mpu, **changes)
            train_3d(engine, range(2))
            engine.save_checkpoint(tmp_path, tag=str(saved_on))
            states, weights = states_of(engine, mpu), shared(weights_of(engine), mpu)
            for stages in (2, 1):
                other = start_3d(stages, mpu, **changes)
                train_3d(other, [9])
                other.load_checkpoint(tmp_path, tag=str(saved_on))
                assert_equal_states(states_of(other, mpu), states, (saved_on, stages))
                assert_equal_states(shared(weights_of(other), mpu), weights, (saved_on, stages))
                if stages == saved_on:
                    train_3d(engine, range(2, 4))
                    train_3d(other, range(2, 4))
                    assert_equal_states(shared(weights_of(other), mpu), shared(weights_of(engine), mpu))
                other.destroy()
            engine.destroy()


    @pytest.mark.world_size(4)
    def test_weights_alone(self, tmp_path):
        """With the shared module, which no layer's file has."""
        mpu = Mpu(1)
        engine = start_3d(2, mpu)
        train_3d(engine, range(2))
        engine.save_checkpoint(tmp_path, tag="saved")
        saved = shared(weights_of(engine), mpu)
        for stages, options in ((2, {"load_module_only": True}), (1, {"load_optimizer_states": False})):
            other = start_3d(stages, mpu)
            train_3d(other, [9])
            other.load_checkpoint(tmp_path, tag="saved", **options)
            assert_equal_states(shared(weights_of(other), mpu), saved, stages)
            other.destroy()
        on_rank_0(lambda: (tmp_path / "saved" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink())
        with pytest.raises(LayerWiseError, match="zero_pp_rank_0_mp_rank_00_optim_states.pt is missing"):
            engine.load_checkpoint(tmp_path, tag="saved", load_module_only=True)


class TestUntrained(DistributedTest):
    """Values that a pipeline does not train, whose layers have files of their own."""

    world_size = 4

    def begin(self, mpu, **changes):
        parts = mpu.get_model_parallel_world_size()
        topology = PipeModelDataParallelTopology(num_pp=2, num_mp=parts, num_dp=2 // parts)
        model = PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Counting, mpu)], topology=topology,
                               loss_fn=square_loss, partition_method="uniform")
        return start(model, ds_config(**changes))

    def test_it_is_refused_where_parts_would_be_put_together(self, tmp_path):
        with pytest.raises(LayerWiseError, match="1.seen of a pipeline is not trained, and cannot be put together"):
            self.begin(Mpu(2), layerwise={"save_universal": True})
        self.begin(Mpu(2)).save_checkpoint(tmp_path, tag="2")
        self.begin(Mpu(2)).load_checkpoint(tmp_path, tag="2")
        with pytest.raises(LayerWiseError, match="1.seen of a pipeline .* of 2 tensor-parallel parts, or cut into"):
            self.begin(Mpu(1)).load_checkpoint(tmp_path, tag="2")


class Counting(Pair):
    """A layer with a buffer."""

    def __init__(self, mpu):
        super().__init__(mpu)
        self.register_buffer("seen", torch.zeros(3))


def parts_like_mine(mine, mpu):
    """The values of each rank with this rank's number of the part."""
    return from_all_ranks(mine)[mpu.get_model_parallel_rank()::mpu.get_model_parallel_world_size()]


def shared(mine, mpu):
    """The values of those ranks, which are equal where two have one."""
    whole = {}
    for theirs in parts_like_mine(mine, mpu):
        for key, value in theirs.items():
            assert torch.equal(whole.setdefault(key, value), value), key
    return whole


def states_of(engine, mpu):
    """Masters and states of this rank's part of the model, of all stages, whole and 1-D."""
    mine = {}
    for piece in internals.records(engine):
        for key, value in piece.tensors.items():
            mine[piece.name, key] = (piece.param_start, value.clone())
    whole = {}
    for theirs in parts_like_mine(mine, mpu):
        for key, part_of_it in theirs.items():
            whole.setdefault(key, {})[part_of_it[0]] = part_of_it[1]
    return {key: parts[0] if key[1] == "step" else torch.cat([parts[start] for start in sorted(parts)])
            for key, parts in whole.items()}


def check_resumes(begin, all_weights, folder):
    """Save without and with groups of sequences, which stay for the rest of the process, and load with them.

    ``begin`` makes an engine from the number of ranks that share experts and the way to make those groups.
    """
    found = {}
    for tag, how in (("plain", "none"), ("shared", "mesh")):
        engine = begin(2, how)
        experts.train_experts(engine, 0, 2)
        engine.save_checkpoint(folder, tag=tag)
        found[tag] = found[f"{tag}_universal"] = whole_states(engine), all_weights(engine, 2)
        engine.destroy()
    for ep_size in (2, 4):
        other = begin(ep_size, "mesh")
        for tag, (states, weights) in found.items():
            experts.train_experts(other, 9, 10)
            other.load_checkpoint(folder, tag=tag)
            assert_equal_states(whole_states(other), states, (ep_size, tag))
            assert_equal_states(all_weights(other, ep_size), weights, (ep_size, tag))
        other.destroy()


class TestExpertsAndSequences(DistributedTest):
    """Ranks that share a sequence send its tokens to experts on other ranks. A gradient is the sum over a sequence, and
    the mean over sequences: of an expert, too, which every ``ep_size``-th rank has."""

    world_size = 4

    @pytest.mark.parametrize("how", ["mpu", "mesh"])
    def test_whole_numbers(self, how):
        for stage, ep_size in ((1, 2), (2, 4)):
            whole = experts.whole_model()
            recipe = dataclasses.replace(experts.recipe(whole, clip=5.0), world_size=2)
            reference = Reference(trainable(whole), recipe)
            engine = start(experts.FakeLoss(experts.part_of(whole, ep_size), ep_size),
                           ds_config(clip=5.0, stage=stage), **sequence_groups(how))
            for step in range(STEPS):
                wanted = reference.step(experts.gradients_of_ranks(whole, step, 1, ep_size))
                engine.backward(engine((step, 0, dist.get_rank())))
                for name, (first, values) in reduced_gradients(engine).items():
                    saved = experts.global_name(name, dist.get_rank() % ep_size, ep_size).removeprefix("inner.")
                    assert torch.equal(values, wanted.grads[saved].flatten()[first:first + values.numel()]), saved
                engine.step()
                assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
            experts.assert_weights(engine.module.inner, reference.params, ep_size)
            engine.destroy()

    def test_resumes_on_other_sequence_and_expert_groups(self, tmp_path):
        def begin(ep_size, how):
            return start(experts.FakeLoss(experts.part_of(experts.whole_model(), ep_size), ep_size),
                         ds_config(layerwise={"save_universal": True}, **HALF_ON_HOST), **sequence_groups(how))

        check_resumes(begin, experts.all_weights, tmp_path)


class TestAutoEpAndSequences(DistributedTest):
    """The same with the experts that AutoEP spreads."""

    world_size = 4

    @pytest.mark.parametrize("how", [pytest.param("mpu", marks=pytest.mark.thorough), "mesh"])
    def test_against_one_process(self, how):
        for stage, ep_size in ((1, 2), (2, 4)):
            auto_ep.check_whole_numbers(ep_size, 2, sequence_groups(how), num_batches=2, stage=stage)
            auto_ep.check_forward_pass(ep_size, sequence_groups(how), num_batches=2, stage=stage)
        with pytest.raises(ConfigError, match="stage is 3, and expert_parallel.enabled .* with sequence parallelism"):
            auto_ep.start_net(2, groups=sequence_groups(how), stage=3)

    def test_resumes_on_other_sequence_and_expert_groups(self, tmp_path):
        def begin(ep_size, how):
            return auto_ep.start_net(ep_size, fake=True, groups=sequence_groups(how),
                                     layerwise={"save_universal": True}, **HALF_ON_HOST)

        check_resumes(begin, lambda engine, _: auto_ep.all_weights(engine), tmp_path)


class TensorsAndSequences(Mpu):
    """An ``mpu`` with both: neighbours have the parts of a layer, and pairs of those share a sequence."""

    def __init__(self):
        super().__init__(2)
        self.sequence_data, self._dp = self._dp, None
        world, rank = dist.get_world_size(), dist.get_rank()
        for first in range(world):
            if first % 4 < 2:
                self._keep("sequence", [first, first + 2], rank)
        for first in range(4):
            self._keep("_dp", list(range(first, world, 4)), rank)

    def _keep(self, name, ranks, rank):
        group = dist.new_group(ranks)
        if rank in ranks:
            setattr(self, name, group)

    def get_sequence_parallel_group(self):
        return self.sequence

    def get_sequence_parallel_world_size(self):
        return dist.get_world_size(self.sequence)

    def get_sequence_parallel_rank(self):
        return dist.get_rank(self.sequence)

    def get_sequence_data_parallel_group(self):
        return self.sequence_data

    def get_sequence_data_parallel_world_size(self):
        return dist.get_world_size(self.sequence_data)

    def get_sequence_data_parallel_rank(self):
        return dist.get_rank(self.sequence_data)


def sequences(step, micro, rank):
    generator = torch.Generator().manual_seed(1 + rank + 100 * micro + 10_000 * step)
    return torch.randint(0, 16, (3, 6), generator=generator)


def train_on_sequences(engine, mpu, steps):
    for step in steps:
        tokens = sequences(step, 0, mpu.get_data_parallel_rank()).chunk(2, dim=1)[mpu.get_sequence_parallel_rank()]
        engine.backward(engine(tokens) / 2)
        engine.step()


class TestTensorsAndSequences(DistributedTest):
    world_size = [4, 8]
    thorough_on = (4,)

    def start(self, mpu, stage):
        return start(tensors.Net(mpu), ds_config(**BF16, zero_optimization={
            **ON_HOST["zero_optimization"], "stage": stage}), mpu=mpu)

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [8], self.save)

    def save(self, folder):
        mpu = TensorsAndSequences()
        engine = self.start(mpu, 1)
        train_on_sequences(engine, mpu, [0, 1])
        engine.save_checkpoint(folder, tag="on_8")
        found = states_of(engine, mpu), shared(weights_of(engine), mpu)
        if dist.get_rank() < 2:
            torch.save(found, folder / f"part {dist.get_rank()}.pt")

    @pytest.mark.world_size(4)
    def test_resumes_on_fewer_ranks(self, saved):
        mpu = TensorsAndSequences()
        engine = self.start(mpu, 2)
        train_on_sequences(engine, mpu, [9])
        engine.load_checkpoint(saved, tag="on_8")
        states, weights = torch.load(saved / f"part {mpu.get_model_parallel_rank()}.pt")
        assert_equal_states(states_of(engine, mpu), states)
        assert_equal_states(shared(weights_of(engine), mpu), weights)

    def test_against_the_whole_model(self):
        mpu = TensorsAndSequences()
        recipe = Recipe(matrices=tensors.MATRICES, world_size=dist.get_world_size() // 4, gas=GAS, clip=0.05,
                        muon_lr=0.02, adam_lr=0.003, weight_decay=0.1, eps=1e-8)
        expected = train(tensors.Net, sequences, lambda module, data: module(data), recipe, STEPS)
        assert expected.steps[0].clip_factor > 1.5
        for stage in (1, 2):
            module = tensors.Net(mpu)
            engine = start(module, ds_config(stage=stage, gas=GAS, clip=0.05, params={"eps": 1e-8}), mpu=mpu)
            assert engine.optimizer.layout.world_size == dist.get_world_size() // 2
            for step, wanted in enumerate(expected.steps):
                for micro in range(GAS):
                    tokens = sequences(step, micro, mpu.get_data_parallel_rank())
                    mine = tokens.chunk(2, dim=1)[mpu.get_sequence_parallel_rank()]
                    engine.backward(engine(mine) / 2)
                    if micro == GAS - 1:
                        for name, (first, values) in reduced_gradients(engine).items():
                            dim = tensors.dim_of(name)
                            grad = wanted.grads[name] if dim is None else part(wanted.grads[name], dim, mpu)
                            error = values - grad.flatten()[first:first + values.numel()]
                            assert error.norm() < 1e-5 * (grad.norm() + 1e-3), (name, step)
                    engine.step()
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-6)
            for name, p in module.named_parameters():
                dim, whole = tensors.dim_of(name), expected.model_params[name]
                whole = whole if dim is None else part(whole, dim, mpu)
                assert relative_error(p.detach(), whole) < 1e-5, (name, stage)
            engine.destroy()

    @pytest.mark.world_size(4)
    def test_resumes(self, tmp_path):
        mpu, found = TensorsAndSequences(), []
        for stage in (1, 2):
            engine = self.start(mpu, stage)
            train_on_sequences(engine, mpu, [9] if found else [0, 1])
            if found:
                engine.load_checkpoint(tmp_path, tag="saved")
            else:
                engine.save_checkpoint(tmp_path, tag="saved")
            found.append((states_of(engine, mpu), shared(weights_of(engine), mpu)))
            train_on_sequences(engine, mpu, [2, 3])
            found[-1] += (states_of(engine, mpu), shared(weights_of(engine), mpu))
        for first, second in zip(*found, strict=True):
            assert_equal_states(second, first)


EXPERT_CUTS = {"0.weight": 0, "0.bias": 0, "2.weight": 1}


def cut_of(name):
    """The axis along which tensor parallelism cuts a parameter of an expert; None for other parameters."""
    _, found, place = name.partition("deepspeed_experts.")
    return EXPERT_CUTS.get(place.partition(".")[2]) if found else None


def cut_experts(ep_size, mpu):
    """This rank's experts, of which it has its parts."""
    module = experts.ExpertNet(ep_size)
    for layer in module.layers:
        layer.enable_expert_tensor_parallelism = True
    whole = trainable(experts.whole_model())
    for name, saved in cut_names(module, ep_size, mpu).items():
        owner, _, leaf = name.rpartition(".")
        dim = cut_of(name)
        old, value = module.get_parameter(name), whole[saved].detach()
        new = nn.Parameter((value if dim is None else part(value, dim, mpu)).clone())
        vars(new).update(vars(old))
        setattr(module.get_submodule(owner), leaf, new)
        if dim is not None:
            tensors.mark(new, dim)
    return module


def cut_names(module, ep_size, mpu):
    ep_rank = sharing(mpu)[0] % ep_size
    return {name: experts.global_name(name, ep_rank, ep_size) for name in trainable(module)}


def sharing(mpu):
    """This rank's number among those that share its gradients, and how many they are."""
    both = getattr(mpu, "get_sequence_data_parallel_group", mpu.get_data_parallel_group)()
    return dist.get_rank(both), dist.get_world_size(both)


class CutNumbers(nn.Module):
    """Whole numbers for gradients: parts of those of whole experts."""

    def __init__(self, inner, ep_size, mpu):
        super().__init__()
        self.inner, self.ep_size, self.mpu = inner, ep_size, mpu
        self.shapes = {name: p.shape for name, p in experts.whole_model().named_parameters()}

    def forward(self, step):
        place, total = (step, 0, sharing(self.mpu)[0]), 0.0
        for name, saved in cut_names(self.inner, self.ep_size, self.mpu).items():
            numbers, dim = whole_number_gradients(saved, self.shapes[saved], *place), cut_of(name)
            numbers = numbers if dim is None else part(numbers, dim, self.mpu)
            total = total + (self.inner.get_parameter(name) * numbers).sum()
        return total


class TestExpertsAndTensors(DistributedTest):
    world_size = [4, 8]
    thorough_on = (4,)

    @pytest.mark.parametrize("mesh", [
        pytest.param(partial(Mpu, 2), marks=pytest.mark.thorough, id="tensors"),
        pytest.param(TensorsAndSequences, id="tensors_and_sequences")])
    def test_whole_numbers(self, mesh):
        mpu = mesh()
        size = sharing(mpu)[1]
        if mpu.get_data_parallel_world_size() == 1:
            # Four ranks have no two that could share experts beside parts and sequences.
            with pytest.raises(ConfigError, match="give them an ep_size that divides the data-parallel ranks"):
                start(CutNumbers(cut_experts(2, mpu), 2, mpu), ds_config(), mpu=mpu)
            return
        for stage, ep_size, tp_mode in ((1, 2, "duplicated"),
                                        (2, mpu.get_data_parallel_world_size(), "distributed")):
            whole = experts.whole_model()
            recipe = dataclasses.replace(experts.recipe(whole, clip=5.0), world_size=mpu.get_data_parallel_world_size())
            reference = Reference(trainable(whole), recipe)
            engine = start(CutNumbers(cut_experts(ep_size, mpu), ep_size, mpu),
                           ds_config(clip=5.0, stage=stage, params={"muon_tp_mode": tp_mode}), mpu=mpu)
            names = {f"inner.{name}": saved for name, saved in cut_names(engine.module.inner, ep_size, mpu).items()}

            def mine(name, value):
                return value if cut_of(name) is None else part(value, cut_of(name), mpu)

            for step in range(STEPS):
                gradients = experts.gradients_of_ranks(whole, step, 1, ep_size)[:size]
                wanted = reference.step(gradients)
                engine.backward(engine(step))
                for name, (first, values) in reduced_gradients(engine).items():
                    grad = mine(name, wanted.grads[names[name]]).flatten()
                    assert torch.equal(values, grad[first:first + values.numel()]), name
                engine.step()
                assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
            for name, p in engine.module.named_parameters():
                assert relative_error(p.detach(), mine(name, reference.params[names[name]])) < 1e-5, name
            engine.destroy()

    def check_verified(self, folder):
        assert cli.main(["verify", str(folder)]) == 0

    @pytest.mark.world_size(4)
    def test_resumes_with_another_number_of_experts_a_rank(self, tmp_path):
        mpu = Mpu(2)

        def begin(ep_size, steps):
            engine = start(CutNumbers(cut_experts(ep_size, mpu), ep_size, mpu), ds_config(**HALF_ON_HOST), mpu=mpu)
            run(engine, steps)
            return engine

        def run(engine, steps):
            for step in steps:
                engine.backward(engine(step))
                engine.step()

        def found_in(engine, ep_size):
            names = cut_names(engine.module.inner, ep_size, mpu)
            weights = {saved: engine.module.inner.get_parameter(name).detach().clone() for name, saved in names.items()}
            return shared(weights, mpu), states_of(engine, mpu)

        engine = begin(2, [0, 1])
        engine.save_checkpoint(tmp_path, tag="saved")
        wanted = found_in(engine, 2)
        engine.destroy()
        on_rank_0(lambda: self.check_verified(tmp_path))
        for ep_size in (1, 2):
            engine = begin(ep_size, [9])
            engine.load_checkpoint(tmp_path, tag="saved")
            for now, then in zip(found_in(engine, ep_size), wanted, strict=True):
                assert_equal_states(now, then, ep_size)
            engine.destroy()


class Expert(nn.Module):
    """Two layers, of which each tensor-parallel rank has parts."""

    def __init__(self, mpu):
        super().__init__()
        self.mpu = mpu
        self.rows, self.columns = Linear(2 * WIDTH, WIDTH, 0, mpu), Linear(WIDTH, 2 * WIDTH, 1, mpu)

    def forward(self, x):
        inner = F.relu(F.linear(enter(x, self.mpu), self.rows.weight, self.rows.bias))
        return leave(F.linear(inner, self.columns.weight), self.mpu) + self.columns.bias


class Routed(nn.Module):
    """A layer of experts between layers of a pipeline."""

    def __init__(self, ep_size, mpu):
        super().__init__()
        self.moe = MoE(WIDTH, Expert(mpu), num_experts=4, ep_size=ep_size, k=1, capacity_factor=4.0, min_capacity=1,
                       use_rts=False, enable_expert_tensor_parallelism=mpu is not None)

    def forward(self, x):
        return x + self.moe(x)[0]


def layers_of_experts(ep_size, mpu=None):
    return [LayerSpec(nn.Linear, 6, WIDTH), LayerSpec(Routed, ep_size, mpu), LayerSpec(Routed, ep_size, mpu),
            LayerSpec(nn.Linear, WIDTH, 3)]


def square_loss(outputs, _):
    return outputs.square().mean()


def rows(step, micro, pipe):
    generator = torch.Generator().manual_seed(1 + pipe + 100 * micro + 10_000 * step)
    return torch.randn(8, 6, generator=generator), torch.zeros(8)


class TestPipelineAndExperts(DistributedTest):
    world_size = 4

    def start(self, stages, ep_size, mpu=None, **changes):
        whole, parts = self.whole(), 1 if mpu is None else mpu.get_model_parallel_world_size()
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=parts,
                                                 num_dp=dist.get_world_size() // stages // parts)
        model = PipelineModule(layers_of_experts(ep_size, mpu), topology=topology, loss_fn=square_loss,
                               partition_method="uniform")
        with torch.no_grad():
            for name, saved in self.names(model, ep_size).items():
                model.get_parameter(name).copy_(part_of(name, whole.get_parameter(saved), mpu))
                # DeepSpeed's layer copies its expert, and copies of parameters have no marks.
                if mpu is not None and axis_of(name) is not None:
                    tensors.mark(model.get_parameter(name), axis_of(name))
        return start(model, ds_config(gas=GAS, params={"eps": EPS}, **changes))

    def names(self, model, ep_size):
        pipe = model._grid.get_data_parallel_id()
        return {name: experts.global_name(name, pipe % ep_size, ep_size) for name in trainable(model)}

    def whole(self):
        torch.manual_seed(3)
        whole = nn.Sequential(*(spec.build() for spec in layers_of_experts(1)))
        with torch.no_grad():
            for param in whole.parameters():
                param.copy_(torch.randn(param.shape) * 0.3)
        return whole

    @pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.thorough), 2])
    def test_against_one_piece(self, stages):
        self.check(stages, None)

    @pytest.mark.world_size(8)
    def test_with_tensor_parallelism_too(self):
        self.check(2, Mpu(2))

    def check(self, stages, mpu):
        ep_size = 2
        engine = self.start(stages, ep_size, mpu, clip=0.05)
        whole, pipes = self.whole(), engine.grid.get_data_parallel_world_size()
        # DeepSpeed's layers ask the last engine's groups for the parts of theirs.
        groups.mpu = None
        for module in whole.modules():
            if isinstance(module, MoE):
                module.set_deepspeed_parallelism()
        matrices = {name: (1, *p.shape) for name, p in trainable(whole).items()
                    if p.dim() == 2 and name not in ("3.weight",)}
        reference = Reference(trainable(whole), Recipe(
            matrices=matrices, world_size=pipes, gas=GAS, clip=0.05, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1,
            eps=EPS))
        pipe = engine.grid.get_data_parallel_id()
        for step in range(STEPS):
            grads = []
            for other in range(pipes):
                grads.append([])
                for micro in range(GAS):
                    whole.zero_grad()
                    (square_loss(whole(rows(step, micro, other)[0]), None) / GAS).backward()
                    grads[-1].append({n: None if p.grad is None else p.grad.clone()
                                      for n, p in trainable(whole).items()})
            wanted = reference.step(grads)
            assert wanted.clip_factor > 1.5
            engine.train_batch(iter([rows(step, micro, pipe) for micro in range(GAS)]))
            assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-5)
            with torch.no_grad():
                for name, value in reference.params.items():
                    whole.get_parameter(name).copy_(value)
        names = self.names(engine.module, ep_size)
        for name, value in weights_of(engine).items():
            assert relative_error(value, part_of(name, reference.params[names[name]], mpu)) < 1e-5, name
        engine.destroy()

    def check_from_outside(self, folder):
        assert cli.main(["verify", str(folder / "2_universal")]) == 0
        for command in (["verify", folder / "2"], ["consolidate", folder / "2", folder / "all.safetensors"],
                        ["to-universal", folder / "2", folder / "converted"]):
            assert_refused("was saved by a pipeline, which only a pipeline reads; give a universal", *command)

    @pytest.mark.parametrize("first", [True, False])
    def test_experts_on_one_stage_alone_are_refused(self, first):
        linear, routed = LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(Routed, 2, None)
        model = PipelineModule([routed, linear] if first else [linear, routed], num_stages=2, loss_fn=square_loss,
                               partition_method="uniform")
        without = 2 if first else 0
        with pytest.raises(ConfigError, match=f"the stage of rank {without} of the pipeline has no layer of experts"):
            start(model, ds_config())

    def test_groups_of_an_earlier_engine_are_refused(self):
        self.start(2, 2).destroy()
        with pytest.raises(ConfigError, match="DeepSpeed still has groups of 2 ranks with parts of one model"):
            start(nn.Linear(6, 3), ds_config())
        with pytest.raises(ConfigError, match="group ep_size_2, of .*; after another engine, start a new process"):
            self.start(1, 2)

    def test_more_parts_of_experts_than_pipelines_are_refused(self):
        with pytest.raises(ConfigError, match="2 is not divisible by 4.*; give them an ep_size that divides the data"):
            self.start(2, 4)

    def test_resumes_with_another_number_of_experts_a_rank(self, tmp_path):
        def begin(ep_size, steps, stages=2):
            engine = self.start(stages, ep_size, layerwise={"save_universal": True}, **HALF_ON_HOST)
            run(engine, steps)
            return engine

        def run(engine, steps):
            for step in steps:
                pipe = engine.grid.get_data_parallel_id()
                batches = [rows(step, micro, pipe) for micro in range(GAS)]
                engine.train_batch(iter([(x.bfloat16(), y) for x, y in batches]))

        def found_in(engine, ep_size):
            names = self.names(engine.module, ep_size)
            weights = {names[name]: value for name, value in weights_of(engine).items()}
            return shared(weights, Mpu(1)), states_of(engine, Mpu(1))

        engine = begin(2, [0, 1])
        engine.save_checkpoint(tmp_path, tag="2")
        wanted = found_in(engine, 2)
        with pytest.raises(LayerWiseError, match="save_16bit_model.. would write what one rank has.*ds-layerwise cons"):
            engine.save_16bit_model(tmp_path)
        engine.destroy()
        on_rank_0(lambda: self.check_from_outside(tmp_path))
        for ep_size in (1, 2):
            engine = begin(ep_size, [9])
            for tag in ("2_universal", "2"):
                run(engine, [9])
                engine.load_checkpoint(tmp_path, tag=tag)
                for now, then in zip(found_in(engine, ep_size), wanted, strict=True):
                    assert_equal_states(now, then, (tag, ep_size))
            engine.destroy()
        # Regular files of a pipeline's experts go by stages.
        engine = begin(4, [9], stages=1)
        engine.load_checkpoint(tmp_path, tag="2_universal")
        for now, then in zip(found_in(engine, 4), wanted, strict=True):
            assert_equal_states(now, then)
        with pytest.raises(LayerWiseError, match=r"has \(2, 1\) part\(s\) of the model .*, this run \(1, 1\)"):
            engine.load_checkpoint(tmp_path, tag="2")
        with pytest.raises(LayerWiseError, match="was saved by a pipeline, which only a pipeline reads"):
            start(tensors.Net(Mpu(2)), ds_config(), mpu=Mpu(2)).load_checkpoint(tmp_path, tag="2")
        # Cut elsewhere; experts' files have numbers of layers in their stage.
        linear, *routed, last = layers_of_experts(2)
        other = PipelineModule([linear, *routed, *routed, last], num_stages=2, loss_fn=square_loss,
                               partition_method="uniform")
        with pytest.raises(LayerWiseError, match=r"2 has 1 layer\(s\) of experts in this stage .*, and this run has 2"):
            start(other, ds_config()).load_checkpoint(tmp_path, tag="2", load_module_only=True)


class TestAgainstStock(DistributedTest):
    """AdamW for everything, in the same mesh, with stock DeepSpeed."""

    world_size = 4

    def losses(self, optimizer, begin):
        """The mean losses of all ranks, step by step."""
        config = ds_config(gas=GAS, clip=0.05, layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]},
                           params={"betas": (0.9, 0.95), "eps": 1e-8})
        if optimizer == "AdamW":
            params = config["optimizer"]["params"]
            config["optimizer"] = {"type": optimizer, "params": {
                "torch_adam": True, **{key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}}}
            del config["layerwise"]
        step_of = begin(config)
        losses = torch.tensor([step_of(step) for step in range(8)])
        dist.all_reduce(losses)
        return losses / dist.get_world_size()

    def check(self, begin):
        ds_layerwise.register()
        stock, ours = self.losses("AdamW", begin), self.losses("LayerWiseMuon", begin)
        torch.testing.assert_close(ours, stock, rtol=1e-6, atol=1e-6)
        assert stock[-1] < stock[0]

    def test_pipeline_and_tensors(self):
        def begin(config):
            topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
            model = PipelineModule(layers(Mpu(2)), topology=topology, loss_fn=loss_of, seed_layers=True,
                                   partition_method="uniform")
            engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            return lambda step: train_3d(engine, [step % 2])[0]

        self.check(begin)

    def test_tensors_and_sequences(self):
        mpu = TensorsAndSequences()

        def begin(config):
            module = tensors.Net(mpu)
            engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config, mpu=mpu)[0]

            def step_of(step):
                for micro in range(GAS):
                    mine = sequences(step % 2, micro, 0).chunk(2, dim=1)[mpu.get_sequence_parallel_rank()]
                    loss = engine(mine) / 2
                    engine.backward(loss)
                    engine.step()
                return float(loss.detach())

            return step_of

        self.check(begin)


class TestSkippedSteps(DistributedTest):
    """A gradient that is not finite, on one rank of the mesh."""

    world_size = 4

    def check(self, engine, mpu, run):
        run([0])
        before = states_of(engine, mpu)
        spoil = next(p for name, p in engine.module.named_parameters() if name.endswith("rows.bias"))
        hook = spoil.register_hook(lambda grad: grad * (float("inf") if dist.get_rank() == 3 else 1))
        run([1])
        assert (engine.skipped_steps, engine.optimizer.loss_scale) == (1, 128)
        assert_equal_states(states_of(engine, mpu), before)
        hook.remove()
        run([2])
        assert (engine.skipped_steps, engine.optimizer.step_count) == (1, 2)

    @pytest.mark.parametrize("mesh", ["pipeline_and_tensors", "tensors_and_sequences"])
    def test_all_ranks_skip(self, mesh):
        allow_fp16()
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
        if mesh == "pipeline_and_tensors":
            mpu = Mpu(2)
            engine = start_3d(2, mpu, **fp16)
            self.check(engine, mpu, lambda steps: train_3d(engine, steps))
        else:
            mpu = TensorsAndSequences()
            engine = start(tensors.Net(mpu), ds_config(**fp16), mpu=mpu)
            self.check(engine, mpu, lambda steps: train_on_sequences(engine, mpu, steps))


class TestWrites(DistributedTest):
    """A script that writes on one rank alone what other parts of the model have, too."""

    world_size = 4

    @pytest.mark.parametrize("mesh, name", [
        ("pipeline_and_tensors", "norm.weight"), ("pipeline_and_tensors", "table.weight"),
        ("tensors_and_sequences", "copied.weight")])
    def test_all_ranks_raise(self, mesh, name):
        if mesh == "pipeline_and_tensors":
            mpu = Mpu(2)
            engine = start_3d(2, mpu)
            run = partial(train_3d, engine)
        else:
            mpu = TensorsAndSequences()
            engine = start(tensors.Net(mpu), ds_config(), mpu=mpu)
            run = partial(train_on_sequences, engine, mpu)
        run([0])
        written = [p for n, p in engine.module.named_parameters() if n.endswith(name)]
        with torch.no_grad():
            # The same on all ranks is fine.
            for param in written:
                param.mul_(0.5)
        run([1])
        if dist.get_rank() in (0, 2 if mesh == "tensors_and_sequences" else 0):
            with torch.no_grad():
                written[0].mul_(0.5)
        with pytest.raises(StepError, match=f"{name} was written since the last step, and is not the same on parts of"):
            run([2])
