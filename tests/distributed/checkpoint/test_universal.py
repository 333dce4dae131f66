"""Universal checkpoints: from any world size and layout to any other, and everything that is in them besides states."""

from pathlib import Path, PurePosixPath

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from tests.support.checkpoints import assert_equal_states, assert_same_run, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    PRECISIONS,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    start,
    train_engine,
    train_engines,
)
from tests.support.universal import convert, start_with_loss, train_with_loss
from tests.support.versions import needs

pytestmark = rooms("universal", "exports", "reshard")


class Matrix(DistributedTest):
    """Another number of ranks resumes what one saves: from the regular checkpoint, from what DeepSpeed's own
    converter makes of it, and from the universal one that was written beside it."""

    world_size = [1, 2, 3, 4]
    sections = {}
    tolerance = 1e-6
    #: Which of them the pointer file names; the others are loaded by their tags.
    pointed_to = "converted"

    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints in folders that are called as the number of ranks that saved them."""
        return made_once(class_tmpdir / "runs", type(self).world_size, self.save)

    def save(self, folder):
        engine = start_with_loss(layerwise={"save_universal": True}, **self.sections)
        train_with_loss(engine, 0, 5)
        folder = folder / str(dist.get_world_size())
        engine.save_checkpoint(folder, tag="saved")
        convert(folder / "saved", folder / "converted")
        states = whole_states(engine)
        losses = train_with_loss(engine, 5, 10)
        if dist.get_rank() == 0:
            torch.save((states, losses), folder / "expected.pt")

    def test_resume(self, runs):
        engine = start_with_loss(**self.sections)
        train_with_loss(engine, 20, 21)
        for saved_by in type(self).world_size:
            folder = runs / str(saved_by)
            states, losses = torch.load(folder / "expected.pt")
            for tag in ("saved", "converted", "saved_universal"):
                where = (saved_by, tag)
                path, _ = engine.load_checkpoint(folder, tag=None if tag == self.pointed_to else tag)
                assert Path(path).parent == folder / tag, where
                assert (engine.optimizer.step_count, engine.global_steps) == (5, 5), where
                assert engine.optimizer.fresh_states == {}, where
                assert_equal_states(whole_states(engine), states, where)
                resumed = train_with_loss(engine, 5, 10)
                assert (resumed - losses).abs().max() <= self.tolerance, (*where, resumed, losses)
        engine.destroy()


class TestMatrixFp32(Matrix):
    sections = {"checkpoint": {"load_universal": True}}


@pytest.mark.thorough
class TestMatrixBf16(Matrix):
    world_size = [2, 3]
    sections = BF16
    tolerance = 1e-2
    pointed_to = "saved"


class Statistics(nn.Module):
    """Buffers such as BatchNorm has, and one that belongs to no checkpoint."""

    def __init__(self):
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(3))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Everything(Net):
    """Tied and frozen parameters, empty ones, and buffers."""

    def __init__(self):
        super().__init__(tied=True, frozen=True, odd=True)
        self.statistics = Statistics()

    def fill_buffers(self, big):
        """Give them values; ``big`` is in the int64 one that float32 may not hold."""
        buffers = dict(self.statistics.named_buffers())
        buffers["running_mean"].copy_(torch.tensor([0.1, -2.0, 3e7]))
        buffers["num_batches_tracked"].fill_(17)
        buffers["seen"].copy_(torch.tensor([big, -1]))
        buffers["mask"].copy_(torch.tensor([True, False, False, True]))
        buffers["scratch"].fill_(8)

    @torch.no_grad()
    def spoil(self):
        """Make sure that whatever comes back comes from a checkpoint."""
        for value in [*self.parameters(), *self.buffers()]:
            value.fill_(1)


SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 10, "warmup_type": "linear"}}


def everything(**changes):
    """An engine that trains :class:`Everything`, and writes universal checkpoints."""
    return start(Everything(), ds_config(scheduler=SCHEDULER, layerwise={"save_universal": True}, **changes))


class TestWhatComesBack(DistributedTest):
    world_size = [1, 3]

    @pytest.mark.parametrize("form", [
        "converted", "direct",
        pytest.param("converted, with a client state that may run code", marks=needs(
            "deepspeed>=0.19.8", "its ds_to_universal.py leaves out empty parameters; a load says so"))])
    def test_all_that_is_no_optimizer_state(self, precision, form, tmp_path):
        engine = everything(**PRECISIONS[precision])
        train_engine(engine, 3)
        # Without the model's file there is what DeepSpeed's converter writes, which has been through float32.
        runs_code = form.endswith("code")
        engine.module.fill_buffers(big=2**24 - 1 if runs_code else 2**53 + 1)
        engine.save_checkpoint(tmp_path, tag="saved", client_state={
            "note": [1, "two"], "path": PurePosixPath("a") if runs_code else "a"})
        convert(tmp_path / "saved", tmp_path / "converted")
        folder = "saved_universal" if form == "direct" else "converted"

        other = everything(**PRECISIONS[precision])
        other.module.spoil()
        _, client_state = other.load_checkpoint(tmp_path, tag=folder)
        assert client_state["note"] == [1, "two"]
        assert (other.global_steps, other.optimizer.step_count, other.global_samples) == (3, 3, engine.global_samples)
        assert other.get_lr() == engine.get_lr() and other.lr_scheduler.last_batch_iteration == 2
        assert other.optimizer.fresh_states == {}
        assert_equal_states(whole_states(other), whole_states(engine))
        expected = engine.module.state_dict()
        assert "tall.weight" in expected and "empty" in expected and "statistics.mask" in expected
        for name, value in other.module.state_dict().items():
            assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name
        assert torch.equal(other.module.statistics.scratch, torch.ones(3, dtype=other.module.statistics.scratch.dtype))
        assert_same_on_all_ranks(other.module)
        train_engines((engine, other), 2, first=3)
        assert_same_run(other, engine)
        assert other.get_lr() == engine.get_lr()

    def test_the_folder_holds_each_parameter_once_in_whole_files(self, tmp_path):
        engine = everything()
        train_engine(engine, 1)
        engine.save_checkpoint(tmp_path, tag="saved")
        assert (tmp_path / "latest_universal").read_text() == "saved_universal"
        assert (tmp_path / "latest").read_text() == "saved"
        zero = tmp_path / "saved_universal" / "zero"
        found = {}
        for path in zero.rglob("*.pt"):
            found.setdefault(path.parent.relative_to(zero).as_posix(), set()).add(path.stem)
        trained = {name for name, p in engine.module.named_parameters() if p.requires_grad and p.numel()}
        assert found.pop(".") == {"optimizer_state"}
        assert {name for name, files in found.items() if files == {"fp32", "exp_avg", "exp_avg_sq", "step"}} == trained
        assert found.keys() == engine.module.state_dict().keys() - {"head.weight"}
        for name in trained:
            shape = engine.module.get_parameter(name).shape
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                assert torch.load(zero / name / f"{key}.pt")["param"].shape == shape, (name, key)
