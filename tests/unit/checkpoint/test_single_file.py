"""Files of whole parameters, without an engine: parts of ranks are put together, written and read."""

from contextlib import nullcontext

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from safetensors.torch import load_file, save_file

from ds_layerwise.checkpoint import regular
from ds_layerwise.checkpoint.record import Header, PieceRecord, RuleRecord
from ds_layerwise.checkpoint.regular import FORMAT
from ds_layerwise.checkpoint.single_file import OneFile
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero.checkpoint import whole_states
from tests.support.checkpoints import write_one_file
from tests.support.rooms import rooms

pytestmark = rooms("single_file", "whole_states")

RULES = {"a": RuleRecord("soap", ("exp_avg", "L.q", "step"), "exp_avg"),
         "b": RuleRecord("adam", ("exp_avg", "step"), "exp_avg")}
HEADER = Header(step=3, shapes={"a": (12, 3), "b": (7,)}, rules=RULES, dtypes=("float32",),
                param_groups=[{"lr": 0.5}], configured=[{"lr": 0.5}], loss_scaler=LossScaler(4.0))


def numbers(numel, first=0):
    return torch.arange(first, first + numel, dtype=torch.float32)


def pieces_of(rank):
    """Rank 1 owns ``a``, of which a factor has as many elements, and both have a part of ``b``."""
    if rank == 0:
        return [PieceRecord("b", 0, numbers(4), {"exp_avg": numbers(4, 20), "step": torch.tensor(3.0)})]
    whole = {"exp_avg": numbers(36, 100), "L.q": numbers(36, 200).view(6, 6), "step": torch.tensor(3.0)}
    return [PieceRecord("a", 0, numbers(36, 50), whole),
            PieceRecord("b", 4, numbers(3, 4), {"exp_avg": numbers(3, 24), "step": torch.tensor(3.0)})]


WHOLE = {"master.a": numbers(36, 50).view(12, 3), "state.a.exp_avg": numbers(36, 100).view(12, 3),
         "state.a.L.q": numbers(36, 200).view(6, 6), "state.a.step": torch.tensor(3.0),
         "master.b": numbers(7), "state.b.exp_avg": numbers(7, 20), "state.b.step": torch.tensor(3.0)}


class Stop(Exception):
    pass


def save_on_two_ranks(path, monkeypatch, header=HEADER):
    """Play the save of two ranks, one after the other."""
    said, sent = [], []

    def play(rank, gather):
        monkeypatch.setattr(whole_states.comm, "rank_of", lambda group: rank)
        monkeypatch.setattr(whole_states.comm, "gather_objects", gather)
        whole_states.save_one_file(path, pieces_of(rank), header, torch.device("cpu"))

    def only_say(mine, group):
        said.append(mine)
        raise Stop

    monkeypatch.setattr(whole_states.comm, "errors_on_all_ranks", nullcontext)
    monkeypatch.setattr(whole_states.comm, "send", lambda value, dst: sent.append(value.clone()))
    monkeypatch.setattr(whole_states.comm, "receive", lambda into, src: into.copy_(sent.pop(0)))
    for rank in (0, 1):
        with pytest.raises(Stop):
            play(rank, only_say)
    play(1, lambda mine, group: said)
    try:
        play(0, lambda mine, group: said)
    finally:
        assert not sent


def test_parts_of_ranks_are_put_together_and_read(tmp_path, monkeypatch):
    save_on_two_ranks(tmp_path / "file", monkeypatch)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    found = load_file(tmp_path / "file")
    found.pop("ds_layerwise")
    assert found.keys() == WHOLE.keys()
    for key, value in WHOLE.items():
        assert torch.equal(found[key], value), key
    opened = OneFile(tmp_path / "file")
    assert (opened.header.step, opened.header.rules, opened.header.shapes) == (3, RULES, HEADER.shapes)
    assert opened.header.loss_scaler.loss_scale == 4.0 and opened.header.param_groups == [{"lr": 0.5}]
    (a,), (b,) = opened.pieces("a", 0, 36), opened.pieces("b", 2, 5)
    assert (a.param_start, b.param_start) == (0, 0) and torch.equal(b.master, numbers(7))
    assert {key: tuple(value.shape) for key, value in a.state.items()} == {"exp_avg": (36,), "L.q": (6, 6), "step": ()}
    assert torch.equal(a.state["exp_avg"], numbers(36, 100)) and torch.equal(a.state["L.q"], WHOLE["state.a.L.q"])


def test_each_save_has_a_name_of_its_own(tmp_path):
    for name in ("one", "other"):
        write_one_file(tmp_path / name, WHOLE, HEADER)
    one, other = (OneFile(tmp_path / name).save_id for name in ("one", "other"))
    assert one != other and one == OneFile(tmp_path / "one").save_id


def test_a_newer_format_is_refused_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(regular, "FORMAT", FORMAT + 1)
    write_one_file(tmp_path / "file", WHOLE, HEADER)
    monkeypatch.undo()
    with pytest.raises(LayerWiseError, match=f"file has format {FORMAT + 1}, and this version of ds_layerwise reads "
                                             f"{FORMAT}; upgrade ds_layerwise"):
        OneFile(tmp_path / "file")


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    write_one_file(tmp_path / "file", WHOLE, HEADER)
    before = (tmp_path / "file").read_bytes()

    def fails(descriptor):
        assert (tmp_path / "file").read_bytes() == before
        raise OSError("no disk any more")

    # Nothing replaces a file before it is on the disk.
    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(LayerWiseError, match="file cannot be written: no disk any more"):
        write_one_file(tmp_path / "file", WHOLE, HEADER)
    assert [each.name for each in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_bytes() == before


def test_another_file_is_refused_and_named(tmp_path):
    less = {key: value for key, value in WHOLE.items() if key != "state.b.exp_avg"}
    write_one_file(tmp_path / "file", less, HEADER)
    (tmp_path / "text").write_text("no tensors")
    for name, message in (("none", "none is not a file; every rank reads it"),
                          (".", "is not a file; every rank reads it"),
                          ("text", "text is not a complete safetensors file"),
                          ("file", "file lacks state.b.exp_avg, so it is not complete")):
        with pytest.raises(LayerWiseError, match=message):
            OneFile(tmp_path / name)
    save_file(WHOLE, tmp_path / "other")
    with pytest.raises(LayerWiseError, match="was not written by save_state_dict_to_file"):
        OneFile(tmp_path / "other")


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
          torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def test_all_dtypes_are_read_by_safetensors(tmp_path):
    tensors = {str(dtype): torch.tensor([0.0, 1.0, 2.0]).to(dtype) for dtype in DTYPES}
    write_one_file(tmp_path / "file", tensors, HEADER)
    found = load_file(tmp_path / "file")
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name].float(), value.float()), name


def test_it_is_what_safetensors_writes(tmp_path):
    write_one_file(tmp_path / "file", WHOLE, HEADER)
    save_file(load_file(tmp_path / "file"), tmp_path / "theirs")
    assert (tmp_path / "file").read_bytes() == (tmp_path / "theirs").read_bytes()
