"""Disks of a save: one for all ranks, one for every node, files that come late or never."""

import base64
import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import deepspeed.comm as dist
import pytest

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest
from ds_layerwise.checkpoint.regular import RegularCheckpoint
from ds_layerwise.engine.checkpoints import saving
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero.checkpoint import disks
from tests.support.checkpoints import assert_equal_states, loaded, on_rank_0, states
from tests.support.harness import DistributedTest, free_port
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("disks", "atomic", "saving")

OWN_DISKS = {"checkpoint": {"use_node_local_storage": True}}
ZERO_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def names_in(folder):
    """Without DeepSpeed's scripts."""
    return {path.name for path in folder.iterdir() if path.suffix != ".py"}


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(disks, "PATIENCE", 0.3)


class TestOneDisk(DistributedTest):
    def saved(self, folder):
        """An engine that is a step ahead of what it has saved, and the states that it had then."""
        engine = train_engine(start(Net(), ds_config()), 1)
        engine.save_checkpoint(folder, tag="tag")
        first = states(engine)
        return train_engine(engine, 1, first=1), first

    def assert_the_first_is_there(self, folder, first):
        dist.barrier()
        assert names_in(folder) == {"tag", "latest"}
        other = loaded(start(Net(), ds_config()), folder)
        assert other.global_steps == 1
        assert_equal_states(states(other), first)

    def test_a_save_that_fails_leaves_the_one_before(self, tmp_path, impatient, monkeypatch):
        engine, first = self.saved(tmp_path)
        check, listed, rank = disks.check_arrived, saving._listed, dist.get_rank()

        def spoiled(how):
            def then_check(folder, *args):
                path = atomic.incomplete_folder(folder) / ZERO_1
                content = path.read_bytes()
                {"gone": path.unlink, "cut": lambda: path.write_bytes(content[:1000]),
                 "older": lambda: path.write_bytes(content[:-100] + bytes(100))}[how]()
                check(folder, *args)

            return lambda now: now.setattr(disks, "check_arrived", then_check)

        def gone_early(now):
            if rank == 1:
                now.setattr(saving, "_listed", lambda engine, folder, names: (
                    [(folder / name).unlink() for name in names], listed(engine, folder, names))[1])

        def another_job(now):
            now.setattr(disks, "check_arrived", lambda folder, *args: (atomic.begin(folder), check(folder, *args)))

        def left_out(now):
            now.setattr(saving, "_model_file", lambda engine: "mp_rank_01_model_states.pt")

        does_not_see = "rank 0, which puts the checkpoint in place, does not see.* rank 1 .*{}.*; " \
                       "what was saved before is still there; save to one"
        for breaks, message in (
                (spoiled("gone"), does_not_see.format(f"{ZERO_1} is missing")),
                (spoiled("cut"), does_not_see.format(f"{ZERO_1} has 1000 bytes")),
                (spoiled("older"), does_not_see.format(f"{ZERO_1} is damaged or of another save")),
                (gone_early, f"{ZERO_1} is missing before this save is complete"),
                (left_out, "no rank has written .*mp_rank_01_model_states.pt, which rank 0 need"),
                (another_job, "was replaced during this save: another job saves to the")):
            with monkeypatch.context() as now, pytest.raises(LayerWiseError, match=message):
                breaks(now)
                engine.save_checkpoint(tmp_path, tag="tag")
            self.assert_the_first_is_there(tmp_path, first)
        other_disk = tmp_path.with_name(f"{tmp_path.name} of 1")
        with pytest.raises(LayerWiseError, match="rank 1 finds nothing of this save in .* of 1 after 0.3 s.*save to "
                                                 "one folder .*use_node_local_storage"):
            engine.save_checkpoint(other_disk if rank else tmp_path, tag="tag")
        assert not other_disk.exists()
        self.assert_the_first_is_there(tmp_path, first)

    def test_a_file_that_arrives_late(self, tmp_path, monkeypatch):
        engine, _ = self.saved(tmp_path)
        check = disks.check_arrived

        def late(folder, *args):
            path = atomic.incomplete_folder(folder) / ZERO_1
            path.rename(tmp_path / "on its way")
            threading.Timer(0.2, lambda: (tmp_path / "on its way").rename(path)).start()
            check(folder, *args)

        monkeypatch.setattr(disks, "check_arrived", late)
        engine.save_checkpoint(tmp_path, tag="tag")
        other = loaded(start(Net(), ds_config()), tmp_path)
        assert_equal_states(states(other), states(engine))

    def test_a_link_and_a_relative_path_and_a_process_that_moves_on(self, tmp_path, monkeypatch):
        engine = train_engine(start(Net(), ds_config()), 1)
        on_rank_0(lambda: ((tmp_path / "disk").mkdir(), (tmp_path / "link").symlink_to(tmp_path / "disk")))
        monkeypatch.chdir(tmp_path)
        on_rank_0((tmp_path / "elsewhere").mkdir)
        check = disks.check_arrived
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(disks, "check_arrived", lambda *args: (os.chdir(tmp_path / "elsewhere"), check(*args)))
            engine.save_checkpoint("link", tag="tag")
        monkeypatch.chdir(tmp_path / "elsewhere")
        engine.save_checkpoint("../link", tag="again")
        assert (tmp_path / "link").is_symlink() and not names_in(tmp_path / "elsewhere")
        for tag in ("tag", "again"):
            Manifest.read(tmp_path / "disk" / tag).check(tmp_path / "disk" / tag)
            other = loaded(start(Net(), ds_config()), tmp_path / "disk", tag=tag)
            assert_equal_states(states(other), states(engine))


class TestWhatIsLoaded(DistributedTest):
    def saved(self, folder):
        engine = start(Net(), ds_config())
        for step in range(2):
            train_engine(engine, 1, first=step)
            engine.save_checkpoint(folder)
        return engine

    @pytest.mark.parametrize("tags, message", [
        (("global_step1", "global_step2"), "rank 0 'global_step1' in .* rank 1 'global_step2' in "),
        (("global_step1", None), "rank 0 'global_step1' in .* rank 1 'global_step2' in "),
        (("latest is", "other"), "rank 0 'global_step2' in .* rank 1 'global_step1' in .* of 1 "),
        (("latest is", "missing"), "rank 0 'global_step2' in .* and rank 1 None in .* of 1 .None: there is no file ")])
    def test_ranks_agree_on_a_tag_before_anything_is_read(self, tags, message, tmp_path):
        engine, rank, folder = self.saved(tmp_path), dist.get_rank(), tmp_path
        tag = tags[rank]
        if tags[0] == "latest is":
            tag = None
            if rank == 1:
                folder = tmp_path.with_name(f"{tmp_path.name} of 1")
                folder.mkdir()
                for name in names_in(tmp_path) - {"latest"}:
                    (folder / name).symlink_to(tmp_path / name)
                if tags[1] == "other":
                    (folder / "latest").write_text("global_step1")
        train_engine(engine, 1, first=2)
        before = weights(engine.module).clone()
        for states_too in (True, False):
            with pytest.raises(LayerWiseError, match=f"ranks would load different checkpoints: {message}"
                               ".*pass the same"):
                engine.load_checkpoint(folder, tag=tag, load_optimizer_states=states_too)
        assert engine.global_steps == 3 and (weights(engine.module) == before).all()

    def test_another_save_under_the_same_tag(self, tmp_path):
        engine = self.saved(tmp_path)
        mine = tmp_path if dist.get_rank() == 0 else tmp_path.with_name(f"{tmp_path.name} of 1")
        if dist.get_rank() == 1:
            mine.mkdir()
            (mine / "global_step1").symlink_to(tmp_path / "global_step2")
        before = weights(engine.module).clone()
        for states_too in (True, False):
            with pytest.raises(LayerWiseError, match="ranks see different saves: rank 0 in .*/global_step1, rank 1 in"):
                engine.load_checkpoint(mine, tag="global_step1", load_optimizer_states=states_too)
        assert engine.global_steps == 2 and (weights(engine.module) == before).all()


class TestDisksOfNodes(DistributedTest):
    """Two nodes, of a rank each and of two."""

    world_size = [2, 4]

    @property
    def per_node(self):
        return dist.get_world_size() // 2

    @property
    def node(self):
        return dist.get_rank() // self.per_node

    def started(self, **config):
        engine = start(Net(), ds_config(**OWN_DISKS, **config))
        engine.local_rank = dist.get_rank() % self.per_node
        return engine

    def test_each_has_what_its_ranks_resume_from(self, tmp_path):
        mine = tmp_path / f"node {self.node}"
        engine = self.started(bf16={"enabled": True})
        for step in range(3):
            train_engine(engine, 1, first=step)
            engine.save_checkpoint(mine, tag=("a", "b", "b")[step])
            assert names_in(mine / engine_tag(mine)) == {
                FILE_NAME, "mp_rank_00_model_states.pt", *(
                    f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                    for rank in range(dist.get_world_size()) if rank // self.per_node == self.node)}
        assert names_in(mine) == {"a", "b", "latest"}
        other = self.started(bf16={"enabled": True})
        other.load_checkpoint(mine)
        assert other.global_steps == 3
        assert_equal_states(states(other), states(engine))
        assert (weights(other.module) == weights(engine.module)).all()

    def test_all_on_one_disk(self, tmp_path):
        engine = train_engine(self.started(), 1)
        for _ in range(2):
            engine.save_checkpoint(tmp_path, tag="tag")
        assert names_in(tmp_path) == {"tag", "latest"}
        assert len(Manifest.read(tmp_path / "tag").files) == dist.get_world_size() + 1
        other = self.started()
        other.load_checkpoint(tmp_path)
        assert_equal_states(states(other), states(engine))

    def test_a_file_of_another_save_of_the_same_step(self, tmp_path):
        """Brought from the other node's disk: the list of this one has no checksum of it."""
        engine = train_engine(self.started(), 1)
        for name in ("first", "second"):
            engine.save_checkpoint(tmp_path / name / f"node {self.node}", tag="tag")
        there, other = tmp_path / "first" / "node 0", self.started()

        def bring(name):
            for path in (tmp_path / name / "node 1" / "tag").glob("*_optim_states.pt"):
                shutil.copy(path, there / "tag")

        on_rank_0(lambda: bring("second"))
        with pytest.raises(LayerWiseError, match="says save_id [0-9a-f]{16}, expected [0-9a-f]{16}; the files are not"):
            RegularCheckpoint(there / "tag").state_dict(dist.get_world_size() - 1)
        with pytest.raises(LayerWiseError, match="differs between ranks: .*save [0-9a-f]{16}"):
            other.load_checkpoint(there, tag="tag")
        assert other.global_steps == 0
        on_rank_0(lambda: bring("first"))
        other.load_checkpoint(there, tag="tag")
        assert_equal_states(states(other), states(engine))

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_save_that_is_in_place_on_one_of_them(self, victim, tmp_path, monkeypatch):
        mine = tmp_path / f"node {self.node}"
        engine = train_engine(self.started(), 1)
        engine.save_checkpoint(mine, tag="tag")
        train_engine(engine, 1, first=1)
        with monkeypatch.context() as now, pytest.raises((OSError, LayerWiseError), match="not now"):
            if self.node == victim:
                now.setattr(atomic, "publish", not_now)
            engine.save_checkpoint(mine, tag="tag")
        other = loaded(self.started(), mine)
        assert other.global_steps == 2
        assert_equal_states(states(other), states(engine))
        assert names_in(mine) == {"tag", "latest"}

    @pytest.mark.parametrize("first_fails_in", [None, "publish"])
    def test_a_save_outlives_the_next_one_that_is_whole_on_one_of_them(self, first_fails_in, tmp_path, monkeypatch):
        """It is in place on both nodes, or on one of them."""
        mine = tmp_path / f"node {self.node}"
        engine = self.started()
        for step, fails_in in enumerate((first_fails_in, "seal")):
            train_engine(engine, 1, first=step)
            if not step:
                expected = states(engine)
            with monkeypatch.context() as now, pytest.raises(
                    (OSError, LayerWiseError), match="not now") if fails_in else nullcontext():
                if fails_in and self.node == 1:
                    now.setattr(atomic, fails_in, not_now)
                engine.save_checkpoint(mine, tag="tag")
        other = loaded(self.started(), mine, tag="tag" if first_fails_in else None)
        assert other.global_steps == 1
        assert_equal_states(states(other), expected)

    @pytest.mark.parametrize("first", [True, False])
    def test_a_node_that_died_before_it_wrote_latest(self, first, tmp_path, monkeypatch, capsys):
        """The save is in place everywhere by then; tags say nothing of which of two is the newer one."""
        mine = tmp_path / f"node {self.node}"
        engine = self.started()
        for step, tag in enumerate(("a",) if first else ("b", "a")):
            train_engine(engine, 1, first=step)
            with monkeypatch.context() as now, nullcontext() if tag == "b" else pytest.raises(
                    (OSError, LayerWiseError), match="not now"):
                if self.node == 1 and tag == "a":
                    now.setattr(atomic, "point", not_now)
                engine.save_checkpoint(mine, tag=tag)
        other = self.started()
        capsys.readouterr()
        path, _ = other.load_checkpoint(mine)
        assert path is not None and other.global_steps == engine.global_steps
        assert_equal_states(states(other), states(engine))
        said = "latest is not the same on all nodes; loading 'a', the newest save that all of them have"
        assert (said in capsys.readouterr().out) == (dist.get_rank() == 0)

    def test_a_save_that_one_of_them_lost(self, tmp_path):
        """Neither latest nor a guess leads to what not all of them have."""
        mine = tmp_path / f"node {self.node}"
        engine = self.started()
        for step, tag in enumerate("ab"):
            train_engine(engine, 1, first=step)
            engine.save_checkpoint(mine, tag=tag)
        if dist.get_rank() == dist.get_world_size() - 1:
            shutil.rmtree(mine / "b")
            atomic.point(mine / "latest", "a")
        dist.barrier()
        other = loaded(self.started(), mine)
        assert other.global_steps == 1
        if dist.get_rank() == dist.get_world_size() - 1:
            shutil.rmtree(mine / "a")
        dist.barrier()
        with pytest.raises(LayerWiseError, match="ranks would load different checkpoints"):
            other.load_checkpoint(mine)

    @pytest.mark.parametrize("where", ["a save", "a load"])
    def test_a_list_that_one_rank_cannot_read(self, where, tmp_path, monkeypatch):
        mine = tmp_path / f"node {self.node}"
        engine = train_engine(self.started(), 1)
        engine.save_checkpoint(mine, tag="tag")
        with monkeypatch.context() as now, pytest.raises((OSError, LayerWiseError), match="tag is away"):
            if self.node == 1:
                now.setattr(Manifest, "read", staticmethod(away))
            engine.save_checkpoint(mine, tag="tag") if where == "a save" else engine.load_checkpoint(mine, tag="tag")
        engine.load_checkpoint(mine, tag="tag")


def not_now(*_):
    raise OSError("not now")


def away(folder):
    raise OSError(errno.ESTALE, f"{folder.name} is away")


def engine_tag(folder):
    return (folder / "latest").read_text()


SCRIPT = """
    import os
    import sys

    import deepspeed
    import torch

    from ds_layerwise.errors import LayerWiseError
    from ds_layerwise.zero.checkpoint import disks
    from ds_layerwise.run import leave
    from tests.support.checkpoints import assert_equal_states, states
    from tests.support.training import Net, ds_config, start, train_engine

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    assert os.environ["LOCAL_RANK"] == "0" and os.environ["CROSS_RANK"] == os.environ["RANK"]
    disks.PATIENCE = 0.2
    engine = train_engine(start(Net(), ds_config()), 1)
    try:
        engine.save_checkpoint("saved")
        raise SystemExit("saved in two places as if it were one")
    except LayerWiseError as e:
        assert "rank 1 finds nothing of this save" in str(e), e
    own = ds_config(checkpoint={"use_node_local_storage": True})
    engine, other = start(Net(), own), start(Net(), own)
    for step in range(2):
        train_engine(engine, 1, first=step)
        engine.save_checkpoint("saved")
    other.load_checkpoint("saved")
    assert other.global_steps == 2, other.global_steps
    assert_equal_states(states(other), states(engine))
    open("done", "w").close()
    leave()
"""


def test_two_nodes_started_as_deepspeeds_launcher_starts_them(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    world = base64.urlsafe_b64encode(json.dumps({"one": [0], "other": [0]}).encode()).decode()
    port, nodes = str(free_port()), []
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    for rank in range(2):
        (tmp_path / f"node {rank}").mkdir()
        nodes.append(subprocess.Popen(
            [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", f"--node_rank={rank}",
             "--master_addr=127.0.0.1", f"--master_port={port}", tmp_path / "script.py"],
            cwd=tmp_path / f"node {rank}", env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    until = time.monotonic() + 300
    try:
        said = [node.communicate(timeout=max(1, until - time.monotonic()))[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    for rank, text in enumerate(said):
        assert nodes[rank].returncode == 0, text[-3000:]
        folder = tmp_path / f"node {rank}" / "saved"
        assert (folder / "latest").read_text() == "global_step2"
        assert names_in(folder / "global_step2") == {
            FILE_NAME, "mp_rank_00_model_states.pt", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"}
        assert (tmp_path / f"node {rank}" / "done").exists()
