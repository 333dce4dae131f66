"""Corners of saves and loads that a rewrite has lost once, which disks and scripts seldom reach."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from ds_layerwise.checkpoint import atomic, single_file
from ds_layerwise.checkpoint.dcp import ShardedCheckpoint
from ds_layerwise.checkpoint.manifest import Manifest
from ds_layerwise.checkpoint.record import Header, RuleRecord
from ds_layerwise.checkpoint.single_file import sums_of
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero.checkpoint import whole_states
from tests.support.rooms import rooms

pytestmark = rooms("atomic", "dcp", "single_file", "whole_states", "loading")


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
    assert ShardedCheckpoint(tmp_path, rules, names=rules).header.step == step


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
    monkeypatch.setattr(comm, "receive", lambda into, src: calls.append(src))

    def write(*_):
        raise error("no more")

    monkeypatch.setattr(whole_states, "write", write)
    header = Header(step=1, shapes={"w": (4,)}, rules={}, dtypes=("float32",), param_groups=[], configured=[],
                    loss_scaler=LossScaler(1.0))
    with pytest.raises(error, match="no more"):
        whole_states.save_one_file(Path("file"), [], header, torch.device("cpu"))
    assert calls == [1] * received
