"""Saves that end before they are over: killed ranks, full disks, interrupts. What was saved before stays, whole."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.checkpoint import atomic, universal
from ds_layerwise.checkpoint.manifest import SIGNATURE, Manifest
from ds_layerwise.engine.checkpoints import saving
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, on_rank_0, whole_states
from tests.support.faults import FileEvents, no_larger_files
from tests.support.forks import fork_ranks
from tests.support.harness import DistributedTest, OwnDistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("atomic", "manifest", "saving")

#: Of file calls, the ones that make something visible: a save is killed right before and right after each of them.
VISIBLE = {"_exchange", "rename", "replace"}


@dataclass(frozen=True)
class Scenario:
    """A save during which a rank dies. ``first`` is the tag of the save before."""

    tag: str = "first"
    universal: bool = False
    can_exchange: bool = True
    resume_on: int = 1
    stage: int = 1

    def engine(self):
        if not self.can_exchange:
            atomic._exchange = lambda one, other: False
        return start(Net(), ds_config(stage=self.stage, layerwise={"save_universal": self.universal}))


SCENARIOS = {
    "a new tag": Scenario(tag="second"),
    "the same tag": Scenario(resume_on=2),
    "the same tag by two renames": Scenario(can_exchange=False),
    "the same tag, universal too": Scenario(universal=True),
    "the same tag, universal too, at stage 3": Scenario(universal=True, stage=3, resume_on=2),
    "a new tag, universal too, by renames": Scenario(tag="second", universal=True, can_exchange=False, resume_on=3),
}

#: In each of them either rank dies at this many moments spread over the whole save, and around what is visible. While
#: the pointer is written one dies at each moment, or at every fifth.
MOMENTS, EVERY = (5, 1) if os.environ.get("THOROUGH") == "1" else (1, 5)


def save_and_die(scenario, folder, victim, die_at, die=None):
    """Save twice; ``victim`` dies in the second. Beside ``folder`` lies what each step is made of."""
    engine = scenario.engine()
    for step in (1, 2):
        train_engine(engine, 1, first=step)
        expected = {"states": whole_states(engine), "weights": weights(engine.module)}
        if dist.get_rank() == 0:
            torch.save(expected, folder.with_name(f"{folder.name} step {step}"))
        if step == 1:
            engine.save_checkpoint(folder, tag="first")
    if victim not in (None, dist.get_rank()):
        try:
            engine.save_checkpoint(folder, tag=scenario.tag)
        finally:
            survived(folder).touch()
        return
    with FileEvents(die_at, **({"die": die} if die else {})) as events:
        engine.save_checkpoint(folder, tag=scenario.tag)
    folder.with_name(f"{folder.name} events of {dist.get_rank()}").write_text("\n".join(events.names))


def survived(folder):
    """The file that says that the save is over on the rank beside the victim."""
    return folder.with_name(f"{folder.name} over")


def load_what_is_left(scenario, folders, may_be_new=(1, 2)):
    """Each of ``folders`` loads and verifies as what it says it is, takes the next save, and is clean after it."""
    engine = scenario.engine()
    for i, folder in enumerate(folders):
        pointers = ["latest", universal.LATEST] if scenario.universal else ["latest"]
        for pointer in pointers:
            tag = (folder / pointer).read_text()
            train_engine(engine, 1, first=100 + i)
            loaded, _ = engine.load_checkpoint(folder, tag=None if pointer == "latest" else tag)
            assert loaded, (folder, pointer)
            Manifest.read(folder / tag).check(folder / tag)
            step = engine.global_steps
            assert step in ({"first": (1,), "second": (2,)}[tag.removesuffix("_universal")]
                            if scenario.tag != "first" else may_be_new), (folder, tag, step)
            expected = torch.load(folder.with_name(f"{folder.name} step {step}"))
            assert_equal_states(whole_states(engine), expected["states"], (folder, pointer))
            assert torch.equal(weights(engine.module), expected["weights"]), (folder, pointer)
            assert engine.optimizer.step_count == step
        for path in folder.iterdir():
            if path.is_dir() and path.suffix not in (atomic.INCOMPLETE, atomic.REPLACED):
                Manifest.read(path).check(path)  # also what nothing points to yet
        train_engine(engine, 1, first=step + 1)
        states = whole_states(engine)
        engine.save_checkpoint(folder, tag=scenario.tag)
        tags = {"first", scenario.tag}
        tags |= {f"{tag}_universal" for tag in tags} if scenario.universal else set()
        assert {path.name for path in folder.iterdir() if path.suffix != ".py"} == {*tags, *pointers}
        assert len(list((folder / scenario.tag).glob("*optim_states.pt"))) == dist.get_world_size()
        train_engine(engine, 1, first=step + 2)
        for tag in [scenario.tag, f"{scenario.tag}_universal"][:len(pointers)]:
            engine.load_checkpoint(folder, tag=tag)
            assert_equal_states(whole_states(engine), states, (folder, "after the next save"))


class TestKilledRanks(OwnDistributedTest):
    # This one process starts the ranks itself, again and again, and has no group.
    world_size = 1
    init_distributed = False
    exec_timeout = 1200

    @pytest.mark.parametrize("name", [
        pytest.param(name, marks=[] if name == "a new tag" else pytest.mark.thorough) for name in SCENARIOS])
    def test_a_rank_that_is_killed_anywhere_in_a_save_loses_nothing(self, name, tmp_path):
        scenario, rng = SCENARIOS[name], random.Random(name)
        assert fork_ranks(2, save_and_die, scenario, tmp_path / "none", None, None) == [(0, ""), (0, "")]
        deaths = set()
        for victim in (0, 1):
            events = (tmp_path / f"none events of {victim}").read_text().split()
            deaths |= {(victim, len(events) * i // MOMENTS + rng.randrange(len(events) // MOMENTS))
                       for i in range(MOMENTS)}
            deaths |= {(victim, i) for i, event in enumerate(events) if event in VISIBLE}
            if "point" in events and name == "a new tag":
                deaths |= {(victim, i) for i in range(events.index("point"), len(events), EVERY)}
        assert len(deaths) >= 2 * MOMENTS + 2
        folders = []
        for victim, moment in sorted(deaths):
            ended = [(0, "")] * 2
            while ended[victim] == (0, ""):
                # Runs differ by a few events: a save may be over before its last moment comes.
                folders.append(tmp_path / f"{victim} at {moment} {len(folders)}")
                ended = fork_ranks(2, save_and_die, scenario, folders[-1], victim, moment)
                moment -= 5
            assert ended[victim][0] == -signal.SIGKILL, (folders[-1], ended)
        # The new checkpoint is there in some of them, the old one in the others: both sides of a commit were met.
        newest = {(folder / "latest").read_text() for folder in folders}
        assert newest == {"first", scenario.tag}
        ended = fork_ranks(scenario.resume_on, load_what_is_left, scenario, folders, exec_timeout=600)
        assert [raised for _, raised in ended] == [""] * scenario.resume_on

    @pytest.mark.parametrize("how", ["exits", "hangs", "is interrupted"])
    def test_the_other_ranks_do_not_wait_for_ever(self, how, tmp_path):
        def interrupt():
            raise KeyboardInterrupt

        def hang():
            deadline = time.monotonic() + 150
            while not survived(folder).exists():
                assert time.monotonic() < deadline, "the other waits for ever"
                time.sleep(0.1)

        die = {"exits": lambda: os._exit(0), "hangs": hang, "is interrupted": interrupt}[how]
        for victim in (0, 1) if how != "hangs" else (0,):
            folder = tmp_path / str(victim)
            # Where the victim is gone nobody waits for a timeout: all is over before it.
            ended = fork_ranks(2, save_and_die, Scenario(), folder, victim, 40, die, exec_timeout=240,
                               collective_timeout=20 if how == "hangs" else 300)
            assert "Error" in ended[1 - victim][1] and ended[1 - victim][0] == 1, ended
            assert fork_ranks(1, load_what_is_left, Scenario(), [folder], (1,)) == [(0, "")]


def test_a_folder_set_aside_between_two_renames_is_back_before_the_next_save_begins(tmp_path):
    folder = tmp_path / "tag"
    for name in ("tag.replaced", "tag.incomplete"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mp_rank_00_model_states.pt").write_text(name)
    atomic.begin(folder)
    assert {path.name for path in tmp_path.iterdir()} == {"tag", "tag.incomplete"}
    assert (folder / "mp_rank_00_model_states.pt").read_text() == "tag.replaced"
    assert [path.name for path in atomic.incomplete_folder(folder).iterdir()] == [SIGNATURE]


class TestFullDisk(DistributedTest):
    stage = 1

    def started(self, folder):
        engine = train_engine(start(Net(), ds_config(stage=self.stage, layerwise={"save_universal": True})), 1)
        engine.save_checkpoint(folder, tag="first")
        return engine

    def assert_only_the_first_is_there(self, engine, folder, states, *, clean=True):
        dist.barrier()
        assert (folder / "latest").read_text() == "first"
        assert (folder / universal.LATEST).read_text() == "first_universal"
        assert not list(folder.glob(f"latest*{atomic.INCOMPLETE}"))
        if clean:
            assert {path.name for path in folder.iterdir() if path.is_dir()} == {"first", "first_universal"}
        before = whole_states(engine)
        for tag in ("first", "first_universal"):
            engine.load_checkpoint(folder, tag=tag)
            assert_equal_states(whole_states(engine), states, tag)
        assert (states[("square.weight", "fp32")] != before[("square.weight", "fp32")]).any()

    def assert_the_next_save_works(self, engine, folder):
        train_engine(engine, 1, first=7)
        states = whole_states(engine)
        engine.save_checkpoint(folder, tag="second")
        train_engine(engine, 1, first=8)
        for tag in ("second", "second_universal"):
            engine.load_checkpoint(folder, tag=tag)
            assert_equal_states(whole_states(engine), states, tag)
        assert {path.name for path in folder.iterdir() if atomic.INCOMPLETE in path.name} == set()

    def assert_nothing_is_lost(self, module, function, stands_in, folder, *, ranks=(0, 1), clean=True):
        """A save fails in ``function`` of ``module``; on ``ranks``, ``stands_in(original, *args)`` is called for it."""
        engine = self.started(folder)
        states, original = whole_states(engine), getattr(module, function)
        train_engine(engine, 1, first=1)
        with pytest.MonkeyPatch.context() as now, no_larger_files(resource.getrlimit(resource.RLIMIT_FSIZE)[0]):
            if dist.get_rank() in ranks:
                now.setattr(module, function, partial(stands_in, original))
            with pytest.raises((LayerWiseError, OSError)):
                engine.save_checkpoint(folder, tag="second")
        self.assert_only_the_first_is_there(engine, folder, states, clean=clean)
        self.assert_the_next_save_works(engine, folder)

    @pytest.mark.parametrize("rank, module, function, limit", [
        (0, saving, "commit_decoupled", 4000),  # not even the model's file
        (0, saving, "commit_decoupled", 18000),  # the model's, but not the optimizer's
        (1, saving, "commit_decoupled", 4000),
        (0, universal, "write_parameters", 2000),
        (1, universal, "write_parameters", 1000),
        (0, universal, "write_common", 1000),
        (0, atomic, "seal", 10),
    ], ids=lambda value: getattr(value, "__name__", str(value)).split(".")[-1])
    def test_a_rank_cannot_write_all_of_a_file(self, rank, module, function, limit, tmp_path):
        def then_the_disk_is_full(original, *args):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            return original(*args)

        self.assert_nothing_is_lost(module, function, then_the_disk_is_full, tmp_path, ranks=[rank])

    def test_no_room_for_the_second_list(self, tmp_path):
        """The universal one is whole by then, and would be the only one of its save."""
        def then_the_disk_is_full(original, folder, manifest):
            if folder.name == "second":
                raise OSError(errno.ENOSPC, "No space left on device")
            original(folder, manifest)

        self.assert_nothing_is_lost(atomic, "seal", then_the_disk_is_full, tmp_path)

    def test_no_room_for_the_pointer(self, tmp_path):
        """The folders are whole already, and are not thrown away."""
        def then_the_disk_is_full(original, *args):
            with no_larger_files(0):
                return original(*args)

        self.assert_nothing_is_lost(atomic, "point", then_the_disk_is_full, tmp_path, ranks=[0], clean=False)

    @pytest.fixture
    def small_disk(self, tmp_path):
        folder = tmp_path / "disk"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("no permission to mount a small disk")
        yield folder
        subprocess.run(["umount", "-l", folder], check=True)

    @pytest.mark.may_skip("mounting a small disk takes permission; the tests above do without")
    def test_a_disk_with_less_and_less_room(self, small_disk):
        engine = self.started(small_disk)
        states, filler = whole_states(engine), small_disk / "filler"
        for num_free_pages in itertools.count(0, 9):
            def fill(left=num_free_pages * 4096):
                filler.unlink(missing_ok=True)
                filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - left))

            # What a failed save has mapped takes room until it is collected.
            gc.collect()
            on_rank_0(fill)
            train_engine(engine, 1, first=5)
            try:
                engine.save_checkpoint(small_disk, tag="second")
            except (LayerWiseError, OSError):
                dist.barrier()
                both = {"second", "second_universal"} & {path.name for path in small_disk.iterdir()}
                # Whole, and there was no room for the pointers.
                assert len(both) in (0, 2)
                self.assert_only_the_first_is_there(engine, small_disk, states, clean=not both)
            else:
                break
        assert num_free_pages > 45
        on_rank_0(filler.unlink)
        self.assert_the_next_save_works(engine, small_disk)


@pytest.mark.thorough
class TestFullDiskAtStage3(TestFullDisk):
    stage = 3


class TestWhatCannotBeSaved(DistributedTest):
    @pytest.mark.parametrize("how", ["not picklable", "interrupted everywhere"])
    def test_nothing_is_left_behind(self, how, tmp_path, monkeypatch):
        engine = train_engine(start(Net(), ds_config()), 1)
        engine.save_checkpoint(tmp_path, tag="first")
        states = whole_states(engine)
        train_engine(engine, 1, first=1)
        if how == "not picklable":
            with pytest.raises(Exception, match="pickle"):
                engine.save_checkpoint(tmp_path, tag="second", client_state={"a file": sys.stdout, "f": lambda: 0})
        else:
            def interrupted(*_, **__):
                raise KeyboardInterrupt

            # Both ranks are between the same two collectives here.
            monkeypatch.setattr(engine.optimizer, "state_dict", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.save_checkpoint(tmp_path, tag="second")
            monkeypatch.undo()
        dist.barrier()
        left = {path.name for path in tmp_path.iterdir() if path.is_dir()} - {"first"}
        # Interrupted ranks agree on nothing: the one that was behind may have made the folder once more.
        assert not left or (how == "interrupted everywhere" and left == {"second.incomplete"})
        assert (tmp_path / "latest").read_text() == "first"
        engine.load_checkpoint(tmp_path)
        assert_equal_states(whole_states(engine), states)
        train_engine(engine, 1, first=1)
        states = whole_states(engine)
        engine.save_checkpoint(tmp_path, tag="second")
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"first", "second"}
        train_engine(engine, 1, first=2)
        engine.load_checkpoint(tmp_path)
        assert_equal_states(whole_states(engine), states)
