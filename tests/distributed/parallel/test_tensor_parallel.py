"""Matrices that tensor parallelism has cut, trained with an engine, against the same model whole."""

import math
import shutil

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_layerwise.cli import main
from ds_layerwise.errors import ConfigError, LayerWiseError
from ds_layerwise.parallel.tensor import agree_on_parts
from ds_layerwise.ranks.comm import nodes
from ds_layerwise.routing.tensor_marks import PART_SHAPES
from tests.support import internals
from tests.support.checkpoints import loaded, on_rank_0
from tests.support.expected import mean_gradient
from tests.support.family import train as train_alone
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import Recipe, train, train_on_gradients, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import MATRICES, UNIVERSAL_PARTS, Mpu, Net, batch, dim_of, mark, part
from tests.support.training import (
    MUON,
    arrive_late,
    ds_config,
    from_all_ranks,
    reduced_gradients,
    relative_error,
    start,
)
from tests.support.universal import convert
from tests.support.versions import needs

pytestmark = rooms("tensor", "tensor_shards", "tensor_modes", "tensor_marks")

STEPS = 4
RATES = {"muon_lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "eps": 1e-8}


def part_of(whole, name, mpu):
    dim = dim_of(name)
    return whole if dim is None else part(whole, dim, mpu)


OVERRIDES = [
    {"name": "square_rows.weight", "momentum": 0.5, "extra_scale_factor": 2.0},
    {"name": "square_cols.weight", "muon_tp_mode": "distributed", "nesterov": False},
    {"name": "tall_rows.weight", "num_heads": 4}, {"name": "flat_rows.*", "lr_scale": 0.5},
    {"name": "flat_cols.weight", "ns_steps": 3}, {"name": "tall_cols.weight", "optimizer": "lion"},
    {"name": "narrow_rows.weight", "optimizer": "scalar", "betas": [0.5, 0.75]},
    {"name": "copied.weight", "scale_mode": "spectral"},
]


class TestOverrides(DistributedTest):
    def test_they_are_for_the_matrices_of_the_whole_model(self, stage):
        mpu, found = Mpu(2), []
        for module, group in ((Net(mpu), mpu), (Net(), Mpu(1))):
            engine = start(module, ds_config(stage=stage, layerwise={"overrides": OVERRIDES}), mpu=group)
            for step in range(STEPS):
                engine.backward(engine(batch(step, 0, 0)))
                engine.step()
            found.append({name: safe_get_full_fp32_param(param).clone()
                          for name, param in engine.module.named_parameters()})
            engine.destroy()
        parts, whole = found
        for name, value in parts.items():
            torch.testing.assert_close(value, part_of(whole[name], name, mpu), rtol=2e-4, atol=2e-5,
                                       msg=lambda text: f"{name}: {text}")


class TestAgainstTheWholeModel(DistributedTest):
    world_size = [2, 4]
    thorough_on = (2,)

    def test_weights_gradients_and_norm(self):
        mpu = Mpu(2)
        dp_size, dp_rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
        expected = train(Net, batch, lambda module, data: module(data),
                         Recipe(matrices=MATRICES, world_size=dp_size, gas=2, clip=0.05, **RATES), STEPS)
        assert expected.steps[0].clip_factor > 1.5, "the bound does not bind"
        for tp_mode, stage, ns_method in (("duplicated", 1, "gram"), ("auto", 2, "standard"), ("owner", 1, "standard"),
                                          ("distributed", 1, "standard"), ("distributed", 2, "gram")):
            params = {**MUON, "eps": 1e-8, "ns_method": ns_method, "muon_tp_mode": tp_mode}
            module = Net(mpu)
            config = ds_config(stage=stage, gas=2, clip=0.05, params=params,
                               layerwise={"overlap_param_gather": stage == 2})
            if tp_mode in ("distributed", "owner") and stage == 1:
                config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            engine = start(module, config, mpu=mpu)
            for step, wanted in enumerate(expected.steps):
                for micro in range(2):
                    engine.backward(engine(batch(step, micro, dp_rank)))
                    if micro:
                        for name, (first, values) in reduced_gradients(engine).items():
                            grad = part_of(wanted.grads[name], name, mpu)
                            error = values - grad.flatten()[first:first + values.numel()]
                            assert error.norm() < 1e-5 * (grad.norm() + 1e-3), (name, step)
                    engine.step()
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-6)
            engine.optimizer.wait_for_params()
            for name, p in module.named_parameters():
                error = relative_error(p.detach(), part_of(expected.model_params[name], name, mpu))
                assert error < 1e-5, (name, tp_mode, stage)
            engine.destroy()


def train_on_whole_numbers(engine, mpu, steps, rank=None):
    """Every data-parallel rank on whole-number gradients of its own, or all on those of ``rank``."""
    whole = {name: p.shape for name, p in Net().named_parameters()}
    for step in steps:
        place = (step, 0, mpu.get_data_parallel_rank() if rank is None else rank)
        engine.backward(engine((whole, mpu, place)))
        engine.step()


class OnWholeNumbers(Net):
    """The same parameters; gradients are exact, and parts of the same whole numbers on all ranks."""

    def forward(self, data):
        whole, mpu, place = data
        return sum((p * part_of(whole_number_gradients(name, whole[name], *place), name, mpu)).sum()
                   for name, p in self.named_parameters())


class TestExactly(DistributedTest):
    world_size = 4

    def test_the_norm_and_the_gradients(self):
        mpu = Mpu(2)
        engine = start(OnWholeNumbers(mpu), ds_config(clip=1.0), mpu=mpu)
        whole = {name: p.shape for name, p in Net().named_parameters()}
        for step in range(2):
            mean = {name: mean_gradient(name, shape, step, 2) for name, shape in whole.items()}
            engine.backward(engine((whole, mpu, (step, 0, mpu.get_data_parallel_rank()))))
            for name, (first, values) in reduced_gradients(engine).items():
                wanted = part_of(mean[name], name, mpu).flatten()[first:first + values.numel()]
                assert torch.equal(values, wanted), name
            engine.step()
            # Squares of halves add up exactly.
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in mean.values()))
            assert engine.get_global_grad_norm() == torch.tensor(norm, dtype=torch.float32)

    def test_blockwise_is_the_oracle_on_parts(self):
        mpu = Mpu(2)
        module = OnWholeNumbers(mpu)
        matrices = {name: (1, *module.get_parameter(name).shape) for name in MATRICES}
        whole = {name: p.shape for name, p in Net().named_parameters()}
        expected = train_on_gradients(
            dict(module.named_parameters()),
            lambda name, shape, *place: part_of(whole_number_gradients(name, whole[name], *place), name, mpu),
            Recipe(matrices=matrices, world_size=2, **RATES), STEPS)
        engine = start(module, ds_config(params={**MUON, "eps": 1e-8, "muon_tp_mode": "blockwise"}), mpu=mpu)
        train_on_whole_numbers(engine, mpu, range(STEPS))
        for name, p in module.named_parameters():
            assert relative_error(p.detach(), expected.model_params[name]) < 1e-5, name

    def test_all_parts_skip_where_one_is_not_finite(self):
        mpu = Mpu(2)
        module = OnWholeNumbers(mpu)
        engine = start(module, ds_config(bf16={"enabled": True}), mpu=mpu)
        before = {name: p.clone() for name, p in module.named_parameters()}
        for name in ("tall_rows.weight", "norm.weight"):
            loss = engine(({n: p.shape for n, p in Net().named_parameters()}, mpu, (0, 0, 0)))
            if dist.get_rank() == 3:
                loss = loss + module.get_parameter(name).sum() * math.inf
            engine.backward(loss)
            engine.step()
            assert engine.optimizer.overflow and engine.get_global_grad_norm() == math.inf
            assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())


#: Matrices by the axis that is cut, three or five of an axis: no number that two ranks, or three, divide.
UNEVEN = {f"rows_{i}": (*shape, 0) for i, shape in enumerate([(24, 12), (12, 24), (24, 12), (12, 12), (36, 12)])} | {
    f"cols_{i}": (*shape, 1) for i, shape in enumerate([(12, 36), (24, 12), (12, 36)])}


class Uneven(nn.Module):
    """Matrices, whole or cut, with whole numbers for gradients."""

    def __init__(self, mpu):
        super().__init__()
        generator, self.mpu = torch.Generator().manual_seed(5), mpu
        for name, (rows, cols, dim) in UNEVEN.items():
            param = nn.Parameter(part(torch.randn((rows, cols), generator=generator), dim, mpu))
            if mpu is not None:
                mark(param, dim)
            setattr(self, name, param)

    def forward(self, step):
        return sum((p * part(whole_number_gradients(name, UNEVEN[name][:2], step, 0, 0), UNEVEN[name][2],
                             self.mpu)).sum() for name, p in self.named_parameters())


class TestOwners(DistributedTest):
    world_size = [2, 3, 4]

    @pytest.mark.parametrize("settings", [{}, {"ns_method": "gram", "ns_dtype": "bf16"},
                                          {"spectral_clip": 1.0}], ids=str)
    def test_they_have_the_bits_of_the_whole(self, settings):
        """In parts for two or three ranks, and for two with two copies of each."""
        parts, found, asked = Mpu(3 if dist.get_world_size() == 3 else 2), {}, {}
        for mpu, tp_mode in ((parts, "owner"), (parts, "duplicated"), (parts, "auto"), (None, "owner")):
            module = Uneven(mpu)
            params = {**MUON, "muon_tp_mode": tp_mode, **settings}
            engine = start(module, ds_config(params=params, bucket_numel=10**6), mpu=mpu or Mpu(1))
            for step in range(STEPS):
                engine.backward(engine(step))
                engine.step()
            engine.optimizer.wait_for_params()
            found[tp_mode, mpu] = {name: p.detach().clone() for name, p in module.named_parameters()}
            asked[tp_mode, mpu] = engine.optimizer.forecast().report
            engine.destroy()
        whole = found.pop(("owner", None))
        for (tp_mode, _), values in found.items():
            for name, value in values.items():
                wanted = part(whole[name], UNEVEN[name][2], parts)
                if tp_mode == "auto":
                    assert relative_error(value, wanted) < (0.05 if "ns_dtype" in settings else 1e-5), name
                else:
                    assert torch.equal(value, wanted), (name, tp_mode)
        size = parts.get_model_parallel_world_size()
        owner, duplicated = asked["owner", parts], asked["duplicated", parts]
        assert max(owner.work) == pytest.approx(max(duplicated.work) / size, rel=0.01)
        assert max(owner.to_peers) == pytest.approx(2 / size * max(duplicated.to_peers), rel=0.01)
        assert asked["owner", None].to_peers == (0,) * dist.get_world_size()


#: By layer a rule with settings; cut along rows and along columns, the longer side and the shorter one.
FAMILY = {"square_rows": ("normuon", {}), "square_cols": ("adamuon", {}), "tall_rows": ("namo", {}),
          "flat_cols": ("polargrad", {"extra_scale_factor": 0.01}), "flat_rows": ("scion", {}),
          "tall_cols": ("normuon", {"relative_update": True}), "narrow_rows": ("normuon", {"radial_brake": [0.5, 0.0]}),
          "copied": ("adamuon", {"hyperball": 3.0})}


#: The same for rows, or columns, of norm 1.
LINES = {"square_rows": ("rmnp", {}), "square_cols": ("rmnp", {}), "tall_rows": ("rmnp", {"normalised_per": "column"}),
         "flat_cols": ("rmnp", {"normalised_per": "column"}), "tall_cols": ("rmnp", {"relative_update": True})}


class TestOtherMatrixOptimizers(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("tp_mode, family", [
        ("duplicated", FAMILY), ("owner", FAMILY), ("auto", FAMILY), ("duplicated", LINES)])
    def test_other_matrix_optimizers_against_the_whole_matrix(self, tp_mode, family):
        mpu, whole = Mpu(2), {name: p.detach() for name, p in Net().named_parameters()}
        plain = {} if family is LINES else {"ns_method": "standard", "ns_dtype": "fp32"}
        entries = [{"name": f"{layer}.weight", "optimizer": rule, "lr_scale": 2.5, **plain, **settings}
                   for layer, (rule, settings) in family.items()]
        engine = start(OnWholeNumbers(mpu), ds_config(layerwise={"overrides": entries},
                                                            params={"muon_tp_mode": tp_mode}), mpu=mpu)
        train_on_whole_numbers(engine, mpu, range(STEPS))
        for layer, (rule, settings) in family.items():
            name, first = f"{layer}.weight", whole[f"{layer}.weight"]
            mean = [mean_gradient(name, first.shape, step, 2) for step in range(STEPS)]
            wanted = train_alone(rule, first, mean, lr=0.05, weight_decay=0.1, settings=settings)
            moved = engine.module.get_parameter(name).detach() - part_of(first, name, mpu)
            assert relative_error(moved, part_of(wanted - first, name, mpu)) < 1e-5, name


def everything(engine):
    """Masters (key None) and states of this rank's parts, by (parameter, key)."""
    access, params = internals.access(engine), internals.trained(engine)
    return {(name, key): access.get_full_hp_param(param, key) for name, param in params.items()
            for key in (None, *internals.owned(engine).state_keys(name))}


def assert_holds(engine, expected):
    for key, value in everything(engine).items():
        assert torch.equal(value, expected[key]), key


def joined(parts):
    """The masters and states of the whole model from those of its parts."""
    parts = list(parts)
    whole = {}
    for name, key in parts[0]:
        values, dim = [each[name, key] for each in parts], dim_of(name)
        whole[name, key] = values[0] if dim is None or not values[0].dim() else torch.cat(values, dim)
    return whole


class TestCheckpoints(DistributedTest):
    """Four ranks save, two and four go on."""

    world_size = 4

    def go_on(self, folder, config):
        mpu = Mpu(2)
        module = OnWholeNumbers(mpu)
        with torch.no_grad():
            for p in module.parameters():
                p.fill_(7.0)
        engine = loaded(start(module, config, mpu=mpu), folder, tag="first")
        saved = torch.load(folder / f"expected_{mpu.get_model_parallel_rank()}.pt")
        assert_holds(engine, saved["saved"])
        train_on_whole_numbers(engine, mpu, range(2, 4), rank=0)
        assert_holds(engine, saved["later"])
        return engine

    @pytest.fixture
    def run_of_4(self, class_tmpdir):
        """A checkpoint in two parts, and what each part was then and later."""
        return made_once(class_tmpdir / "parts", [4], self.save)

    @pytest.fixture
    def run_of_1(self, class_tmpdir):
        """A checkpoint of the whole model."""
        return made_once(class_tmpdir / "whole", [1], self.save_whole)

    def save_whole(self, folder):
        start(Net(), ds_config()).save_checkpoint(folder, tag="whole")

    def save(self, folder):
        mpu = Mpu(2)
        module = OnWholeNumbers(mpu)
        engine = start(module, ds_config(clip=1.0), mpu=mpu)
        train_on_whole_numbers(engine, mpu, range(2))
        engine.save_checkpoint(folder, tag="first")
        expected = {"saved": everything(engine)}
        train_on_whole_numbers(engine, mpu, range(2, 4), rank=0)
        expected["later"] = everything(engine)
        for name, p in module.named_parameters():
            # Of a part, DeepSpeed's functions see the part.
            assert torch.equal(safe_get_full_fp32_param(p), p), name
        if mpu.get_data_parallel_rank() == 0:
            torch.save(expected, folder / f"expected_{mpu.get_model_parallel_rank()}.pt")

    @pytest.mark.world_size([2, 4])
    def test_resume_with_any_number_of_copies(self, run_of_4):
        for changes in ({}, {"stage": 2, "bucket_numel": 10**9}):
            self.go_on(run_of_4, ds_config(clip=1.0, **changes)).destroy()

    @pytest.mark.world_size(2)
    def test_weights_alone_need_no_file_of_the_optimizer(self, run_of_4, tmp_path):
        on_rank_0(lambda: shutil.copytree(run_of_4 / "first", tmp_path / "first",
                                          ignore=shutil.ignore_patterns("*optim*", "layerwise_manifest.json")))
        engine = start(Net(Mpu(2)), ds_config(), mpu=Mpu(2))
        saved = torch.load(run_of_4 / f"expected_{dist.get_rank()}.pt")["saved"]
        engine.load_checkpoint(tmp_path, tag="first", load_optimizer_states=False)
        assert all(torch.equal(p, saved[name, None]) for name, p in engine.module.named_parameters())

    @pytest.mark.world_size(2)
    def test_weights_alone_with_another_number_of_parts(self, run_of_4, run_of_1):
        engine = start(Net(), ds_config())
        whole = joined(torch.load(run_of_4 / f"expected_{rank}.pt")["saved"] for rank in range(2))
        for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
            with torch.no_grad():
                for p in engine.module.parameters():
                    p.fill_(7.0)
            engine.load_checkpoint(run_of_4, tag="first", **options)
            for (name, key), value in everything(engine).items():
                if key is None or not options:
                    assert torch.equal(value, whole[name, key]), (name, key)
            assert all(torch.equal(p, whole[name, None]) for name, p in engine.module.named_parameters())
        engine.destroy()
        mpu = Mpu(2)
        engine = start(OnWholeNumbers(mpu), ds_config(), mpu=mpu)
        train_on_whole_numbers(engine, mpu, [0])
        engine.load_checkpoint(run_of_1, tag="whole", load_optimizer_states=False)
        first = {name: p.detach() for name, p in Net().named_parameters()}
        assert all(torch.equal(p, part_of(first[name], name, mpu)) for name, p in engine.module.named_parameters())
        assert engine.optimizer.step_count == 1

    @pytest.mark.world_size(1)
    def test_the_command_line(self, run_of_4, tmp_path, capsys):
        first = str(run_of_4 / "first")
        assert main(["verify", first, "--quiet"]) == 0
        assert "step 2, 2 ranks, 2 parts" in capsys.readouterr().out
        for command in ("to-universal", "consolidate"):
            assert main([command, first, str(tmp_path / command), "--quiet"]) == 2
            assert "cut into 2 parts; put them together with DeepSpeed's ds_to_uni" in capsys.readouterr().err
            assert not (tmp_path / command).exists()


class Few(nn.Module):
    """Parameters in parts, as a test says; whole without an ``mpu``.

    Args:
        cuts: the shape of a whole parameter by name, and its marks.
    """

    def __init__(self, mpu, cuts, **buffers):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, (shape, marks) in cuts.items():
            whole = torch.randn(shape, generator=generator)
            own = whole
            if mpu is not None and marks:
                runs = whole.chunk(marks.get("partition_stride", 1), marks["partition_dim"])
                own = torch.cat([part(run, marks["partition_dim"], mpu) for run in runs], marks["partition_dim"])
            param = nn.Parameter(own.clone())
            if mpu is not None and marks:
                mark(param, marks["partition_dim"], **marks)
            setattr(self, name, param)
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, step):
        return sum((p * p).sum() for p in self.parameters()) * (step + 1)


class TestOtherCuts(DistributedTest):
    """Cuts unlike those of Megatron's layers."""

    world_size = 4

    def train(self, cuts, mpu, **changes):
        engine = start(Few(mpu, cuts), ds_config(**changes), mpu=mpu or Mpu(1))
        for step in range(2):
            engine.backward(engine(step))
            engine.step()
        return engine

    @needs(*UNIVERSAL_PARTS)
    def test_pieces_of_runs(self, tmp_path):
        """Gate and up, one after the other on each rank, and in the whole."""
        cuts = {"gate_up": ((16, 8), {"partition_dim": 0, "partition_stride": 2}), "bias": ((16, ), {
            "partition_dim": 0, "partition_stride": 2}), "down": ((8, 16), {"partition_dim": 1})}
        layerwise = {"save_universal": True, "overrides": [{"name": "gate_up", "optimizer": "normuon"}]}
        for parts in (2, None):
            mpu = None if parts is None else Mpu(parts)
            self.train(cuts, mpu, layerwise=layerwise).save_checkpoint(tmp_path, tag=str(parts))
        whole = start(Few(None, cuts), ds_config(layerwise=layerwise), mpu=Mpu(1))
        mpu = Mpu(4)
        found = []
        for tag in ("2", "2_universal"):
            whole.load_checkpoint(tmp_path, tag=tag)
            found.append(everything(whole))
            assert_holds(whole, found[0])
            engine = start(Few(mpu, cuts), ds_config(layerwise=layerwise), mpu=mpu)
            engine.load_checkpoint(tmp_path, tag=tag)
            for (name, key), value in everything(engine).items():
                expected = found[0][name, key]
                if value.dim():
                    runs = expected.chunk(cuts[name][1].get("partition_stride", 1), cuts[name][1]["partition_dim"])
                    expected = torch.cat([part(run, cuts[name][1]["partition_dim"], mpu) for run in runs],
                                         cuts[name][1]["partition_dim"])
                assert torch.equal(value, expected), (name, key, tag)
            engine.destroy()
        assert dist.get_rank() or main(["verify", str(tmp_path / "2_universal"), "--quiet"]) == 0
        # The weights of the whole run, after the same steps of the same gradients.
        whole.load_checkpoint(tmp_path, tag="None")
        for key, value in everything(whole).items():
            torch.testing.assert_close(found[0][key], value)

    def test_refusals(self, tmp_path):
        """Errors have the name and the way out, on every rank, and nothing has changed."""
        rows, cols = {"partition_dim": 0}, {"partition_dim": 1}
        mpus = {1: None, 2: Mpu(2), 4: Mpu(4)}

        def refused(saved, loaded, match, cuts, others=None, **options):
            self.train(cuts, mpus[saved], **options).save_checkpoint(tmp_path, tag="saved")
            engine = self.train(others or cuts, mpus[loaded])
            before = everything(engine)
            with pytest.raises(LayerWiseError, match=match):
                engine.load_checkpoint(tmp_path, tag="saved")
            assert_holds(engine, before)

        refused(2, 4, "matrix was or is not cut into pieces along one axis, equal ones if in several runs, the same "
                "then and now, and cannot be cut anew; resume with 2 tensor-parallel part", {"matrix": ((8, 8), rows)},
                {"matrix": ((8, 8), cols)})
        refused(2, 1, "gate_up was or is not cut into pieces along one axis, equal ones if in several runs",
                {"gate_up": ((14, 8), {**rows, "partition_stride": 2})})
        # What no save could put together is said at the start.
        with pytest.raises(LayerWiseError, match="gate_up is not cut .* cannot be put together of 2 tensor-parallel"):
            self.train({"gate_up": ((14, 8), {**rows, "partition_stride": 2})}, mpus[2],
                       layerwise={"save_universal": True})
        refused(2, 4, r"matrix has 6 elements in each of 1 run\(s\) along axis 0, which 4 tensor-parallel parts do "
                "not divide; resume with a number that does", {"matrix": ((6, 8), rows)}, {"matrix": ((8, 8), rows)})

    @needs(*UNIVERSAL_PARTS)
    def test_stock_adamw_cuts_a_universal_checkpoint(self, tmp_path):
        layerwise = {"save_universal": True, "overrides": [{"name": "*", "optimizer": "scalar"}]}
        mpu = Mpu(2)
        engine = start(Net(mpu), ds_config(layerwise=layerwise), mpu=mpu)
        for step in range(STEPS):
            engine.backward(engine(batch(step, 0, mpu.get_data_parallel_rank())))
            engine.step()
        engine.save_checkpoint(tmp_path, tag="saved")
        parts = from_all_ranks(everything(engine))[:2]
        whole = joined(parts)
        for count in (2, 4):
            mpu = Mpu(count)
            # By these names, DeepSpeed's optimizers ask.
            mpu.get_tensor_model_parallel_world_size = mpu.get_model_parallel_world_size
            mpu.get_tensor_model_parallel_rank = mpu.get_model_parallel_rank
            mpu.get_tensor_model_parallel_group = mpu.get_model_parallel_group
            config = ds_config(optimizer={"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
                               checkpoint={"load_universal": True})
            del config["layerwise"]
            module = Net(mpu)
            stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config, mpu=mpu)
            stock.load_checkpoint(tmp_path, tag="saved_universal")
            for name, param in module.named_parameters():
                assert torch.equal(safe_get_full_fp32_param(param), part_of(whole[name, None], name, mpu)), name
                for key in ("exp_avg", "exp_avg_sq"):
                    found = safe_get_full_optimizer_state(param, key)
                    assert torch.equal(found, part_of(whole[name, key], name, mpu)), (name, key)
            stock.destroy()

    def test_a_buffer_that_differs_between_parts(self, tmp_path):
        mpu, cuts = Mpu(2), {"matrix": ((8, 8), {"partition_dim": 0})}
        first = torch.tensor(mpu.get_model_parallel_rank())
        start(Few(mpu, cuts, first=first), ds_config(), mpu=mpu).save_checkpoint(tmp_path, tag="saved")
        engine = start(Few(None, cuts, first=first), ds_config(), mpu=Mpu(1))
        with pytest.raises(LayerWiseError, match="first: its value differs between the 2 tensor-parallel parts, and is "
                                                 "no piece of a whole one; resume with 2"):
            engine.load_checkpoint(tmp_path, tag="saved")

    def test_a_universal_checkpoint_has_no_parts_of_what_was_left_out(self, tmp_path):
        cuts = {"matrix": ((8, 8), {"partition_dim": 0}), "frozen": ((8, 4), {"partition_dim": 1})}
        for mpu in (Mpu(2), None):
            module = Few(mpu, cuts)
            module.frozen.requires_grad_(False)
            engine = start(module, ds_config(layerwise={"save_universal": True}), mpu=mpu or Mpu(1))
            if mpu is not None:
                engine.save_checkpoint(tmp_path, tag="saved", exclude_frozen_parameters=True)
        assert [path.name for path in (tmp_path / "saved_universal" / "zero").iterdir() if path.is_dir()] == ["matrix"]
        with pytest.raises(LayerWiseError, match="lacks frozen, which the model has"):
            engine.load_checkpoint(tmp_path, tag="saved_universal")

    def test_earlier_versions_did_not_say_how(self, tmp_path):
        """They load with as many parts."""
        mpu, cuts = Mpu(2), {"matrix": ((8, 8), {"partition_dim": 0})}
        engine = self.train(cuts, mpu)
        internals.forget_cuts(engine)
        engine.save_checkpoint(tmp_path, tag="saved")
        saved = everything(engine)
        self.train(cuts, mpu).load_checkpoint(tmp_path, tag="saved")
        assert_holds(loaded(self.train(cuts, mpu), tmp_path, tag="saved"), saved)
        with pytest.raises(LayerWiseError, match="the model is in 2 tensor-parallel parts, and was saved by an earlier "
                                                 "version, which did not write how it is cut; resume with 2, and save"):
            self.train(cuts, None).load_checkpoint(tmp_path, tag="saved")


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager"))


def save_parts(engine, folder):
    """Save, and beside it what the two parts of the model are expected to have."""
    engine.save_checkpoint(folder, tag="parts")
    saved = everything(engine)
    if dist.get_rank() < 2:
        torch.save(saved, folder / f"expected_{dist.get_rank()}.pt")


class TestAutoTp(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("per_node", [4, 3])
    def test_a_language_model_against_the_whole_one(self, per_node, tmp_path, monkeypatch):
        """With three ranks on one node and one on the other, ranks 0 and 2 share one, and ranks 1 and 3 do not."""
        monkeypatch.setattr(nodes, "node_of_each_rank", lambda: [rank // per_node for rank in range(4)])

        def data(step, micro, rank):
            seed = 1 + rank + 10 * step
            return torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(seed))

        matrices = {name: (1, *p.shape) for name, p in llama().named_parameters() if "proj" in name}
        recipe = Recipe(matrices=matrices, world_size=2, clip=0.5, **RATES)
        expected = train(llama, data, lambda module, ids: module(input_ids=ids, labels=ids).loss, recipe, STEPS)
        for tp_mode, stage in (("owner", 1), ("duplicated", 1), ("distributed", 2)):
            module, params = llama(), {**MUON, "eps": 1e-8, "muon_tp_mode": tp_mode}
            engine = start(module, ds_config(clip=0.5, stage=stage, params=params, tensor_parallel={"autotp_size": 2}))
            routes = {n: route.tp_axis for n, route in engine.optimizer.routes.items() if route.whole}
            assert routes == {n: -1 if "o_proj" in n or "down_proj" in n else -2 for n in matrices}
            for step, wanted in enumerate(expected.steps):
                ids = data(step, 0, dist.get_rank() // 2)
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
                assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-6)
            for name, p in module.named_parameters():
                whole = expected.model_params[name]
                for dim, size in enumerate(p.shape):
                    whole = whole if whole.shape[dim] == size else whole.chunk(2, dim)[dist.get_rank() % 2]
                assert relative_error(p.detach(), whole) < 1e-5, (name, tp_mode)
            if stage == 1:
                engine.save_checkpoint(tmp_path, tag="parts")
                saved = everything(engine)
            else:
                engine.load_checkpoint(tmp_path, tag="parts")
                assert_holds(engine, saved)
            engine.destroy()

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("stage", [1, 2])
    def test_training_goes_on_after_whole_weights_were_put_together(self, stage):
        """A Trainer's save asks for ``gather_16bit_weights_on_model_save``."""
        ids, results = torch.arange(16).view(2, 8), []
        for saves in (False, True):
            module = llama()
            engine = start(module, ds_config(clip=0.5, stage=stage, tensor_parallel={"autotp_size": 2}))
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
                if saves:
                    places = [param.data_ptr() for param in module.parameters()]
                    weights = engine._consolidated_16bit_state_dict()
                    assert [param.data_ptr() for param in module.parameters()] == places
            results.append({name: param.detach().clone() for name, param in module.named_parameters()})
            engine.destroy()
        plain, saved = results
        assert all(torch.equal(plain[name], value) for name, value in saved.items())
        if dist.get_rank() == 0:
            shapes = {name: param.shape for name, param in llama().named_parameters()}
            assert {name: weights[name].shape for name in shapes} == shapes
            for name, value in saved.items():
                dim = [size != whole for size, whole in zip(value.shape, shapes[name], strict=True)]
                assert torch.equal(weights[name].chunk(2, dim.index(True))[0] if any(dim) else weights[name], value)

    def test_whole_weights_are_new_whatever_is_under_way(self, monkeypatch):
        """After a step that waits for no gather, and with states on the host."""
        arrive_late(monkeypatch)
        engine = start(llama(), ds_config(layerwise={"overlap_param_gather": True}, tensor_parallel={"autotp_size": 2}))
        ids = torch.arange(16).view(2, 8)
        for offloads in (False, True):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            if offloads:
                engine.offload_states()
            weights = engine._consolidated_16bit_state_dict()
            engine.optimizer.wait_for_params()
            for name, param in engine.module.named_parameters():
                parts = torch.cat(from_all_ranks(param.detach().flatten())[:2])
                assert dist.get_rank() or torch.equal(weights[name].unique(), parts.unique()), name

    def test_groups_of_tp_model_init_that_are_others_are_refused(self):
        """Gradients would be averaged over ranks with other parts."""
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        module = deepspeed.tp_model_init(llama(), tp_size=2, dtype=torch.float32, tp_group=groups[dist.get_rank() % 2])
        with pytest.raises(ConfigError, match=r"AutoTP has cut the model over ranks .*; leave tp_group out"):
            start(module, ds_config(tensor_parallel={"autotp_size": 2}))

    @pytest.mark.world_size(2)
    def test_an_mpu_with_the_same_groups_changes_nothing(self):
        ids, results = torch.arange(16).view(2, 8), []
        for mpu in (None, Mpu(2)):
            module = llama()
            engine = start(module, ds_config(clip=0.5, tensor_parallel={"autotp_size": 2}), mpu=mpu)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            results.append((engine.get_global_grad_norm(), {name: p.detach().clone() for name, p in
                                                            module.named_parameters()}))
            engine.destroy()
        assert results[0][0] == results[1][0]
        for name, value in results[0][1].items():
            assert torch.equal(value, results[1][1][name]), name

    @pytest.fixture
    def run_of_4(self, class_tmpdir):
        return made_once(class_tmpdir / "run", [4], self.save)

    def save(self, folder):
        engine = start(llama(), ds_config(params={"eps": 1e-8}, tensor_parallel={"autotp_size": 2}))
        for step in range(STEPS):
            ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(step))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        save_parts(engine, folder)

    @needs("deepspeed>=0.19.8", "its ds_to_universal.py looks for the parts of AutoTP elsewhere")
    @pytest.mark.world_size(2)
    def test_deepspeeds_converter_puts_the_parts_together(self, run_of_4, tmp_path):
        convert(run_of_4 / "parts", tmp_path / "whole")
        engine = loaded(start(llama(), ds_config()), tmp_path, tag="whole")
        one, other = (torch.load(run_of_4 / f"expected_{rank}.pt") for rank in range(2))
        for key, value in everything(engine).items():
            cut = [dim for dim, size in enumerate(value.shape) if one[key].shape[dim] != size]
            assert torch.equal(value, torch.cat([one[key], other[key]], *cut) if cut else one[key]), key
        engine.destroy()
        engine = start(llama(), ds_config(tensor_parallel={"autotp_size": 2}))
        engine.load_checkpoint(tmp_path, tag="whole")
        assert_holds(engine, (one, other)[dist.get_rank()])


#: By parameter, its shape, the axis that is cut, and the lengths of two and of three parts. Some are the same on one
#: rank and not on another, some whole ones are the same in other parts, and the first rank has not always the longest.
UNEQUAL = {
    "tall": ((21, 6), 0, (11, 10), (8, 8, 5)), "taller": ((22, 6), 0, (11, 11), (8, 6, 8)),
    "flat": ((6, 21), 1, (9, 12), (6, 7, 8)), "rows": ((7, 20), 0, (4, 3), (2, 3, 2)),
    "cols": ((20, 7), 1, (3, 4), (3, 2, 2)), "square": ((12, 12), 0, (5, 7), (2, 6, 4)),
    "turned": ((12, 12), 0, (7, 5), (6, 2, 4)), "even": ((12, 12), 0, (6, 6), (4, 4, 4)),
    "stack": ((3, 7, 6), 1, (3, 4), (3, 2, 2)), "experts": ((7, 4, 6), 0, (4, 3), (2, 3, 2)),
    "narrow": ((4, 6), 0, (3, 1), (2, 1, 1)), "vector": ((7,), 0, (4, 3), (3, 2, 2)),
    "copied": ((6, 6), None, (), ())}


def unequal(whole, name, mpu):
    """This rank's part of ``whole``."""
    _, dim, *lengths = UNEQUAL[name]
    if dim is None or mpu is None:
        return whole
    return whole.split(lengths[mpu.get_model_parallel_world_size() - 2], dim)[mpu.get_model_parallel_rank()]


class UnequalParts(nn.Module):
    """Parameters in parts, whole without an ``mpu``, with whole numbers for gradients."""

    def __init__(self, mpu=None):
        super().__init__()
        generator, self.mpu = torch.Generator().manual_seed(5), mpu
        for name, (shape, dim, *_) in UNEQUAL.items():
            param = nn.Parameter(unequal(torch.randn(shape, generator=generator), name, mpu).clone())
            if mpu is not None and dim is not None:
                mark(param, dim)
            setattr(self, name, param)

    def forward(self, place):
        return sum((p * unequal(whole_number_gradients(name, UNEQUAL[name][0], *place), name, self.mpu)).sum()
                   for name, p in self.named_parameters())


def train_unequal(engine, mpu, steps, gas=1, check=None):
    rank = 0 if mpu is None else mpu.get_data_parallel_rank()
    for step in steps:
        for micro in range(gas):
            engine.backward(engine((step, micro, rank)))
            if check and micro == gas - 1:
                check(step, reduced_gradients(engine))
            engine.step()
    engine.optimizer.wait_for_params()
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


class TestUnequalParts(DistributedTest):
    world_size = [3, 4]

    @pytest.mark.world_size(3)
    def test_parts_of_an_earlier_engine_are_forgotten(self):
        for group in (None, dist.get_world_group()):
            module = nn.Linear(4, 4)
            setattr(module.weight, PART_SHAPES, [(4, 4), (5, 4), (4, 4)])
            agree_on_parts(module, group=group)
            assert not hasattr(module.weight, PART_SHAPES)

    @pytest.mark.parametrize("tp_mode, stage, changes", [
        ("duplicated", 1, {}), ("owner", 2, {}), ("distributed", 1, {"ns_method": "standard"}), ("auto", 2, {}),
        ("distributed", 2, {}), ("owner", 1, {"spectral_clip": 1.0}), ("auto", 1, {"ns_method": "standard"})])
    def test_against_the_whole_model(self, tp_mode, stage, changes):
        mpu = Mpu(3 if dist.get_world_size() == 3 else 2)
        whole = dict(UnequalParts().named_parameters())
        matrices = {name: (1, *p.shape)[-3:] for name, p in whole.items() if p.dim() > 1}
        recipe = Recipe(matrices=matrices, world_size=mpu.get_data_parallel_world_size(), gas=2, clip=40.0, **RATES)
        expected = train_on_gradients(whole, whole_number_gradients, recipe, STEPS)
        assert expected.steps[0].clip_factor > 1
        if "spectral_clip" in changes:
            # By an engine of whole matrices instead: the oracle clips none.
            alone = start(UnequalParts(), ds_config(params={"eps": 1e-8, **changes}, clip=40.0, gas=2), mpu=Mpu(1))
            for step in range(STEPS):
                for micro in range(2):
                    alone.backward(alone((step, micro, dist.get_rank() % mpu.get_data_parallel_world_size())))
                    alone.step()
            alone.optimizer.wait_for_params()
            expected.model_params.update((name, p.detach().clone()) for name, p in alone.module.named_parameters())
            alone.destroy()
        params = {**MUON, "eps": 1e-8, "ns_method": "gram", **changes, "muon_tp_mode": tp_mode}
        engine = start(UnequalParts(mpu), ds_config(stage=stage, gas=2, clip=40.0, params=params), mpu=mpu)
        # There is room for the largest part on every rank.
        room, *others = from_all_ranks([bucket.numel for bucket in engine.optimizer.layout.buckets])
        assert all(other == room for other in others)

        def check(step, gradients):
            for name, (first, values) in gradients.items():
                wanted = unequal(expected.steps[step].grads[name], name, mpu).flatten()[first:first + values.numel()]
                assert torch.equal(values, wanted), name

        for step, wanted in enumerate(expected.steps):
            found = train_unequal(engine, mpu, [step], 2, check)
            assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-6)
        for name, p in found.items():
            assert relative_error(p, unequal(expected.model_params[name], name, mpu)) < 1e-5, name

    @pytest.mark.parametrize("tp_mode", ["duplicated", "owner", "distributed"])
    def test_other_matrix_optimizers(self, tp_mode):
        mpu, whole = Mpu(3 if dist.get_world_size() == 3 else 2), UnequalParts()
        copies = mpu.get_data_parallel_world_size()
        rules = {"tall": ("normuon", {}), "flat": ("adamuon", {}), "rows": ("namo", {}), "turned": ("scion", {}),
                 "cols": ("polargrad", {"extra_scale_factor": 0.01}), "square": ("normuon", {"relative_update": True}),
                 "taller": ("normuon", {"moment2_per": "column"}), "even": ("adamuon", {"hyperball": 3.0})}
        entries = [{"name": name, "optimizer": rule, "lr_scale": 2.5, "ns_method": "standard", "ns_dtype": "fp32",
                    **settings} for name, (rule, settings) in rules.items()]
        engine = start(UnequalParts(mpu), ds_config(layerwise={"overrides": entries},
                                                    params={"muon_tp_mode": tp_mode}), mpu=mpu)
        found = train_unequal(engine, mpu, range(STEPS))
        for name, (rule, settings) in rules.items():
            first = whole.get_parameter(name).detach()
            mean = [mean_gradient(name, first.shape, step, copies) for step in range(STEPS)]
            wanted = train_alone(rule, first, mean, lr=0.05, weight_decay=0.1, settings=settings)
            moved = found[name] - unequal(first, name, mpu)
            assert relative_error(moved, unequal(wanted - first, name, mpu)) < 1e-5, name

    def test_blockwise_is_the_oracle_on_parts(self):
        mpu = Mpu(3 if dist.get_world_size() == 3 else 2)
        module = UnequalParts(mpu)
        own = dict(module.named_parameters())
        expected = train_on_gradients(
            own, lambda name, shape, *place: unequal(whole_number_gradients(name, UNEQUAL[name][0], *place), name, mpu),
            Recipe(matrices={name: (1, *p.shape)[-3:] for name, p in own.items() if p.dim() > 1},
                   world_size=mpu.get_data_parallel_world_size(), **RATES), STEPS)
        engine = start(module, ds_config(params={**MUON, "eps": 1e-8, "muon_tp_mode": "blockwise"}), mpu=mpu)
        for name, p in train_unequal(engine, mpu, range(STEPS)).items():
            assert relative_error(p, expected.model_params[name]) < 1e-5, name

    @pytest.mark.world_size(4)
    def test_bf16_on_the_host_resumes(self, tmp_path):
        mpu, found = Mpu(2), []
        config = ds_config(bf16={"enabled": True}, params={"muon_tp_mode": "owner"})
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.5}
        for tag in (None, "saved"):
            engine = start(UnequalParts(mpu), config, mpu=mpu)
            if tag is None:
                train_unequal(engine, mpu, range(2))
                engine.save_checkpoint(tmp_path, tag="saved")
            else:
                engine.load_checkpoint(tmp_path, tag=tag)
            train_unequal(engine, mpu, range(2, 4))
            found.append(everything(engine))
            engine.destroy()
        assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())

    def engine_in(self, mpu, **changes):
        overrides = [{"name": "tall", "optimizer": "normuon"},
                     {"name": "flat", "optimizer": "normuon", "moment2_per": "column"},
                     {"name": "square", "optimizer": "adamuon", "lr_scale": 0.5},
                     {"name": "rows", "optimizer": "scalar"}]
        layerwise = {"save_universal": True, "overrides": overrides}
        return start(UnequalParts(mpu), ds_config(clip=40.0, layerwise=layerwise, **changes), mpu=mpu or Mpu(1))

    @pytest.fixture
    def run_of_4(self, class_tmpdir):
        """A checkpoint in two parts, in two copies, and what each part was then and later."""
        return made_once(class_tmpdir / "unequal", [4], self.save)

    def save(self, folder):
        mpu = Mpu(2)
        engine = self.engine_in(mpu)
        train_unequal(engine, mpu, range(2))
        engine.save_checkpoint(folder, tag="saved")
        expected = {"saved": everything(engine)}
        train_unequal(engine, mpu, range(2, 4))
        expected["later"] = everything(engine)
        if mpu.get_data_parallel_rank() == 0:
            torch.save(expected, folder / f"expected_{mpu.get_model_parallel_rank()}.pt")

    @pytest.mark.world_size(4)
    def test_resume_in_the_same_parts(self, run_of_4):
        mpu = Mpu(2)
        expected = torch.load(run_of_4 / f"expected_{mpu.get_model_parallel_rank()}.pt")
        for changes in ({}, {"stage": 2, "bucket_numel": 10**6}):
            engine = loaded(self.engine_in(mpu, **changes), run_of_4, tag="saved")
            assert_holds(engine, expected["saved"])
            train_unequal(engine, mpu, range(2, 4))
            assert_holds(engine, expected["later"])
            engine.destroy()

    @pytest.mark.world_size(3)
    def test_resume_in_other_parts(self, run_of_4):
        """In three, and whole; from a regular checkpoint, and from a universal one."""
        one, other = (torch.load(run_of_4 / f"expected_{rank}.pt")["saved"] for rank in range(2))
        whole = {}
        for name, key in one:
            cut = [dim for dim, sizes in enumerate(zip(one[name, key].shape, UNEQUAL[name][0]))
                   if dim == UNEQUAL[name][1] and sizes[0] > 1]
            whole[name, key] = torch.cat([one[name, key], other[name, key]], *cut) if cut else one[name, key]
        for tag in ("saved", "saved_universal"):
            for mpu in (Mpu(3), None):
                engine = loaded(self.engine_in(mpu), run_of_4, tag=tag)
                for (name, key), value in everything(engine).items():
                    wanted = whole[name, key]
                    if value.shape != wanted.shape:
                        wanted = unequal(wanted, name, mpu)
                    assert torch.equal(value, wanted), (name, key, tag)
                engine.destroy()

    @pytest.mark.world_size(4)
    def test_a_state_that_looks_like_the_first_part(self, tmp_path, monkeypatch):
        """A number a row, beside a part of one column."""
        monkeypatch.setitem(globals(), "UNEQUAL", {"column": ((6, 3), 1, (1, 2), ())})
        layerwise = {"save_universal": True, "overrides": [{"name": "*", "optimizer": "normuon"}]}

        def begin(mpu):
            return start(UnequalParts(mpu), ds_config(layerwise=layerwise), mpu=mpu or Mpu(1))

        def held(engine):
            """The states of each rank that has some, as a column."""
            every = from_all_ranks([piece.state["moment2_buffer"].clone() for piece in internals.records(engine)])
            return [state.view(6, 1) for of_rank in every for state in of_rank]

        mpu = Mpu(2)
        engine = begin(mpu)
        train_unequal(engine, mpu, range(2))
        engine.save_checkpoint(tmp_path, tag="saved")
        saved = held(engine)
        for tag in ("saved", "saved_universal"):
            for other in (mpu, None):
                found = held(loaded(begin(other), tmp_path, tag=tag))
                assert found and all(torch.equal(state, saved[0]) for state in found + saved), tag

    @pytest.mark.world_size(1)
    def test_the_file_is_whole_for_the_command_line(self, run_of_4):
        assert main(["verify", str(run_of_4 / "saved"), "--quiet"]) == 0


def uneven_llama():
    """Three heads of keys and values, and numbers that two ranks, or four, do not divide."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=33, hidden_size=24, intermediate_size=33, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=16, attn_implementation="eager", tie_word_embeddings=False))


def tokens_of(step, rank):
    return torch.randint(0, 33, (2, 8), generator=torch.Generator().manual_seed(1 + rank + 10 * step))


class TestUnevenAutoTp(DistributedTest):
    world_size = 4

    def train(self, engine, steps=range(STEPS)):
        losses = []
        for step in steps:
            ids = tokens_of(step, dist.get_rank() // 2)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    @pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.thorough), 2])
    def test_adamw_against_stock(self, stage):
        changes = {"clip": 0.5, "stage": stage, "tensor_parallel": {"autotp_size": 2}}
        params = {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        config = ds_config(**changes, optimizer={"type": "AdamW", "params": {**params, "torch_adam": True}})
        del config["layerwise"]
        module = uneven_llama()
        stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        expected = self.train(stock)
        stock.destroy()
        scalar = {"overrides": [{"name": "*", "optimizer": "scalar"}]}
        ours = start(uneven_llama(), ds_config(**changes, layerwise=scalar, params={
            "adam_lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}))
        assert self.train(ours) == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("tp_mode, stage", [("owner", 1), ("auto", 2)])
    def test_against_the_whole_one(self, tp_mode, stage):
        matrices = {name: (1, *p.shape) for name, p in uneven_llama().named_parameters() if "proj" in name}
        expected = train(uneven_llama, lambda step, micro, rank: tokens_of(step, rank),
                         lambda module, ids: module(input_ids=ids, labels=ids).loss,
                         Recipe(matrices=matrices, world_size=2, clip=0.5, **RATES), STEPS)
        engine = start(uneven_llama(), ds_config(clip=0.5, stage=stage, params={
            **MUON, "eps": 1e-8, "muon_tp_mode": tp_mode}, tensor_parallel={"autotp_size": 2}))
        for step, wanted in enumerate(expected.steps):
            self.train(engine, [step])
            assert engine.get_global_grad_norm() == pytest.approx(wanted.norm, rel=1e-6)
        shapes = {}
        for name, p in engine.module.named_parameters():
            whole = expected.model_params[name]
            parts = from_all_ranks(p.detach().clone())[:2]
            shapes[name] = [tuple(part.shape) for part in parts]
            if p.shape != whole.shape:
                dim = next(dim for dim, size in enumerate(p.shape) if whole.shape[dim] != size)
                parts = [torch.cat(parts, dim)]
            assert relative_error(parts[0], whole) < 1e-5, name
        assert shapes["model.layers.0.self_attn.k_proj.weight"] == [(8, 24), (4, 24)]
        assert shapes["model.layers.0.mlp.down_proj.weight"] == [(24, 17), (24, 16)]

    @pytest.fixture
    def run_of_4(self, class_tmpdir):
        return made_once(class_tmpdir / "run", [4], self.save)

    def save(self, folder):
        engine = start(uneven_llama(), ds_config(params={"eps": 1e-8}, tensor_parallel={"autotp_size": 2}))
        self.train(engine)
        save_parts(engine, folder)

    @needs("deepspeed>=0.19.8", "its ds_to_universal.py looks for the parts of AutoTP elsewhere")
    @pytest.mark.world_size(2)
    def test_deepspeeds_converter_puts_the_parts_together(self, run_of_4, tmp_path):
        convert(run_of_4 / "parts", tmp_path / "whole")
        one, other = (torch.load(run_of_4 / f"expected_{rank}.pt") for rank in range(2))
        saves = (run_of_4, "parts"), (tmp_path, "whole")
        for folder, tag in saves:
            engine = loaded(start(uneven_llama(), ds_config()), folder, tag=tag)
            for key, value in everything(engine).items():
                cut = [dim for dim, size in enumerate(value.shape) if one[key].shape[dim] != size]
                assert torch.equal(value, torch.cat([one[key], other[key]], *cut) if cut else one[key]), key
            engine.destroy()
        for folder, tag in saves:
            engine = loaded(start(uneven_llama(), ds_config(tensor_parallel={"autotp_size": 2})), folder, tag=tag)
            assert_holds(engine, (one, other)[dist.get_rank()])
            engine.destroy()
