"""Folders that cannot be renamed, disks that know no fsync, deaths in between, and what a checkpoint may be called."""

import errno
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_layerwise.checkpoint.files import atomic
from ds_layerwise.checkpoint.files.manifest import FILE_NAME, Manifest
from ds_layerwise.checkpoint.formats import universal
from ds_layerwise.checkpoint.formats.tags import check_tag
from ds_layerwise.checkpoint.record import ADAM, Header, PieceRecord
from ds_layerwise.errors import LayerWiseError
from tests.support.rooms import rooms

pytestmark = rooms("atomic", "tags")

FILES = {"old": ["a.pt", "old.pt", "sub/b.pt"], "new": ["a.pt", "sub/b.pt", "new/c.pt", "new/d.pt"]}


class Killed(BaseException):
    """What nothing on the way catches."""


def write(folder, text):
    atomic.begin(folder)
    for name in FILES[text]:
        path = atomic.staged(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {name}")


def commit(folder, text):
    write(folder, text)
    atomic.commit(folder, Manifest.of(atomic.staged(folder)))


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


def mount(kind, monkeypatch):
    """Let this disk behave as mounts of object stores do."""
    if kind == "is in user space":
        monkeypatch.setattr(atomic, "_renames_folders", lambda path: False)
        return
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    refused = refuse(errno.EXDEV, errno.ENOTEMPTY, errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.EMFILE)
    monkeypatch.setattr(os, "rename", refused)
    if kind == "renames nothing":
        monkeypatch.setattr(os, "replace", refuse(errno.ENOSYS))
        monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))


MOUNTS = ["is in user space", "renames no folder", "renames nothing"]


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

        for name in ("replace", "unlink", "mkdir", "rmdir"):
            patch.setattr(os, name, dying(getattr(os, name)))
        half_of = lambda path, text, **kwargs: path.write_bytes(text.encode()[:len(text) // 2])  # noqa: E731
        patch.setattr(Path, "write_text", dying(Path.write_text, half_of))
        patch.setattr(shutil, "copyfile", dying(
            shutil.copyfile, lambda one, other: other.write_bytes(one.read_bytes()[:one.stat().st_size // 2])))
        yield begun


@pytest.mark.parametrize("kind", MOUNTS)
class TestMountsThatRenameNoFolder:
    def test_the_new_takes_the_place_of_the_old(self, kind, tmp_path, monkeypatch):
        mount(kind, monkeypatch)
        folder = tmp_path / "tag"
        for text in ("old", "new", "old"):
            commit(folder, text)
            assert holds(folder) == text and [path.name for path in tmp_path.iterdir()] == ["tag"]
            assert files_in(folder) == {*FILES[text], FILE_NAME}
        atomic.point(tmp_path / "latest", "one")
        atomic.point(tmp_path / "latest", "other")
        assert (tmp_path / "latest").read_text() == "other" and not (tmp_path / "latest.incomplete").exists()

    def test_what_is_not_the_checkpoints_stays(self, kind, tmp_path, monkeypatch):
        mount(kind, monkeypatch)
        folder = tmp_path / "tag"
        commit(folder, "old")
        (folder / "tokenizer.json").write_text("mine")
        commit(folder, "new")
        assert holds(folder) == "new" and (folder / "tokenizer.json").read_text() == "mine"

    @pytest.mark.parametrize("before", ["nothing", "old"])
    def test_a_death_at_any_moment(self, before, kind, tmp_path, monkeypatch):
        mount(kind, monkeypatch)
        ended = set()
        for moment in range(200):
            folder = tmp_path / str(moment) / "tag"
            if before == "old":
                commit(folder, "old")
            write(folder, "new")
            manifest = Manifest.of(atomic.staged(folder))
            try:
                with dying_at(moment):
                    atomic.commit(folder, manifest)
                break
            except Killed:
                pass
            assert holds(folder) in ("", before.replace("nothing", ""), "new"), moment
            atomic.recover(folder)
            found = holds(folder)
            ended.add(found)
            assert found == "new" or (found == before if before == "old" else not folder.exists()), moment
            if found:
                assert files_in(folder) == {*FILES[found], FILE_NAME}, moment
            commit(folder, "new")
            assert holds(folder) == "new" and [path.name for path in folder.parent.iterdir()] == ["tag"]
        else:
            pytest.fail("it never came to its end")
        assert moment > 10 and ended == {before.replace("nothing", ""), "new"}

    @pytest.mark.parametrize("before", ["nothing", "old"])
    def test_a_disk_that_is_full_on_the_way(self, before, kind, tmp_path, monkeypatch):
        mount(kind, monkeypatch)
        if before == "old":
            commit(tmp_path / "tag", "old")
        write(tmp_path / "tag", "new")
        atomic.seal(tmp_path / "tag", Manifest.of(atomic.staged(tmp_path / "tag")))
        with monkeypatch.context() as full:
            full.setattr(os, "replace", refuse(errno.ENOSPC))
            full.setattr(shutil, "copyfile", refuse(errno.ENOSPC))
            with pytest.raises(OSError, match="No space left"):
                atomic.publish(tmp_path / "tag")
        atomic.abandon(tmp_path / "tag")
        if before == "nothing":
            assert not list(tmp_path.iterdir())
            return
        atomic.recover(tmp_path / "tag")
        assert holds(tmp_path / "tag") == "new" and [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_the_second_of_two_renames_fails(tmp_path, monkeypatch):
    commit(tmp_path / "tag", "old")
    write(tmp_path / "tag", "new")
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    rename = os.rename

    def renames_what_is_there_already(one, other):
        if str(one).endswith(atomic.INCOMPLETE):
            raise OSError(errno.EPERM, "no")
        rename(one, other)

    monkeypatch.setattr(os, "rename", renames_what_is_there_already)
    atomic.commit(tmp_path / "tag", Manifest.of(atomic.staged(tmp_path / "tag")))
    assert holds(tmp_path / "tag") == "new" and [path.name for path in tmp_path.iterdir()] == ["tag"]


def test_mounts_in_user_space_are_known_by_their_kind(tmp_path, monkeypatch):
    (tmp_path / "a b" / "c").mkdir(parents=True)
    lines = ["1 0 8:1 / / rw - ext4 /dev/sda rw", f"2 1 0:5 / {tmp_path}/a\\040b rw - fuse.gcsfuse bucket rw",
             f"3 2 0:6 / {tmp_path}/a\\040b/c rw shared:1 - tmpfs tmpfs rw"]
    monkeypatch.setattr(Path, "read_text", lambda path: "\n".join(lines))
    assert atomic._renames_folders(tmp_path)
    assert not atomic._renames_folders(tmp_path / "a b")
    assert atomic._renames_folders(tmp_path / "a b" / "c")


def test_a_disk_that_knows_no_fsync_is_named_once_and_one_that_is_broken_is_an_error(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(atomic.logger, "warning", said.append)
    monkeypatch.setattr(atomic, "_told", set())
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL, errno.ENOTSUP))
    for _ in range(3):
        atomic.flush(tmp_path)
    assert len(said) == 1 and "knows no fsync" in said[0]
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        atomic.flush(tmp_path)


@pytest.mark.parametrize("tag, reason", [
    ("", "names no folder below save_dir"), (".", "names no folder"), ("..", "names no folder"),
    ("a/", "names no folder"), ("a//b", "names no folder"), ("/tmp/a", "names no folder"),
    ("a/../../b", "names no folder"), ("a\0b", "names no folder"), ("a\nb", "holds characters"),
    (" a", "holds characters"), ("a\udc80", "holds characters"), ("latest", "is the name of a file beside"),
    ("latest_universal/a", "is the name of a file beside"), ("a.incomplete", "ends as what is not whole"),
    ("a.replaced/b", "ends as what is not whole"), ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 120, "has a part of 240 b"),
    (Path("../a"), "names no folder")])
def test_tags_that_no_checkpoint_can_have(tag, reason):
    with pytest.raises(LayerWiseError, match=f"the checkpoint's tag .*{reason}.*; choose another"):
        check_tag(tag)


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
    with pytest.raises(LayerWiseError, match="the state .* of w is no file name"):
        universal.write_parameters(OneParameter("w", type(ADAM)("mine", (key,), None)), tmp_path, ["w"])
    assert not list(tmp_path.rglob("*.pt"))


def test_a_list_that_names_what_is_outside_is_not_believed(tmp_path):
    (tmp_path / "outside").write_text("text")
    (tmp_path / "tag").mkdir()
    Manifest.of(tmp_path / "tag", ["../outside"]).write(tmp_path / "tag")
    with pytest.raises(LayerWiseError, match="it lists '../outside', which is outside of the folder"):
        Manifest.read(tmp_path / "tag")


@pytest.mark.parametrize("written", [b"run/a", b"run/a\n", b"run/a\r\n", b" run/a ", b"\xef\xbb\xbfrun/a\r\n"])
def test_a_pointer_that_an_editor_wrote(written, tmp_path):
    (tmp_path / "latest").write_bytes(written)
    assert atomic.pointed(tmp_path / "latest") == "run/a"
