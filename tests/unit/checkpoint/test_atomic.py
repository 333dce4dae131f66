"""Disks that rename no folder or know no fsync, and what a checkpoint may be called."""

import errno
import os
import pathlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_layerwise.checkpoint import atomic, universal
from ds_layerwise.checkpoint.checkpoint_folder import check_tag
from ds_layerwise.checkpoint.manifest import Manifest
from ds_layerwise.checkpoint.record import ADAM, Header, PieceRecord
from ds_layerwise.errors import LayerWiseError
from tests.support.rooms import rooms

pytestmark = rooms("atomic", "checkpoint_folder")

FILES = {"old": ["a.pt", "old.pt", "sub/b.pt"], "new": ["a.pt", "sub/b.pt", "new/c.pt", "new/d.pt"]}


class Killed(BaseException):
    """An exception that nothing on the way catches."""


def write(folder, text):
    atomic.begin(folder)
    for name in FILES[text]:
        path = atomic.incomplete_folder(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}")


def commit(folder, text):
    write(folder, text)
    atomic.commit(folder, Manifest.of(atomic.incomplete_folder(folder)))


def holds(folder):
    """"old" or "new", whole; "" where nobody would believe what is there."""
    try:
        manifest = Manifest.read(folder)
    except LayerWiseError:
        return ""
    manifest.check(folder)
    text = (folder / "a.pt").read_text().split()[0]
    assert sorted(manifest.files) == sorted(FILES[text])
    assert all((folder / name).read_text() == f"{text} {name}" for name in FILES[text])
    return text


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def refuse(*errors):
    """A function of ``os`` that says each of ``errors`` in turn, and again."""
    calls = []

    def refused(*args, **kwargs):
        calls.append(args)
        number = errors[len(calls) % len(errors)]
        raise OSError(number, os.strerror(number))
    return refused


@contextmanager
def dying_at(moment):
    """Die before file operation number ``moment``; yields a list of those that were begun."""
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        def dying(original, half=None):
            def operation(*args, **kwargs):
                begun.append(args)
                if len(begun) - 1 == moment:
                    if half:
                        half(*args)
                    raise Killed
                return original(*args, **kwargs)
            return operation

        # pathlib of Python 3.10 has the functions of os at a place of its own.
        for place in filter(None, (os, getattr(pathlib, "_normal_accessor", None))):
            for name in ("replace", "unlink", "mkdir", "rmdir"):
                patch.setattr(place, name, dying(getattr(place, name)))
        half_of = lambda path, text, **kwargs: path.write_bytes(text.encode()[:len(text) // 2])  # noqa: E731
        patch.setattr(Path, "write_text", dying(Path.write_text, half_of))
        yield begun


@pytest.mark.parametrize("error", [errno.EXDEV, errno.ENOTEMPTY, errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_disk_that_renames_no_folder_is_refused_before_anything_is_written(error, tmp_path, monkeypatch):
    folder = tmp_path / "tag"
    commit(folder, "old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse(error))
        with pytest.raises(LayerWiseError, match=f"the disk of {tmp_path} cannot rename a folder .*; save to a local"):
            atomic.begin(folder)
    atomic.abandon(folder)
    assert holds(folder) == "old" and [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_the_old_is_back_where_the_second_of_two_renames_fails(tmp_path, monkeypatch):
    commit(tmp_path / "tag", "old")
    write(tmp_path / "tag", "new")
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    rename = os.rename

    def renames_what_is_there_already(one, other):
        if str(one).endswith(atomic.INCOMPLETE):
            raise OSError(errno.EPERM, "no")
        rename(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", renames_what_is_there_already)
        with pytest.raises(OSError, match="no"):
            atomic.commit(tmp_path / "tag", Manifest.of(atomic.incomplete_folder(tmp_path / "tag")))
    assert holds(tmp_path / "tag") == "old"
    atomic.abandon(tmp_path / "tag")
    assert [path.name for path in tmp_path.iterdir()] == ["tag"]
    commit(tmp_path / "tag", "new")
    assert holds(tmp_path / "tag") == "new"


def test_a_death_between_two_renames_leaves_the_old(tmp_path):
    commit(tmp_path / "tag", "old")
    (tmp_path / "tag").rename(tmp_path / "tag.replaced")
    for _ in range(2):
        atomic.recover(tmp_path / "tag")
        assert holds(tmp_path / "tag") == "old" and [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_a_disk_that_knows_no_fsync_is_named_once_and_one_that_is_broken_is_an_error(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(atomic.logger, "warning", said.append)
    monkeypatch.setattr(atomic, "_without_fsync", set())
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL, errno.ENOTSUP))
    for _ in range(3):
        atomic.flush(tmp_path)
    assert len(said) == 1 and "does not support fsync" in said[0]
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        atomic.flush(tmp_path)


@pytest.mark.parametrize("tag, reason", [
    ("", "names no folder below save_dir"), (".", "names no folder"), ("..", "names no folder"),
    ("a/", "names no folder"), ("a//b", "names no folder"), ("/tmp/a", "names no folder"),
    ("a/../../b", "names no folder"), ("a\0b", "names no folder"), ("a\nb", "holds characters"),
    (" a", "holds characters"), ("a\udc80", "holds characters"), ("latest", "is the name of a file beside"),
    ("latest_universal/a", "is the name of a file beside"), ("a.incomplete", "ends in .incomplete or .replaced"),
    ("a.replaced/b", "ends in .incomplete or .replaced"),
    ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 120, "has a part of 240 b"),
    (Path("../a"), "names no folder")])
def test_tags_that_no_checkpoint_can_have(tag, reason):
    with pytest.raises(LayerWiseError, match=f"the checkpoint's tag .*{reason}.*; choose another"):
        check_tag(tag)


def test_the_longest_tag_is_the_longest_with_which_a_save_can_name_its_files(tmp_path):
    assert atomic.claim(tmp_path / f"{check_tag('a' * 217)}_universal", "0" * 16)
    with pytest.raises(LayerWiseError, match="has a part of 218 bytes, more than 217"):
        check_tag("a" * 218)


@pytest.mark.parametrize("tag, text", [
    (7, "7"), (np.int64(7), "7"), ("a/b", "a/b"), (Path("a/b"), "a/b"), ("step 1", "step 1"), ("a..b", "a..b"),
    ("a[1]*", "a[1]*"), ("a" * 200, "a" * 200),
    ("\N{LATIN SMALL LETTER E WITH ACUTE}", "\N{LATIN SMALL LETTER E WITH ACUTE}")])
def test_tags_that_a_checkpoint_can_have(tag, text):
    assert check_tag(tag) == text


class OneParameter:
    """A checkpoint of a parameter called ``name``."""

    def __init__(self, name, rule=ADAM):
        self._keys = rule.state_keys
        self.header = Header(step=1, shapes={name: (2,)}, rules={name: rule}, param_groups=[], dtypes=("float32",))

    def pieces(self, name, start, stop):
        states = {key: torch.tensor(1.0) if key == "step" else torch.ones(2) for key in self._keys}
        return [PieceRecord(name, 0, torch.ones(2), states)]


@pytest.mark.parametrize("name", ["../a", "/tmp/a", "a/../../../b", "a//b", "", "..", "a/."])
def test_a_name_that_leads_out_of_the_folder_is_not_written(name, tmp_path):
    folder = tmp_path / "out" / "checkpoint"
    folder.mkdir(parents=True)
    (tmp_path / "model.pt").write_text("")
    with pytest.raises(LayerWiseError, match="leads out of the folder zero"):
        universal.write_parameters(OneParameter(name), folder, [name])
    with pytest.raises(LayerWiseError, match="leads out of the folder zero"):
        universal.write_model(tmp_path / "model.pt", {name: torch.ones(2)}, folder)
    assert not list(tmp_path.rglob("fp32.pt"))


@pytest.mark.parametrize("key", ["../a", "/tmp/a", "a/b", ".."])
def test_a_state_that_is_no_file_name_is_not_written(key, tmp_path):
    with pytest.raises(LayerWiseError, match="the state .* of w is not a file name"):
        universal.write_parameters(OneParameter("w", type(ADAM)("mine", (key,), None)), tmp_path, ["w"])
    assert not list(tmp_path.rglob("*.pt"))


def test_a_list_that_names_what_is_outside_is_not_believed(tmp_path):
    (tmp_path / "outside").write_text("text")
    (tmp_path / "tag").mkdir()
    Manifest.of(tmp_path / "tag", ["../outside"]).write(tmp_path / "tag")
    with pytest.raises(LayerWiseError, match="it lists '../outside', which is outside of the folder"):
        Manifest.read(tmp_path / "tag")


@pytest.mark.parametrize("written", [b"run/a", b"run/a\n", b"run/a\r\n", b" run/a ", b"\xef\xbb\xbfrun/a\r\n"])
def test_a_pointer_may_be_written_by_an_editor(written, tmp_path):
    (tmp_path / "latest").write_bytes(written)
    assert atomic.pointed(tmp_path / "latest") == "run/a"
