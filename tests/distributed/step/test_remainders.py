"""``layerwise.master_dtype`` "bfloat16+remainder": the bits of a run with float32 masters, in fewer bytes."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from tests.support.checkpoints import ONE_FILE, assert_equal_states, assert_same_run, go_on_from, masters, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.internals import memory_by_kind
from tests.support.rooms import rooms
from tests.support.training import PARTS, Net, assert_same_on_all_ranks, ds_config, start, train_engine, train_engines
from tests.support.transports import numels_of
from tests.support.universal import convert

pytestmark = rooms("masters", "dtypes", "owned", "rate_checks", "checkpointing", "state_access", "forecast")

KEPT = {"master_dtype": "bfloat16+remainder"}


def config(kept=True, *, stage=1, layerwise=None, **changes):
    made = {"bf16": {"enabled": True}, "clip": 5.0, **changes}
    return ds_config(stage=stage, layerwise={
        "overrides": PARTS, **(KEPT if kept else {}), **(layerwise or {})}, **made)


def started(kept=True, module=None, **changes):
    return start(Net(odd=True) if module is None else module, config(kept, **changes))


def assert_same_runs(engine, plain, where=""):
    """The same masters, states and weights, bit for bit; weights on all ranks."""
    for each in (engine, plain):
        each.optimizer.wait_for_params()
    assert_same_run(engine, plain, where)
    assert_same_on_all_ranks(engine.module)


class TestSameBits(DistributedTest):
    world_size = [1, 2, 3]

    def test_over_twenty_steps(self, stage):
        engine, plain = (started(kept, stage=stage, gas=stage, layerwise={"overlap_param_gather": stage == 1 and kept})
                         for kept in (True, False))
        for step in range(0, 20, 5):
            train_engines((engine, plain), 5, first=step, gas=stage)
            assert_same_runs(engine, plain, step)
        # Something is in the remainders: masters are no rounded numbers.
        found = torch.cat([value for (_, key), value in whole_states(engine).items() if key == "fp32"])
        assert (found != found.bfloat16().float()).float().mean() > 0.9

    def test_bytes_as_planned(self):
        engine, plain = started(), started(False)
        for each in (engine, plain):
            found, planned = memory_by_kind(each), each.optimizer.forecast().memory[dist.get_rank()]
            assert (found[Kind.hp_params], found[Kind.optim_states]) == (planned.masters, planned.states)
        now, before = (each.optimizer.forecast() for each in (engine, plain))
        for rank, (few, many) in enumerate(zip(now.memory, before.memory, strict=True)):
            # 2 bytes in place of 4, and 8 for each block of 64.
            assert (few.params, few.grads, few.states) == (many.params, many.grads, many.states)
            assert few.masters * 32 == many.masters * 17 > 0
            owned = sum(stop - start for bucket in engine.optimizer.layout.buckets
                        for start, stop in [bucket.shard(rank)])
            assert many.masters - few.masters == owned * 15 // 8
        # Masters of a bucket are put together for its update.
        shards = [max(numels_of(bucket)) for bucket in engine.optimizer.layout.buckets]
        assert now.working.update == before.working.update + 4 * max(shards)


class TestWritten(DistributedTest):
    """Weights that somebody else writes: their masters follow, by blocks of 64 where others do so one by one."""

    def both(self, steps=3):
        engine, plain = started(), started(False)
        train_engines((engine, plain), steps)
        return engine, plain

    def test_all_of_them(self, capsys):
        engine, plain = self.both()
        # None is what it was: such a master alone would keep what is lost in a block that has been written.
        other = {name: p.clone() + 7 for name, p in Net(odd=True).bfloat16().state_dict().items()}
        for each in (engine, plain):
            each.module.load_state_dict(other)
            train_engine(each, 3, first=3)
        assert_same_runs(engine, plain)
        told = "weights were written between two steps; their float32 masters were set to them"
        assert capsys.readouterr().out.count(told) == (2 if dist.get_rank() == 0 else 0)

    def test_there_and_back_again(self, capsys):
        engine, plain = self.both()
        for each in (engine, plain):
            own = {name: value.clone() for name, value in each.module.state_dict().items()}
            with torch.no_grad():
                for p in each.module.parameters():
                    p.mul_(3)
            each.module.load_state_dict(own)
            train_engine(each, 3, first=3)
        assert_same_runs(engine, plain)
        assert "weights were written" not in capsys.readouterr().out

    @pytest.mark.parametrize("through", ["data", "parameter"])
    def test_some_of_them(self, through):
        engine, _ = self.both()
        before = masters(engine)
        with torch.no_grad():
            p = engine.module.tall.weight
            (p.data if through == "data" else p).view(-1)[70] = 0.0
            engine.module.embed.weight.data[5] = -1.0
        after = masters(engine)
        for name, block in (("tall.weight", {1}), ("embed.weight", {0, 1})):
            value = engine.module.get_parameter(name).detach().float().flatten()
            for index in range(-(-value.numel() // 64)):
                some = slice(64 * index, 64 * index + 64)
                expected = value[some] if index in block else before[name].flatten()[some]
                assert torch.equal(after[name].flatten()[some], expected), (name, index)
        assert torch.equal(after["square.weight"], before["square.weight"])

    def test_from_the_weights_alone(self):
        engine, plain = self.both()
        for each in (engine, plain):
            each.optimizer.refresh_fp32_params()
        for name, value in masters(engine).items():
            assert torch.equal(value, engine.module.get_parameter(name).detach().float()), name
        for each in (engine, plain):
            train_engine(each, 2, first=3)
            each.optimizer.update_lp_params()
        assert_same_runs(engine, plain)

    def test_masters_are_read_and_set(self):
        engine, plain = self.both()
        g = torch.Generator().manual_seed(5)
        for name, p in engine.module.named_parameters():
            if not p.numel():
                continue
            twin = plain.module.get_parameter(name)
            assert torch.equal(safe_get_full_fp32_param(p), safe_get_full_fp32_param(twin)), name
            value = torch.randn(p.shape, generator=g)
            for each in (p, twin):
                safe_set_full_fp32_param(each, value)
            assert torch.equal(safe_get_full_fp32_param(p), value) and torch.equal(p, twin), name
        train_engines((engine, plain), 2, first=3)
        assert_same_runs(engine, plain)


class TestCheckpoints(DistributedTest):
    """Checkpoints have float32 masters: a run with remainders and one without go on from each other."""

    @pytest.mark.parametrize("saving, loading, stage", [
        (True, True, 1), (True, False, 2), (False, True, 1),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in [(True, True, 2), (True, False, 1)])])
    def test_every_kind_of_checkpoint(self, saving, loading, stage, tmp_path):
        saved = started(saving, stage=stage, layerwise={"save_universal": True})
        train_engine(saved, 3)
        saved.save_checkpoint(tmp_path, tag="here")
        saved.optimizer.save_state_dict_to_file(tmp_path / ONE_FILE)
        states = whole_states(saved)
        if stage == 1:
            convert(tmp_path / "here", tmp_path / "converted")
        train_engine(saved, 3, first=3)
        for tag in ["here", "here_universal", None] + ["converted"] * (stage == 1):
            engine = started(loading, stage=stage)
            # The next step must not work on what was there before.
            train_engine(engine, 1, first=8)
            go_on_from(engine, tmp_path, tag)
            assert_equal_states(whole_states(engine), states, tag)
            train_engine(engine, 3, first=3)
            assert_same_runs(engine, saved, tag)

    def test_weights_that_were_written_before_the_save(self, tmp_path):
        engines = [started(kept) for kept in (True, False)]
        for index, each in enumerate(engines):
            train_engine(each, 2)
            with torch.no_grad():
                for p in each.module.parameters():
                    p.mul_(1.5)
            each.save_checkpoint(tmp_path, tag=str(index))
            other = started(not index)
            other.load_checkpoint(tmp_path, tag=str(index))
            train_engine(other, 2, first=2)
            train_engine(each, 2, first=2)
            assert_same_runs(other, each)
        assert_same_runs(*engines)

    def test_weights_that_are_changed_on_the_way_in(self, tmp_path):
        saved = started()
        train_engine(saved, 2)
        saved.save_checkpoint(tmp_path, tag="here")
        engines = [started(kept) for kept in (True, False)]
        for each in engines:
            each.load_checkpoint(tmp_path, tag="here", custom_load_fn=lambda src, dst: dst.load_state_dict(
                {name: value + 7 for name, value in src.items()}))
            train_engine(each, 2, first=2)
        assert_same_runs(*engines)

    def test_the_weights_alone(self, tmp_path):
        saved = started()
        train_engine(saved, 3)
        saved.save_checkpoint(tmp_path, tag="here")
        engine = started()
        train_engine(engine, 1)
        engine.load_checkpoint(tmp_path, tag="here", load_module_only=True)
        for name, value in masters(engine).items():
            assert torch.equal(value, saved.module.get_parameter(name).detach().float()), name


class TestAnotherSize(DistributedTest):
    """Saved by three ranks, and gone on with by others, in another layout."""

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [3], self.save)

    def save(self, folder):
        engine = started()
        train_engine(engine, 3)
        engine.save_checkpoint(folder, tag="here")
        states = whole_states(engine)
        if dist.get_rank() == 0:
            torch.save(states, folder / "states.pt")

    @pytest.mark.world_size([1, 2])
    def test_resumed(self, saved):
        engine, plain = (started(kept, bucket_numel=300, layerwise={"alignment": 128, "layout": "lpt"})
                         for kept in (True, False))
        for each in (engine, plain):
            train_engine(each, 1, first=8)
            each.load_checkpoint(saved, tag="here")
            assert_equal_states(whole_states(each), torch.load(saved / "states.pt"))
            train_engine(each, 3, first=3)
        assert_same_runs(engine, plain)
