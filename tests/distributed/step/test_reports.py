"""Reports of a step, and what follows from them: norms, groups of norms, zeros, skipped steps, rates, updates.

They are compared by value, from whole gradients: whole numbers, which add up exactly.
"""

import csv
import math

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import logger

from ds_layerwise.errors import ConfigError, RoutingError, StepError
from tests.distributed.parallel.test_experts import ExpertNet
from tests.distributed.parallel.test_pipeline import config as pipeline_config
from tests.distributed.parallel.test_pipeline import oracle as pipeline_oracle
from tests.distributed.parallel.test_pipeline import pipeline, train_pipeline
from tests.distributed.parallel.test_tensor_parallel import OnWholeNumbers
from tests.support.costs import Operations
from tests.support.expected import mean_gradient
from tests.support.harness import DistributedTest
from tests.support.reference import Reference, trainable, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu
from tests.support.tensor_parallel import Net as CutNet
from tests.support.training import (
    BF16,
    ON_HOST,
    Net,
    allow_fp16,
    assert_same_on_all_ranks,
    ds_config,
    recipe_for,
    relative_error,
    start,
    train_engine,
    weights,
)

pytestmark = rooms("sections", "metrics", "clip", "reductions", "conditions", "skipped_steps", "step_agreement")


def averages(step, num_ranks, gas=1, module=None):
    """Whole averaged gradients, by name."""
    return {name: sum(whole_number_gradients(name, p.shape, step, micro, rank)
                      for rank in range(num_ranks) for micro in range(gas)) / (gas * num_ranks)
            for name, p in trainable(module or Net()).items()}


def norm_of(grads, chosen=lambda name: True):
    return math.sqrt(sum(float(g.double().square().sum()) for name, g in grads.items() if chosen(name)))


def in_group(name):
    return name.startswith(("tall.", "head."))


#: The condition of an override that is :func:`in_group`.
GROUP = {"name": ["tall.*", "head.*"]}


class TestGroups(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("stage, bound, sections", [
        (1, None, {}), (2, 7.0, {}), (1, 7.0, BF16), (1, 0, {"fp16": {"enabled": True, "loss_scale": 8}})])
    def test_norms_and_clips_are_those_of_the_parts(self, stage, bound, sections):
        """A group with a bound of its own counts in its own norm alone; one without in both."""
        allow_fp16()
        ranks, clip = dist.get_world_size(), 20.0
        own = {} if bound is None else {"gradient_clipping": bound}
        groups = {"late": {**GROUP, **own}, "tables": {"module": "Embedding"},
                  "none": {"name": "no.*", "optional": True}}
        engine = start(Net(), ds_config(stage=stage, clip=clip, layerwise={"norm_groups": groups}, **sections))
        reference = Reference(trainable(Net()), recipe_for(Net(), param_dtype=next(engine.module.parameters()).dtype))
        for step in range(2):
            mean = averages(step, ranks)
            norms = {"late": norm_of(mean, in_group), "tables": norm_of(mean, lambda name: name == "embed.weight"),
                     "none": 0.0, "all": norm_of(mean, lambda name: bound is None or not in_group(name))}
            train_engine(engine, 1, first=step)
            told = engine.optimizer.report()
            assert {key: told[f"grad_norm_{key}"] for key in groups} == pytest.approx(
                {key: norms[key] for key in groups}, rel=1e-6)
            assert told["grad_norm"] == pytest.approx(norms["all"], rel=1e-6)
            assert engine.get_global_grad_norm() == pytest.approx(norms["all"], rel=1e-6)
            of_late = max(1.0, norms["late"] / bound) if bound else 1.0
            factors = {name: of_late if in_group(name) and bound is not None else max(1.0, norms["all"] / clip)
                       for name in mean}
            assert norms["all"] > clip and norms["late"] > 7
            reference.step([[{name: mean[name] / factors[name] for name in mean}]] * ranks)
        for name, value in reference.model_params().items():
            assert relative_error(engine.module.get_parameter(name).detach().float(), value.float()) < (
                1e-2 if sections else 1e-5), name
        assert_same_on_all_ranks(engine.module)


class TestRefusals(DistributedTest):
    @pytest.mark.parametrize("groups, told", [
        ({"a": {"name": "tall.*"}, "b": {"ndim": 2}}, "tall.weight is in layerwise.norm_groups.a and in layerwise."
         "norm_groups.b, and counts in the norm of one; narrow one of the two"),
        ({"a": {"name": "tall.*"}, "b": {"name": "tell.*"}}, "layerwise.norm_groups.b ('tell.*') matches no trainable "
         "parameter; is the pattern misspelled? With \"optional\": true it may match none")])
    def test_groups_that_cannot_be(self, groups, told):
        with pytest.raises(RoutingError) as error:
            start(Net(), ds_config(layerwise={"norm_groups": groups}))
        assert str(error.value) == told

    @pytest.mark.parametrize("layerwise, told", [
        ({"grad_norm_skip_threshold": 1.0}, "layerwise.grad_norm_skip_threshold needs the norm"),
        ({"norm_groups": {"a": GROUP}}, "layerwise.norm_groups needs the norm")])
    def test_no_norm_no_judgement(self, layerwise, told):
        zero = {"stage": 1, "compute_grad_norm": False}
        with pytest.raises(ConfigError, match=f"zero_optimization.compute_grad_norm is false, but {told}"):
            start(Net(), ds_config(layerwise=layerwise, zero_optimization=zero))


class Loud(Net):
    """Gradients are ``loudness`` times as large."""

    loudness = 1.0

    def forward(self, place):
        return super().forward(place) * self.loudness


class TestThreshold(DistributedTest):
    def train(self, engine, steps, loudness, first=0):
        engine.module.loudness = loudness
        train_engine(engine, steps, first=first)

    @pytest.mark.parametrize("stage, sections", [
        (1, {}), (2, BF16), (1, {"bf16": {"enabled": True, "check_grad_overflow": False}}),
        (1, {"fp16": {"enabled": True, "initial_scale_power": 3, "hysteresis": 1, "loss_scale_window": 1000}})])
    def test_a_step_above_it_changes_nothing_but_counts(self, stage, sections, monkeypatch):
        allow_fp16()
        warned, threshold = [], 2 * norm_of(averages(0, 2))
        monkeypatch.setattr(logger, "warning", warned.append)
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 5,
                                                   "warmup_type": "linear"}}
        engine = start(Loud(), ds_config(stage=stage, clip=1.0, scheduler=schedule, layerwise={
            "grad_norm_skip_threshold": threshold}, **sections))
        plain = start(Net(), ds_config(stage=stage, clip=1.0, scheduler=schedule, **sections))
        self.train(engine, 1, 1.0)
        train_engine(plain, 1)
        before, scale, rate = weights(engine.module).clone(), engine.optimizer.loss_scale, engine.get_lr()
        self.train(engine, 3, 4.0)
        assert torch.equal(weights(engine.module), before) and engine.optimizer.loss_scale == scale
        assert engine.skipped_steps == 3 and engine.global_steps == 4 and engine.get_lr() == rate
        assert engine.optimizer.overflow and not engine.was_step_applied() and engine.optimizer.step_count == 1
        norm = 4 * norm_of(averages(2, 2))
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-6) and math.isfinite(norm)
        first, second = (f"ds_layerwise: step 2 was skipped: the norm of its gradients, {4 * norm_of(averages(i, 2)):g}"
                         f", is above layerwise.grad_norm_skip_threshold, which is {threshold:g} "
                         f"({i + 1} such steps in this process, {i + 1} consecutive skipped steps)"
                         for i in (0, 1))
        assert [line for line in warned if line.startswith("ds_layerwise")] == [first, second] * (
            dist.get_rank() == 0)
        # The run goes on as if those had not been.
        self.train(engine, 1, 1.0, first=1)
        train_engine(plain, 1, first=1)
        assert torch.equal(weights(engine.module), weights(plain.module)) and engine.get_lr() == plain.get_lr()

    def test_for_ever_is_an_error_and_what_is_not_finite_counts_along(self):
        engine = start(Loud(), ds_config(layerwise={"grad_norm_skip_threshold": 1.0, "max_skipped_steps": 3}))
        self.train(engine, 1, 1.0)
        self.train(engine, 1, math.inf)
        assert engine.get_global_grad_norm() == math.inf
        with pytest.raises(StepError, match=(
                r"step 1 was skipped 3 consecutive times: the norm of its gradients, .* is above layerwise."
                r"grad_norm_skip_threshold, which is 1; raise the threshold, look for the cause, or allow more "
                r"\(layerwise.max_skipped_steps\)")):
            self.train(engine, 1, 1.0)

    def test_exactly_at_it_is_not_above(self):
        norm = norm_of(averages(0, 2))
        engine = train_engine(start(Net(), ds_config(layerwise={"grad_norm_skip_threshold": norm})), 1)
        assert engine.skipped_steps == 0


class TestZeros(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("stage, gas, sections", [(1, 2, {}), (2, 1, BF16)])
    def test_they_are_counted_once_over_all_ranks(self, stage, gas, sections):
        """Parameters without a gradient in the step are zeros; frozen ones do not count."""
        module = Net(odd=True, frozen=True)
        engine = start(module, ds_config(stage=stage, gas=gas, layerwise={"log_num_zeros_in_grad": True}, **sections))
        names = {name for name, p in module.named_parameters() if p.requires_grad}
        for step in range(2):
            mean = averages(step, dist.get_world_size(), gas, Net(odd=True, frozen=True))
            for name in ("unused.weight", "unused.bias"):
                mean[name] = torch.zeros_like(mean[name])
            if step == 1:
                module.square.weight.requires_grad = False
                names.remove("square.weight")
            train_engine(engine, 1, gas=gas, first=step)
            expected = sum(int((mean[name] == 0).sum()) for name in names & mean.keys())
            assert engine.optimizer.report()["num_zeros_in_grad"] == expected > 20


def reference_of(ranks, steps, module=None, **more):
    """An oracle that has taken so many steps, and one that has taken one less."""
    found = []
    for number in (steps, steps - 1):
        reference = Reference(trainable(module or Net()), recipe_for(module or Net(), **more))
        for step in range(number):
            reference.step([[{name: whole_number_gradients(name, p.shape, step, 0, rank)
                              for name, p in trainable(module or Net()).items()}] for rank in range(ranks)])
        found.append(reference)
    return found


def told_of_updates(after, before):
    """The values of the last update that the monitor gets, by label."""
    kinds = {"muon": after.recipe.matrices, "adamw": after.params.keys() - after.recipe.matrices.keys()}
    told = {}
    for rule, names in kinds.items():
        changes = torch.cat([(after.params[name] - before.params[name]).flatten() for name in names])
        momenta = [after.state[name]["momentum_buffer" if rule == "muon" else "exp_avg"] for name in names]
        told[f"update_rms_{rule}"] = float(changes.double().square().mean().sqrt())
        told[f"momentum_norm_{rule}"] = norm_of(dict(enumerate(momenta)))
    return told


class TestUpdates(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("stage, sections, layerwise", [
        (1, {}, {}), (2, BF16, {"batch_matrices": False}), (1, {}, {"overlap_param_gather": True}),
        (1, {**BF16, **ON_HOST}, {})])
    def test_lengths_of_updates_and_momenta(self, stage, sections, layerwise):
        told = {"update_rms": True, "momentum_norm": True, "every": 2}
        engine = start(Net(), ds_config(stage=stage, layerwise={"monitor": told, **layerwise}, **sections))
        train_engine(engine, 1)
        assert not [key for key in engine.optimizer.report() if "update" in key]
        train_engine(engine, 2, first=1)
        after, before = reference_of(dist.get_world_size(), 2, param_dtype=torch.bfloat16 if BF16.items() <=
                                     sections.items() else torch.float32)
        expected = told_of_updates(after, before)
        found = engine.optimizer.report()
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-4)


class TestMonitor(DistributedTest):
    def test_all_of_it_with_the_samples_of_the_engine(self, class_tmpdir):
        threshold = 1.5 * norm_of(averages(0, 2))
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 4,
                                                   "warmup_type": "linear"}}
        engine = start(Loud(), ds_config(
            scheduler=schedule, csv_monitor={"enabled": True, "output_path": str(class_tmpdir), "job_name": "run"},
            layerwise={"grad_norm_skip_threshold": threshold, "log_num_zeros_in_grad": True,
                       "norm_groups": {"late": GROUP}, "monitor": {"update_rms": True, "momentum_norm": True}}))
        norms = []
        for step in range(4):
            engine.module.loudness = 5.0 if step == 1 else 1.0
            train_engine(engine, 1, first=step)
            norms.append(engine.module.loudness * norm_of(averages(step, 2)))
        dist.barrier()

        def read(what):
            with (class_tmpdir / "run" / f"Train_Samples_{what}.csv").open() as file:
                return [(int(samples), float(value)) for samples, value in list(csv.reader(file))[1:]]

        all_steps, updates = [2, 4, 6, 8], [2, 6, 8]
        assert read("grad_norm") == [(x, pytest.approx(norm, rel=1e-6)) for x, norm in zip(all_steps, norms)]
        assert [x for x, _ in read("grad_norm_late")] == [x for x, _ in read("num_zeros_in_grad")] == all_steps
        assert read("skipped_steps") == [(2, 0), (4, 1), (6, 1), (8, 1)]
        rates = read("lr")
        assert read("adam_lr") == [(x, pytest.approx(lr)) for x, lr in rates] and rates[-1][1] > rates[0][1]
        assert read("muon_lr") == [(x, pytest.approx(lr * 0.02 / 0.003)) for x, lr in rates]
        for what in ("update_rms", "momentum_norm"):
            for rule in ("muon", "adamw"):
                assert [x for x, _ in read(f"{what}_{rule}")] == updates
        last = engine.optimizer.report()
        assert {key: read(key)[-1][1] for key in last} == pytest.approx(last, rel=1e-6)

    def test_it_changes_no_bit_and_asks_for_nothing_when_it_is_off(self):
        results, counts = [], []
        everything = {"log_num_zeros_in_grad": True, "norm_groups": {"late": GROUP},
                      "monitor": {"update_rms": True, "momentum_norm": True}, "grad_norm_skip_threshold": 1e9}
        for layerwise in ({}, {"monitor": {"update_rms": True, "momentum_norm": True, "every": 50},
                               "grad_norm_skip_threshold": 1e9}, everything):
            engine = train_engine(start(Net(), ds_config(clip=3.0, layerwise=layerwise)), 1)
            engine.backward(engine((1, 0, dist.get_rank())))
            with Operations() as counting:
                engine.step()
            results.append(weights(engine.module).clone())
            counts.append(counting.count)
            engine.destroy()
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        assert counts[0] == counts[1] < counts[2]


class TestTensorParallel(DistributedTest):
    world_size = 4

    def test_parts_are_one_and_copies_count_once(self):
        mpu = Mpu(2)
        cut = {"shape": list(dict(CutNet().named_parameters())["tall_rows.weight"].shape)}
        engine = start(OnWholeNumbers(mpu), ds_config(clip=1.0, layerwise={
            "norm_groups": {"cut": {**cut, "name": "tall_rows.*", "gradient_clipping": 2.0}, "vectors": {"ndim": 1}},
            "log_num_zeros_in_grad": True, "monitor": {"update_rms": True, "momentum_norm": True}}), mpu=mpu)
        whole = {name: p.shape for name, p in CutNet().named_parameters()}
        mean = {name: mean_gradient(name, shape, 0, 2) for name, shape in whole.items()}
        engine.backward(engine((whole, mpu, (0, 0, mpu.get_data_parallel_rank()))))
        engine.step()
        told = engine.optimizer.report()
        assert told["grad_norm"] == pytest.approx(norm_of(mean, lambda name: name != "tall_rows.weight"), rel=1e-6)
        assert told["grad_norm_cut"] == pytest.approx(norm_of(mean, lambda name: name == "tall_rows.weight"), rel=1e-6)
        assert told["grad_norm_vectors"] == pytest.approx(norm_of(mean, lambda name: len(whole[name]) == 1), rel=1e-6)
        assert told["num_zeros_in_grad"] == sum(int((g == 0).sum()) for g in mean.values())
        # The first momentum is a twentieth of the clipped gradient.
        matrices = {name for name, route in engine.optimizer.routes.items() if route.whole}
        clipped = {name: g / (told["grad_norm_cut"] / 2 if name == "tall_rows.weight" else told["grad_norm"])
                   for name, g in mean.items()}
        assert told["momentum_norm_muon"] == pytest.approx(0.05 * norm_of(clipped, matrices.__contains__), rel=1e-4)


class TestPipeline(DistributedTest):
    world_size = 4

    @pytest.mark.filterwarnings("ignore:c10d")
    def test_stages_are_one_and_tied_weights_count_once(self):
        engine = start(pipeline(2), pipeline_config(layerwise={
            "norm_groups": {"tied": {"name": "tied_modules.*"}, "last": {"name": "2.*"}},
            "monitor": {"momentum_norm": True}, "log_num_zeros_in_grad": True}))
        train_pipeline(engine, 1)
        run, told = pipeline_oracle(True, 2, 1), engine.optimizer.report()
        grads, = [step.grads for step in run.steps]
        assert told["grad_norm"] == pytest.approx(norm_of(grads), rel=1e-4)
        for key, start_of in (("tied", "tied_modules."), ("last", "2.")):
            assert told[f"grad_norm_{key}"] == pytest.approx(
                norm_of(grads, lambda name, start_of=start_of: name.startswith(start_of)), rel=1e-4)
        momenta = {name: state["momentum_buffer"] for name, state in run.state.items() if "momentum_buffer" in state}
        assert told["momentum_norm_muon"] == pytest.approx(norm_of(momenta), rel=1e-4)
        # Most are in a table of which few rows are read.
        assert told["num_zeros_in_grad"] == pytest.approx(sum(int((g == 0).sum()) for g in grads.values()), abs=8)


class TestExperts(DistributedTest):
    def test_experts_count_wherever_they_are(self):
        groups = {"experts": {"name": "*deepspeed_experts*"}}
        engine = start(ExpertNet(2), ds_config(layerwise={"norm_groups": groups, "log_num_zeros_in_grad": True}))
        torch.manual_seed(dist.get_rank())
        engine.backward(engine(torch.randn(8, 6)))
        mine, zeros, shared = 0.0, 0, 0.0
        for name, p in engine.module.named_parameters():
            grad = p.get_full_hp_grad()
            square, count = float(grad.double().square().sum()), int((grad == 0).sum())
            if "deepspeed_experts" in name:
                mine, zeros = mine + square, zeros + count
            else:
                shared, zeros = shared + square, zeros + count * (dist.get_rank() == 0)
        sums = torch.tensor([mine, zeros], dtype=torch.float64)
        dist.all_reduce(sums)
        engine.step()
        told = engine.optimizer.report()
        assert told["grad_norm_experts"] == pytest.approx(math.sqrt(sums[0]), rel=1e-6)
        assert told["grad_norm"] == pytest.approx(math.sqrt(sums[0] + shared), rel=1e-6)
        assert told["num_zeros_in_grad"] == sums[1]

    def test_some_of_a_name_are_none(self):
        groups = {"first": {"name": "layers.0.*deepspeed_experts.0.*"}}
        with pytest.raises(RoutingError, match=r"experts.0\.0\..* is in layerwise.norm_groups.first, or .*, and not "
                                               "both"):
            start(ExpertNet(2), ds_config(layerwise={"norm_groups": groups}))
