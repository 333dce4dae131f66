"""DeepSpeed's own timers, loggers, monitors, schedulers and meshes, around this optimizer: by value."""

import copy
import csv
import logging
import math
import pickle

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.comm.comm import comms_logger
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger
from torch import nn
from torch.distributed import get_process_group_ranks

import ds_layerwise
from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.dtypes import DTYPE_BYTES
from ds_layerwise.plan.layout.transfer_plan import deal, seen_by
from tests.support.expected import assert_trained_as, by_the_oracle
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    Net,
    allow_fp16,
    ds_config,
    relative_error,
    start,
    train_engine,
    weights,
    whole_gradients,
)

pytestmark = rooms("engine_hooks", "fields", "run_settings", "shared_storage")

STEPS = 6
TIMERS = {"optimizer_gradients", "optimizer_step", "optimizer_allgather"}


class TestTimers(DistributedTest):
    def test_phases_are_logged_once_a_step_under_their_names_in_stock(self, stage):
        engine = start(Net(), ds_config(gas=2, stage=stage, wall_clock_breakdown=True))
        logged, log = [], engine.timers.log

        def recording(names, **options):
            logged.append({name: engine.timers(name).elapsed(reset=False) for name in names})
            log(names, **options)

        engine.timers.log = recording
        for step in range(3):
            train_engine(engine, 1, gas=2, first=step)
            ours = [times for times in logged if TIMERS & set(times)]
            assert len(ours) == step + 1 and set(ours[-1]) == TIMERS
            assert all(time > 0 for time in ours[-1].values())
            # A timer that was never reset would hold the steps before, too.
            assert sum(ours[-1].values()) <= next(t["step"] for t in reversed(logged) if "step" in t)
        assert {"fwd", "bwd", "bwd_allreduce", "step"} <= set(engine.get_wall_clock_timers())


class TestCommsLogger(DistributedTest):
    world_size = [2, 3]
    thorough_on = (3,)

    @pytest.mark.parametrize("sections", [{}, BF16, {**BF16, "communication_data_type": "fp32"}])
    def test_it_sees_every_collective_of_a_step(self, sections):
        for stage in (1, 2):
            engine = start(Net(), ds_config(gas=2, stage=stage, comms_logger={"enabled": True}, **sections))
            comms_logger.comms_dict.clear()
            train_engine(engine, 2, gas=2)
            seen = {op: {size: record[0] for size, record in sizes.items()}
                    for op, sizes in comms_logger.comms_dict.items()}
            optimizer = engine.optimizer
            forecast, layout, rank = optimizer.forecast(), optimizer.layout, optimizer.rank
            passes = 2 if stage == 1 else 4
            # In float64: the norm, whether all is finite, and five things that one rank alone may know.
            expected = {"all_reduce": {56: 2}}
            wire, = set(forecast.wires)
            # What stays here is in the size of an all-to-all of more than two ranks, too.
            kept = [0 if layout.world_size == 2 else bucket.cut_numel for bucket in layout.buckets]
            for bucket, stays in zip(layout.buckets, kept, strict=True):
                leaves = bucket.numel - bucket.cut_numel + stays
                add(expected, "all_to_all_single", leaves * DTYPE_BYTES[wire], passes)
            reduced = sum(size * count for size, count in expected["all_to_all_single"].items()) // passes
            sums = 4 * sum(sum(each.by_owner) for each in seen_by(rank, deal(layout.buckets)))
            sent, = forecast.sent.values()
            assert sent.gradients[rank] == reduced - DTYPE_BYTES[wire] * sum(kept) + sums
            for each in seen_by(rank, deal(layout.buckets)):
                add(expected, "all_to_all_single", 4 * sum(each.by_owner), 2)
            for each in seen_by(rank, deal(reversed(layout.buckets))):
                add(expected, "all_to_all_single", DTYPE_BYTES[each.deal.dtype] * sum(each.by_holder), 2)
            for bucket in layout.buckets:
                add(expected, "broadcast", DTYPE_BYTES[bucket.dtype] * bucket.cut_numel, 2 * layout.world_size)
            assert seen == expected
            engine.destroy()

    @pytest.mark.world_size(2)
    def test_saving_goes_on_beside_it(self, class_tmpdir):
        engine = train_engine(start(Net(), ds_config(comms_logger={"enabled": True})), 1)
        engine.save_checkpoint(class_tmpdir, tag="logged")
        engine.load_checkpoint(class_tmpdir, tag="logged")
        train_engine(engine, 1, first=1)
        assert_trained_as(engine.module, by_the_oracle(num_steps=2))


def add(counts, op, size, times):
    sizes = counts.setdefault(op, {})
    sizes[size] = sizes.get(size, 0) + times


class TestMonitor(DistributedTest):
    def test_learning_rates_and_loss_scales(self, class_tmpdir):
        allow_fp16()
        scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.003,
                                                    "warmup_num_steps": 4, "warmup_type": "linear"}}
        engine = start(Net(), ds_config(
            scheduler=scheduler, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
            csv_monitor={"enabled": True, "output_path": str(class_tmpdir), "job_name": "run"}))
        for step in range(5):
            loss = engine((step, 0, dist.get_rank()))
            engine.backward(loss * math.inf if step == 1 else loss)
            engine.step()
        dist.barrier()
        # The skipped step moves the scale but not the schedule; a step takes one sample on each rank.
        assert self.read(class_tmpdir, "lr") == [
            (2, 0.0), (4, 0.0), *((2 * step, pytest.approx(0.003 * (step - 2) / 4)) for step in (3, 4, 5))]
        assert self.read(class_tmpdir, "loss_scale") == [(2, 16.0), (4, 8.0), (6, 8.0), (8, 8.0), (10, 8.0)]

    def read(self, folder, what):
        rows = list(csv.reader((folder / "run" / f"Train_Samples_{what}.csv").open()))
        return [(int(samples), float(value)) for samples, value in rows[1:]]


class TestObservers(DistributedTest):
    def test_together_they_change_no_bit(self, tmp_path):
        observers = {"memory_breakdown": True, "wall_clock_breakdown": True, "comms_logger": {"enabled": True},
                     "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
                     "flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(tmp_path / "flops")}}
        results = []
        for sections in ({}, observers):
            engine = train_engine(start(Net(), ds_config(clip=5.0, stage=2, **sections)), 2)
            results.append(weights(engine.module).clone())
            engine.destroy()
        dist.barrier()
        assert "Profile Summary at step 2" in (tmp_path / "flops").read_text()
        assert torch.equal(*results)


SCHEDULERS = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.003, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0},
    "OneCycle": {"cycle_min_lr": 0.0005, "cycle_max_lr": 0.003, "cycle_first_step_size": 3, "decay_step_size": 2,
                 "decay_lr_rate": 0.5, "cycle_momentum": False},
    "WarmupLR": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.003, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_min_lr": 0.001, "warmup_max_lr": 0.003, "warmup_num_steps": 3},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_type": "linear", "cos_min_ratio": 0.1},
}


def followed(kind, params, key, num_steps=STEPS):
    """Return what a scheduler of DeepSpeed says on a plain torch optimizer, before each step."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.003, betas=(0.9, 0.95))
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    said = []
    for _ in range(num_steps):
        said.append(copy.deepcopy(optimizer.param_groups[0][key]))
        optimizer.step()
        scheduler.step()
    return said


class TestSchedulers(DistributedTest):
    @pytest.mark.parametrize("kind", SCHEDULERS)
    def test_both_optimizers_follow_every_kind(self, kind):
        lrs = followed(kind, SCHEDULERS[kind], "lr")
        engine = start(Net(), ds_config(scheduler={"type": kind, "params": SCHEDULERS[kind]}))
        assert type(engine.lr_scheduler).__name__ == kind and len(set(lrs)) > 3
        for step, lr in enumerate(lrs):
            assert engine.get_lr() == [group["lr"] for group in engine.optimizer.param_groups] == [pytest.approx(lr)]
            train_engine(engine, 1, first=step)
        assert_trained_as(engine.module, by_the_oracle(num_steps=STEPS, schedule=lambda step: lrs[step] / 0.003))

    def test_a_start_does_not_warn_of_a_schedule_before_it_has_started(self):
        """Other warnings come, and that one where a script asks; stock gives it at each start."""
        warned, handler = [], logging.Handler()
        handler.emit = lambda record: warned.append(record.getMessage())
        logger.addHandler(handler)
        engine = start(Net(), ds_config(scheduler={"type": "WarmupDecayLR", "params": {
            "total_num_steps": 2, "warmup_num_steps": 4, "warmup_max_lr": 0.003}}))
        assert [one for one in warned if "schedul" in one or "total" in one] == [
            "total_num_steps 2 is less than warmup_num_steps 4"]
        lr_schedules.WarmupLR(engine.optimizer)
        assert "scheduler before it has started" in warned[-1]

    def test_a_cycle_of_betas_reaches_adam(self):
        params = {**SCHEDULERS["OneCycle"], "cycle_momentum": True, "cycle_min_mom": 0.6, "cycle_max_mom": 0.9}
        lrs, betas = followed("OneCycle", params, "lr"), followed("OneCycle", params, "betas")
        engine = start(Net(), ds_config(scheduler={"type": "OneCycle", "params": params}))
        assert len({first for first, _ in betas}) > 3
        alone = nn.Parameter(Net().embed.weight.detach().clone())
        adam = torch.optim.AdamW([alone], weight_decay=0.1, eps=1e-10)
        for step in range(STEPS):
            assert engine.get_mom() == [pytest.approx(betas[step])]
            adam.param_groups[0].update(lr=lrs[step], betas=betas[step])
            gradients = {}
            train_engine(engine, 1, first=step, check=lambda *_: gradients.update(whole_gradients(engine)))
            alone.grad = gradients["embed.weight"].view_as(alone)
            adam.step()
        assert relative_error(engine.module.embed.weight.detach(), alone.detach()) < 1e-5

    def test_learning_rates_set_by_hand(self):
        engine = start(Net(), ds_config())
        assert engine.get_lr() == [0.003] and engine.optimizer.get_lr() == 0.003
        assert engine.get_mom() == [(0.9, 0.95)]
        train_engine(engine, 3)
        engine.optimizer.set_lr(0.001)
        assert engine.get_lr() == [0.001]
        train_engine(engine, 3, first=3)
        assert_trained_as(engine.module, by_the_oracle(num_steps=STEPS, schedule=lambda step: 1 if step < 3 else 1 / 3))


class TestInterface(DistributedTest):
    def test_closures_copies_and_pickles_are_refused_in_words(self):
        engine = train_engine(start(Net(), ds_config()), 1)
        engine.backward(engine((1, 0, dist.get_rank())))
        with pytest.raises(StepError, match=r"^step\(\) takes no closure, got .*; call engine.backward"):
            engine.optimizer.step(lambda: 0)
        engine.optimizer.step(closure=None)
        assert engine.optimizer.step_count == 2
        for optimizer in (engine.optimizer, engine.optimizer.optimizer):
            for copies in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(StepError, match="cannot be copied or pickled, because each rank"):
                    copies(optimizer)


class TestBatchSizes(DistributedTest):
    def test_accumulation_that_changes_in_the_middle(self, stage):
        engine = start(Net(), ds_config(gas=1, stage=stage))
        # DeepSpeed counts micro-batches from the start of the run, so a change comes at a multiple of the new number.
        for gas, first, num_steps in ((1, 0, 4), (4, 4, 1), (2, 5, 2)):
            engine.set_train_batch_size(gas * dist.get_world_size())
            assert engine.gradient_accumulation_steps() == gas
            expected = by_the_oracle(Net, first + num_steps, gas=gas)

            def check(step, _):
                for name, gradient in whole_gradients(engine).items():
                    assert torch.equal(gradient, expected.steps[step].grads[name].flatten()), name

            train_engine(engine, num_steps, gas=gas, first=first, check=check)
        assert engine.global_steps == 7 and engine.global_samples == 2 * (4 + 4 + 4)


class Reads(nn.Module):
    """A model whose loss depends on which samples it gets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).square().mean()


class TestCurriculum(DistributedTest):
    @pytest.mark.filterwarnings("ignore:'pin_memory' argument")
    def test_batches_of_a_curriculum_train_as_the_same_batches_do(self, class_tmpdir):
        metrics = {"length": {"difficulty_type": "value", "clustering_type": "single_cluster", "min_difficulty": 2,
                              "max_difficulty": 8, "schedule_type": "fixed_linear",
                              "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2}}}
        efficiency = {"enabled": True, "seed": 5, "data_sampling": {
            "enabled": True, "num_epochs": 4, "num_workers": 0, "curriculum_learning": {
                "enabled": True, "data_cluster_path": str(class_tmpdir), "curriculum_metrics": metrics}}}
        data = [torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(32)]
        engine, _, loader, _ = ds_layerwise.initialize(
            model=(module := Reads()), model_parameters=module.parameters(), training_data=data,
            config=ds_config(data_efficiency=efficiency))
        difficulties = []

        def shortened(batch, sampler):
            difficulties.append(sampler["current_difficulties"]["length"])
            return batch[:, :difficulties[-1]]

        engine.set_data_post_process_func(shortened)
        batches = []
        for batch, _ in zip(loader, range(STEPS), strict=False):
            batches.append(nn.functional.pad(batch, (0, 8 - batch.shape[1])))
            engine.backward(engine(batches[-1]))
            engine.step()
        # A step of the schedule is a global batch: from 2 to 8 over 4 of them, in steps of 2.
        assert difficulties[:STEPS] == [2, 4, 6, 8, 8, 8]
        plain = start(Reads(), ds_config())
        for batch in batches:
            plain.backward(plain(batch))
            plain.step()
        assert torch.equal(weights(plain.module), weights(engine.module))

    @pytest.mark.world_size(1)
    def test_a_key_that_deepspeed_has_dropped_stops_the_engine(self):
        for key in ("curriculum_learning", "elasticity", "progressive_layer_drop", "eigenvalue", "compression_training",
                    "quantize_training"):
            if key not in getattr(deepspeed_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {key: ""}):
                pytest.fail(f"DeepSpeed {deepspeed.__version__} has {key} again: see docs/config_keys.md")
            if hasattr(deepspeed_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS"):
                with pytest.raises(deepspeed_config.DeepSpeedConfigError, match="removed"):
                    start(Net(), ds_config(**{key: {"enabled": True}}))


class TestMesh(DistributedTest):
    def test_a_mesh_of_data_parallel_ranks(self, stage):
        engine = start(Net(), ds_config(clip=5.0, stage=stage), mesh_param=(2, 1))
        data_axis = engine.mesh_device.get_group(mesh_dim="data_parallel")
        for group in (engine.optimizer.dp_process_group, data_axis):
            assert get_process_group_ranks(group) == [0, 1]
        expected = by_the_oracle(Net, STEPS, clip=5.0)

        def check(step, _):
            for name, gradient in whole_gradients(engine).items():
                assert torch.equal(gradient, expected.steps[step].grads[name].flatten()), name

        train_engine(engine, STEPS, check=check)
        assert_trained_as(engine.module, expected)
