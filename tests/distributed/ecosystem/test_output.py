"""An engine starts whatever its stdout is."""

import io
import sys
from contextlib import contextmanager

import pytest

from ds_layerwise.checkpoint import manifest, reshard
from ds_layerwise.output import LONG_LOAD
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, states
from tests.support.harness import DistributedTest
from tests.support.models import tiny_gpt
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, from_all_ranks, start, train_engine

pytestmark = rooms("output", "report")


def stream(encoding):
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


class TestStartUpTable(DistributedTest):
    @pytest.mark.world_size(1)
    def test_every_stdout_will_do(self, monkeypatch):
        closed = stream("utf-8")
        closed.close()
        for stdout in (stream("ascii"), stream("latin-1"), None, closed):
            stderr = stream("ascii")
            with monkeypatch.context() as m:
                m.setattr(sys, "stdout", stdout)
                m.setattr(sys, "stderr", stderr)
                start(tiny_gpt(), ds_config()).destroy()
            to = stderr if stdout in (None, closed) else stdout
            text = to.buffer.getvalue().decode(to.encoding)
            assert "matrix updates" in text and "muon (whole)" in text and text.isascii()


class TestWhatIsSaidLater(DistributedTest):
    def test_no_stdout_ends_a_load_or_a_step(self, tmp_path, monkeypatch):
        """A failure in what rank 0 alone says raises on no rank, as the others would wait for rank 0."""
        config = ds_config(bf16={"enabled": True})
        engine, resumed = start(Net(), config), start(Net(), config)
        engine.backward(engine((0, 0, engine.global_rank)))
        engine.save_checkpoint(tmp_path / "снимок")
        engine.step()
        for stdout in (stream("ascii"), None, open("/dev/full", "w", buffering=1)):
            stderr = stream("ascii")
            with monkeypatch.context() as m:
                m.setattr(sys, "stdout", stdout)
                m.setattr(sys, "stderr", stderr)
                resumed.load_checkpoint(tmp_path / "снимок")
                train_engine(resumed, 1)
                internals.before_update(resumed)._has_announced = False
                resumed.module.square.weight.data.fill_(0.5)
                train_engine(resumed, 2, first=1)
            if engine.global_rank == 0:
                text = (stdout if isinstance(stdout, io.TextIOWrapper) and stdout.encoding == "ascii"
                        else stderr).buffer.getvalue().decode()
                assert "/??????/global_step0 was saved within a step" in text
                assert "their float32 masters were set to them" in text
        engine.module.square.weight.data.fill_(0.5)
        train_engine(engine, 2, first=1)
        assert_equal_states(states(resumed), states(engine))


class TestLoadsThatTakeLong(DistributedTest):
    @pytest.mark.parametrize("own_disks", [False, True])
    def test_rank_0_alone_shows_how_far_it_is(self, own_disks, tmp_path, monkeypatch):
        engine = start(Net(), ds_config(checkpoint={"use_node_local_storage": own_disks}))
        train_engine(engine, 1).save_checkpoint(tmp_path, tag="saved")
        bars = {}

        @contextmanager
        def recorded(what, num_bytes, *, quiet, delay):
            assert quiet is (engine.global_rank != 0) and delay == LONG_LOAD
            bars[what] = (num_bytes, steps := [])
            yield steps.append

        monkeypatch.setattr(manifest, "progress", recorded)
        monkeypatch.setattr(reshard, "progress", recorded)
        engine.load_checkpoint(tmp_path, tag="saved")
        saved = sum(path.stat().st_size for path in (tmp_path / "saved").iterdir() if path.suffix == ".pt")
        mine = [value.nbytes for record in internals.records(engine)
                for value in (record.master, *record.state.values())]
        assert bars["load"] == (sum(mine), mine)
        total, checked = bars["check"]
        assert total == (saved if own_disks else saved // 2)
        assert sum(map(sum, from_all_ranks(checked))) == (2 * saved if own_disks else saved)
