"""Files of users in a checkpoint's folder stay when another save takes its place, whenever that one dies."""

import os
from contextlib import contextmanager

import pytest

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest
from ds_layerwise.errors import LayerWiseError
from tests.support.rooms import rooms
from tests.unit.checkpoint.test_atomic import Killed, commit, dying_at, holds, write

pytestmark = rooms("user_files", "atomic")

WAYS = ["exchange", "two renames"]


def choose(way, monkeypatch):
    if way == "two renames":
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)


#: Among them names like those of a checkpoint, further down or with another beginning.
FILES = ["tokenizer.json", "rng_rank0.pt", "sub/more.txt", "sub/mp_rank_00_model_states.pt", "zero/notes.txt",
         "ema_model_states.pt"]


def put(folder, names=FILES):
    """Put files, folders and links of users beside a checkpoint."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"mine: {name}")
    (folder / "nothing").mkdir()
    (folder / "link").symlink_to("tokenizer.json")
    (folder / "broken").symlink_to("not there")
    (folder / "elsewhere").symlink_to(folder.parent)


def assert_kept(folder, names=FILES):
    for name in names:
        assert (folder / name).read_text() == f"mine: {name}"
    assert (folder / "nothing").is_dir() and os.readlink(folder / "link") == "tokenizer.json"
    assert os.readlink(folder / "broken") == "not there" and (folder / "elsewhere").is_symlink()


@pytest.mark.parametrize("way", WAYS)
class TestUsersFiles:
    def test_stay(self, way, tmp_path, monkeypatch):
        choose(way, monkeypatch)
        folder = tmp_path / "tag"
        commit(folder, "old")
        put(folder)
        for text in ("new", "old", "new"):
            commit(folder, text)
            assert holds(folder) == text
            assert_kept(folder)
            assert [path.name for path in tmp_path.iterdir()] == ["tag"]
        assert not (folder / "old.pt").exists()

    def test_stay_where_there_was_no_checkpoint_yet_or_stocks(self, way, tmp_path, monkeypatch):
        """Files with names of DeepSpeed's go, as stock keeps no list: they would be taken for files of the new one."""
        choose(way, monkeypatch)
        folder = tmp_path / "tag"
        folder.mkdir()
        put(folder)
        theirs = ["zero_pp_rank_3_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt", "zero/w/fp32.pt",
                  "layer_01-model_states.pt"]
        for name in theirs:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("stock's")
        commit(folder, "new")
        assert holds(folder) == "new" and not any((folder / name).exists() for name in theirs)
        assert_kept(folder)

    def test_stay_whenever_the_save_dies(self, way, tmp_path, monkeypatch):
        choose(way, monkeypatch)
        ended = set()
        for moment in range(200):
            folder = tmp_path / str(moment) / "tag"
            commit(folder, "old")
            put(folder)
            write(folder, "new")
            manifest = Manifest.of(atomic.incomplete_folder(folder))
            try:
                with dying_at(moment), dying_at_links(moment):
                    atomic.commit(folder, manifest)
                break
            except Killed:
                pass
            atomic.recover(folder)
            ended.add(holds(folder))
            assert_kept(folder)
            commit(folder, "new")
            assert holds(folder) == "new" and [path.name for path in folder.parent.iterdir()] == ["tag"], moment
            assert_kept(folder)
        else:
            pytest.fail("it never came to its end")
        assert moment > 5 and ended == {"old", "new"}

    def test_are_copied_where_the_disk_knows_no_links(self, way, tmp_path, monkeypatch):
        choose(way, monkeypatch)
        commit(tmp_path / "tag", "old")
        put(tmp_path / "tag")

        def refused(*args, **kwargs):
            raise PermissionError(1, "Operation not permitted")
        monkeypatch.setattr(os, "link", refused)
        commit(tmp_path / "tag", "new")
        assert holds(tmp_path / "tag") == "new"
        assert_kept(tmp_path / "tag")


@contextmanager
def dying_at_links(moment):
    """Die before link or rename number ``moment``."""
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("link", "rename"):
            def dying(*args, original=getattr(os, name), **kwargs):
                begun.append(args)
                if len(begun) - 1 == moment:
                    raise Killed
                return original(*args, **kwargs)
            patch.setattr(os, name, dying)
        yield


@pytest.mark.parametrize("ending", [atomic.INCOMPLETE, atomic.REPLACED])
class TestFoldersThatSavesNeed:
    def test_a_users_own_is_not_touched(self, ending, tmp_path):
        folder = tmp_path / "tag"
        own = tmp_path / f"tag{ending}"
        own.mkdir()
        (own / "thesis.tex").write_text("mine")
        for do in (atomic.begin, atomic.abandon, atomic.recover):
            try:
                do(folder)
            except LayerWiseError as e:
                assert do is atomic.begin and f"{own} holds thesis.tex, which no save wrote" in str(e)
            else:
                assert do is not atomic.begin
            assert (own / "thesis.tex").read_text() == "mine" and not folder.exists()

    def test_a_file_of_the_users_is_called_a_file(self, ending, tmp_path):
        (tmp_path / f"tag{ending}").write_text("mine")
        with pytest.raises(LayerWiseError, match="is a file, and a save of tag needs that name; move it away"):
            atomic.begin(tmp_path / "tag")

    def test_a_link_of_the_users_is_not_followed(self, ending, tmp_path):
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "mp_rank_00_model_states.pt").write_text("mine")
        (tmp_path / f"tag{ending}").symlink_to(tmp_path / "precious")
        with pytest.raises(LayerWiseError, match="is a link, and a save of"):
            atomic.begin(tmp_path / "tag")
        atomic.abandon(tmp_path / "tag")
        assert (tmp_path / "precious" / "mp_rank_00_model_states.pt").read_text() == "mine"

    def test_remains_of_a_dead_save_of_any_version_make_room(self, ending, tmp_path):
        folder = tmp_path / "tag"
        commit(folder, "old")
        regular, universal = ["zero_pp_rank_0_mp_rank_00_optim_states.pt"], ["zero/w/fp32.pt", "zero/v"]
        for files in (regular, universal, [FILE_NAME, "x"], []):
            left = tmp_path / f"tag{ending}"
            left.mkdir()
            for name in files:
                (left / name).parent.mkdir(parents=True, exist_ok=True)
                (left / name).mkdir() if name == "zero/v" else (left / name).write_text("left")
            commit(folder, "new")
            assert holds(folder) == "new" and [path.name for path in tmp_path.iterdir()] == ["tag"]


@pytest.mark.parametrize("tag", ["notes.txt", "notes.txt/step10", "nowhere", "nowhere/step10"])
def test_a_tag_that_is_the_name_of_a_file_is_refused(tag, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for do in (atomic.begin, lambda folder: atomic.claim(folder, "0" * 16)):
        with pytest.raises(LayerWiseError, match=f"{tmp_path / tag.split('/')[0]} is not a folder, but a save of"):
            do(tmp_path / tag)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "nowhere"]


def test_a_folder_behind_a_link_is_not_removed(tmp_path):
    """A folder takes the place of the link, and what the link led to is as it was."""
    commit(tmp_path / "disk" / "tag", "old")
    put(tmp_path / "disk" / "tag")
    (tmp_path / "tag").symlink_to(tmp_path / "disk" / "tag")
    commit(tmp_path / "tag", "new")
    assert holds(tmp_path / "tag") == "new"
    assert_kept(tmp_path / "tag")
    assert_kept(tmp_path / "disk" / "tag")
    assert holds(tmp_path / "disk" / "tag") == "old"
