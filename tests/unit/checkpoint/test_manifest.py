"""The list of a checkpoint's files: every byte in one range, every change found, whoever looks."""

import json
import os
import random
import zlib

import pytest
import torch

from ds_layerwise.checkpoint import atomic
from ds_layerwise.checkpoint.manifest import FILE_NAME, Manifest, _digest
from ds_layerwise.errors import LayerWiseError
from tests.support.rooms import rooms

pytestmark = rooms("manifest")


@pytest.fixture
def folder(tmp_path):
    """Files of torch, with large and small records, in both of its formats, and others."""
    content = {"large": torch.randn(50_000), "small": torch.randn(3), "views": torch.randn(9, 9).t(),
               "lp": torch.randn(70_000).bfloat16(), "text": "x" * 100_000, "empty": torch.zeros(0)}
    folder = tmp_path / "tag"
    (folder / "zero" / "a.b").mkdir(parents=True)
    torch.save(content, folder / "zip.pt")
    torch.save(content, folder / "old.pt", _use_new_zipfile_serialization=False)
    torch.save(content["large"], folder / "zero" / "a.b" / "fp32.pt")
    for name in ("empty", "in the middle", "zz empty"):
        (folder / name).write_bytes(b"")
    (folder / "short").write_bytes(b"abc")
    Manifest.of(folder).write(folder)
    return folder


def test_every_byte_is_in_one_range(folder):
    manifest = Manifest.read(folder)
    assert sorted(manifest.files) == ["empty", "in the middle", "old.pt", "short", "zero/a.b/fp32.pt",
                                      "zip.pt", "zz empty"]
    for name, ranges in manifest.files.items():
        content, start = (folder / name).read_bytes(), 0
        for r in ranges:
            assert r.start == start and r.crc32 == zlib.crc32(content[start:start + r.size]), (name, r)
            start += r.size
        assert start == len(content)
    assert len(manifest.files["old.pt"]) == 1
    # Two records of tensors and the pickle with the text are large; what is between and around them is listed, too.
    assert len(manifest.files["zip.pt"]) == 2 * 3 + 1


def test_checksums_come_from_the_archive_unless_torch_left_them_out(folder, monkeypatch):
    monkeypatch.setattr(torch.serialization, "get_crc32_options", lambda: False)
    assert [len(r) for r in Manifest.of(folder, ["zip.pt"]).files.values()] == [1]
    monkeypatch.undo()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(torch.randn(50_000), folder / "zip.pt")
        Manifest.of(folder).write(folder)
        Manifest.read(folder).check(folder)
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 50])
def test_all_ranks_together_check_each_range_once(folder, world_size, monkeypatch):
    manifest, checked = Manifest.read(folder), []
    monkeypatch.setattr("ds_layerwise.checkpoint.manifest.check_file",
                        lambda path, size, ranges: checked.extend((path.relative_to(folder).as_posix(), r.start, r.size)
                                                                  for r in ranges))
    for rank in range(world_size):
        manifest.check(folder, rank=rank, world_size=world_size)
    assert sorted(checked) == sorted((name, r.start, r.size) for name, rs in manifest.files.items() for r in rs)


@pytest.mark.parametrize("seed", range(60))
def test_a_flipped_bit_is_found_by_one_rank_of_three(folder, seed):
    rng = random.Random(seed)
    name = rng.choice(["zip.pt", "old.pt", "short", "zero/a.b/fp32.pt"])
    content = bytearray((folder / name).read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    (folder / name).write_bytes(content)
    found = 0
    for rank in range(3):
        try:
            Manifest.read(folder).check(folder, rank=rank, world_size=3)
        except LayerWiseError as e:
            assert name in str(e) and "damaged or of another save" in str(e)
            found += 1
    assert found == 1


@pytest.mark.parametrize("change, message", [
    (lambda path: path.unlink(), "zip.pt is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"zip.pt has \d+ bytes, \d+ were saved"),
    (lambda path: path.write_bytes(path.read_bytes() + b"x"), r"zip.pt has \d+ bytes, \d+ were saved"),
    (lambda path: path.write_bytes(b""), r"zip.pt has 0 bytes, \d+ were saved"),
    (lambda path: (path.parent / "empty").unlink(), "empty is missing"),
    (lambda path: (path.parent / "empty").write_text("x"), "empty has 1 bytes, 0 were saved"),
    (lambda path: (path.parent / "zz empty").unlink(), "zz empty is missing"),
])
def test_a_changed_file_is_named(folder, change, message):
    change(folder / "zip.pt")
    with pytest.raises(LayerWiseError, match=message):
        Manifest.read(folder).check(folder)


def edited(folder, edit):
    content = json.loads((folder / FILE_NAME).read_text())
    edit(content)
    (folder / FILE_NAME).write_text(json.dumps(content))


def resealed(folder, ranges):
    """With a digest that agrees with it."""
    content = json.loads((folder / FILE_NAME).read_text())
    content["files"]["zip.pt"] = ranges
    content["digest"] = _digest(content["files"])
    (folder / FILE_NAME).write_text(json.dumps(content))


@pytest.mark.parametrize("damage, message", [
    (lambda f: (f / FILE_NAME).unlink(), "is missing: the save was never finished"),
    (lambda f: ((f / FILE_NAME).unlink(), os.mkfifo(f / FILE_NAME)), "is not a file: the save was never finished"),
    (lambda f: resealed(f, [[-5, 0], [8, 0]]), r"is damaged: \[-5, 0\] is not \[number of bytes, CRC-32\]"),
    (lambda f: resealed(f, [["3", 0]]), r"is damaged: \['3', 0\] is not \[number of bytes, CRC-32\]"),
    (lambda f: resealed(f, []), "is damaged: a file has no range"),
    (lambda f: (f / FILE_NAME).write_text("{"), "is damaged"),
    (lambda f: (f / FILE_NAME).write_bytes(b"\xff\xfe"), "is damaged"),
    (lambda f: (f / FILE_NAME).write_text("[]"), "is damaged"),
    (lambda f: edited(f, lambda c: c["files"].pop("zip.pt")), "is damaged: its own digest does not match"),
    (lambda f: edited(f, lambda c: c["files"]["zip.pt"][0].__setitem__(1, 0)), "is damaged: its own digest"),
    (lambda f: edited(f, lambda c: c["save"].update(id="another")), "is damaged: the digest of its save does"),
    (lambda f: edited(f, lambda c: c.update(format=2)), "has format 2, and this version of ds_layerwise reads 1; up"),
])
def test_a_list_that_cannot_be_trusted_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(LayerWiseError, match=f"{FILE_NAME} {message}"):
        Manifest.read(folder)


def test_lists_of_some_files_and_their_union_are_checked(folder):
    whole = Manifest.read(folder)
    parts = [whole.only("zip.pt"), whole.only("short")]
    assert list(parts[0].files) == ["zip.pt"]
    assert Manifest.merged(parts).files == {name: whole.files[name] for name in ("zip.pt", "short")}
    (folder / "zip.pt").unlink()
    whole.only("short").check(folder)


class TestStaging:
    def test_this_system_exchanges_at_once(self, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / name).write_text("")
        assert atomic._exchange(tmp_path / "a", tmp_path / "b")
        assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
        assert not atomic._exchange(tmp_path / "a", tmp_path / "missing")

    def test_a_pointer_holds_its_tag_and_leaves_no_other_file(self, tmp_path):
        for tag in ("a", "b" * 300):
            atomic.point(tmp_path / "latest", tag)
            assert (tmp_path / "latest").read_text() == tag
        assert [p.name for p in tmp_path.iterdir()] == ["latest"]
