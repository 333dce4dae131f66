"""Corners of saves and loads that a rewrite has lost once, which disks and scripts seldom reach."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.files.manifest import Manifest
from ds_layerwise.checkpoint.formats import single_file
from ds_layerwise.checkpoint.formats.dcp import ShardedCheckpoint
from ds_layerwise.checkpoint.formats.headers import sums_of
from ds_layerwise.checkpoint.record import Header, RuleRecord
from ds_layerwise.engine.loading.loading import _latest_tag
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools.compare import differences
from ds_layerwise.zero.checkpoint import whole_states
from ds_layerwise.zero.checkpoint.resumed_groups import Resumption
from tests.support.rooms import rooms

pytestmark = rooms("atomic", "dcp", "single_file", "whole_states", "resumed_groups",
                   "loading", "compare")


@pytest.mark.parametrize("which, kept", [(0, "old"), (1, "new")])
def test_a_rename_that_fails_after_it_was_done_leaves_a_checkpoint_in_place(which, kept, tmp_path, monkeypatch):
    """NFS repeats a call whose answer is lost, and then finds nothing to do."""
    folder, rename, calls = tmp_path / "tag", os.rename, []

    def commit(text):
        atomic.begin(folder)
        new = atomic.incomplete_folder(folder)
        (new / "file").write_text(text)
        atomic.commit(folder, Manifest.of(new, ["file"]))

    commit("old")
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)

    def twice(path, target):
        rename(path, target)
        if path in (folder, atomic.incomplete_folder(folder)):
            calls.append(path)
            if len(calls) == which + 1:
                raise FileNotFoundError(2, "no such folder any more", str(path))

    monkeypatch.setattr(os, "rename", twice)
    with pytest.raises(FileNotFoundError, match="no such folder any more"):
        commit("new")
    assert (folder / "file").read_text() == kept


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("counts, step", [((0, 5), 0), ((5, 0), 5), ((None, 5), 5), ((None, None), 0)])
def test_the_step_of_anothers_checkpoint_is_the_first_count_in_it(counts, step, tmp_path):
    """This holds if that is 0, and the counts of others are not."""
    states = {}
    for name, count in zip("ab", counts, strict=True):
        states[name] = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        if count is not None:
            states[name]["step"] = torch.tensor(float(count))
    weights = {name: torch.ones(2) for name in "ab"}
    dcp.save({"model": weights, "optim": {"state": states}}, checkpoint_id=tmp_path, no_dist=True)
    rules = {name: RuleRecord("adam", ("exp_avg", "exp_avg_sq", "step"), "exp_avg") for name in "ab"}
    assert ShardedCheckpoint(tmp_path, rules, others={}).header.step == step


def test_a_file_of_whole_parameters_makes_its_folder_and_takes_complex_states(tmp_path):
    value = torch.tensor([1 + 2j, 3])
    single_file.write(tmp_path / "new" / "folder" / "file", {"state.w.fft": (value.dtype, (2,))}, [value])
    opened = single_file.safe_open(tmp_path / "new" / "folder" / "file", framework="pt")
    assert torch.equal(opened.get_tensor("state.w.fft"), value)


@pytest.mark.parametrize("error, received", [(KeyboardInterrupt, 0), (LayerWiseError, 1), (MemoryError, 1)])
def test_a_write_that_an_error_ends_receives_what_others_send_and_ctrl_c_does_not(error, received, monkeypatch):
    """After Ctrl-C the others may be gone."""
    value, calls = torch.ones(4), []
    theirs = whole_states._Part(1, 0, 4, (4,), value.dtype, sums_of(value, 0))
    comm = whole_states.comm
    monkeypatch.setattr(comm, "rank_of", lambda group: 0)
    monkeypatch.setattr(comm, "gather_objects", lambda mine, group: [mine, {"master.w": theirs}])
    monkeypatch.setattr(comm, "errors_on_all_ranks", nullcontext)
    monkeypatch.setattr(comm, "receive", lambda into, out_of: calls.append(out_of))

    def write(*_):
        raise error("no more")

    monkeypatch.setattr(whole_states, "write", write)
    header = Header(step=1, shapes={"w": (4,)}, rules={}, dtypes=("float32",), param_groups=[], configured=[])
    with pytest.raises(error, match="no more"):
        whole_states.save_one_file(Path("file"), [], header, ("loss_scaler", LossScaler(1.0)), torch.device("cpu"))
    assert calls == [1] * received


class OneGroup:
    """An optimizer whose config has another rate than the run that was saved."""

    fixed_keys = frozenset()

    def __init__(self, lr):
        self.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr, "initial_lr": lr}]
        self.built_with = self.configured = [{"lr": lr}]

    def named(self, values):
        return dict(values)


def resumed(scheduler, old=0.1, new=0.2):
    """Let a run of rate ``new`` go on, with its ``scheduler``, from one of rate ``old``; its rate afterwards."""
    header = SimpleNamespace(param_groups=[{"lr": scheduler.at, "initial_lr": old}], configured=[{"lr": old}],
                             unreadable=())
    optimizer = OneGroup(new)
    Resumption(optimizer=optimizer, header=header, wins="config", otherwise={}, scheduler=scheduler,
               goes_on=True).take_over()
    return optimizer.param_groups[0]["lr"]


class OfAScript:
    """A scheduler that keeps what it likes, and steps where it takes its state over."""

    def __init__(self, at, **state):
        self.at, self.state, self.loaded = at, state, 0

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded += 1


@pytest.mark.parametrize("state", [
    {"count": 3}, {"_schedulers": 3}, {"_schedulers": [1, "two"]}, {"_schedulers": None, "_milestones": [2]},
    {"_milestones": [2], "last_epoch": 4}, {"eta_min": None}])
def test_a_schedule_of_a_script_without_rates_in_its_state_is_not_loaded_again(state):
    scheduler = OfAScript(0.05, **state)
    assert resumed(scheduler) == pytest.approx(0.1) and scheduler.loaded == 0


def test_eta_min_of_a_schedule_of_a_script_is_no_floor():
    """The schedule may warm up from below; eta_min of torch's cosines is a floor."""
    assert resumed(OfAScript(0.05, eta_min=0.09)) == pytest.approx(0.1)
    assert resumed(OfAScript(0.05, eta_min=0.02, T_max=10)) == pytest.approx(0.02 + 0.03 * 0.18 / 0.08)


def test_rates_in_a_state_within_a_state_are_moved_and_loaded():
    inner = {"base_lrs": [0.1], "_last_lr": [0.05]}
    scheduler = OfAScript(0.05, _schedulers=[inner])
    assert resumed(scheduler) == pytest.approx(0.1) and scheduler.loaded == 1
    assert inner["base_lrs"] == [0.2] and inner["_last_lr"] == [pytest.approx(0.1)]


@pytest.mark.parametrize("text", ["global\udce4step", "\ud800", "a/\udfff", ""])
def test_a_pointer_that_holds_no_text_is_refused(text, tmp_path, monkeypatch):
    (tmp_path / "latest").touch()
    monkeypatch.setattr(atomic, "pointed", lambda pointer: text)
    with pytest.raises(LayerWiseError, match="latest holds .*; write the tag of a checkpoint into it, or pass the tag"):
        _latest_tag(tmp_path, universal_first=False)


class Contents(SimpleNamespace):
    """A checkpoint of parameters with states of these names."""

    def __init__(self, folder, **states):
        super().__init__(folder=folder, trained=dict.fromkeys(states, (2,)), others={}, keys=states.get,
                         num_bytes=lambda name, states: 8,
                         saved=SimpleNamespace(header=SimpleNamespace(step=1)))

    def values(self, name, *, states):
        return ((key, torch.zeros(2)) for key in self.keys(name))


@pytest.mark.parametrize("one, other", [("z", "a"), ("a", "z"), ("a", "a")])
def test_lines_of_a_comparison_come_in_the_order_of_the_checkpoints(one, other):
    lines = differences(Contents(one, v=["key"], w=[]), Contents(other, v=[], w=["key"]), states=True,
                        bars=lambda *_: nullcontext(lambda numel: None))
    assert lines == [f"only in {one}: key of v", f"only in {other}: key of w"]
