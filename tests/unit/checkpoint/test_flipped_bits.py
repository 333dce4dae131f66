"""Flipped bits in one file of whole parameters, or in a sharded checkpoint, never give other values."""

import os
import random
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.fp16.loss_scaler import LossScaler

from ds_layerwise.checkpoint import single_file
from ds_layerwise.checkpoint.dcp import ShardedCheckpoint
from ds_layerwise.checkpoint.record import Header, RuleRecord
from ds_layerwise.checkpoint.single_file import OneFile, sums_of, write_beside
from ds_layerwise.errors import LayerWiseError
from tests.support import checkpoints
from tests.support.rooms import rooms

pytestmark = [*rooms("single_file", "dcp", "whole_states", "plain_values"),
              pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

RULES = {"a.b": RuleRecord("adam", ("exp_avg", "step"), "exp_avg"), "w": RuleRecord("kron", ("L", "momentum"), None)}
SHAPES = {"a.b": (5, 4), "w": (6,)}
HEADER = Header(step=3, shapes=SHAPES, rules=RULES, dtypes=("float32",), configured=[{"lr": 0.5}],
                param_groups=[{"lr": 0.5, "betas": (0.5, 0.75)}], loss_scaler=LossScaler(512.0))
FROZEN = torch.arange(7).bfloat16()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(single_file, "_BLOCK", 3)


def numbers(shape, first):
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 7


STATES = {"a.b": {"": numbers((5, 4), 1), "exp_avg": numbers((5, 4), 50), "step": torch.tensor(3.0)},
          "w": {"": numbers((6,), 9), "L": numbers((2, 2), 3), "momentum": numbers((6,), 80).bfloat16()}}


def write_one_file(folder):
    tensors = {f"state.{name}.{key}" if key else f"master.{name}": value
               for name, of in STATES.items() for key, value in of.items()}
    checkpoints.write_one_file(folder / "file", tensors, HEADER)


def write_sharded(folder):
    """Write a sharded checkpoint as two ranks do, each parameter in two parts."""
    model = {name: of[""] for name, of in STATES.items()} | {"frozen": FROZEN}
    state = {name: {key: value for key, value in of.items() if key} for name, of in STATES.items()}
    paths = {f"model.{name}": value for name, value in model.items()} | {
        f"optim.state.{name}.{key}": value for name, of in state.items() for key, value in of.items()}
    sums = {path: sums_of(value) for path, value in paths.items()}
    for path, name in (("model.a.b", "a.b"), ("optim.state.a.b.exp_avg", "a.b")):
        flat = paths[path].view(-1)
        sums[path] = sums_of(flat[:8]) | sums_of(flat[8:], 8)
    dcp.save({"model": model, "optim": {"state": state, "param_groups": [{"lr": 0.5}]},
              "ds_layerwise": {"header": write_beside(HEADER, sums)}}, checkpoint_id=folder, no_dist=True)


def opened(folder):
    if (folder / "file").exists():
        return OneFile(folder / "file")
    return ShardedCheckpoint(folder, RULES, names=RULES)


def read(folder, ranges):
    """All that a load takes, as text and tensors."""
    saved = opened(folder)
    header = saved.header
    found = {"": repr((header.step, {name: tuple(header.shapes[name]) for name in RULES}, header.rules,
                       header.param_groups, header.configured, header.dtypes, vars(header.loss_scaler)))}
    for name, (start, stop) in ranges.items():
        piece, = saved.pieces(name, start, stop)
        for key, value in {"": piece.master, **piece.state}.items():
            is_part = key in ("", "exp_avg", "momentum")
            found[name, key] = value[start - piece.param_start:stop - piece.param_start] if is_part else value
    if isinstance(saved, ShardedCheckpoint):
        found["frozen", ""] = saved.pieces("frozen", 0, 7)[0].master
    return found


def expected(ranges):
    return {(name, key): value.reshape(-1)[slice(*ranges[name])] if key in ("", "exp_avg", "momentum") else value
            for name, of in STATES.items() for key, value in of.items()}


RANGES = {"a.b": (2, 17), "w": (0, 6)}


@pytest.mark.parametrize("make", [write_one_file, write_sharded])
@pytest.mark.parametrize("start", range(0, 20, 3))
def test_every_range_is_read_as_it_was_saved(make, start, tmp_path):
    make(tmp_path)
    for stop in range(start + 1, 21):
        ranges = {"a.b": (start, stop), "w": (0, 6)}
        found = read(tmp_path, ranges)
        for key, value in expected(ranges).items():
            assert torch.equal(found[key], value) and found[key].dtype == value.dtype, (key, start, stop)
        assert ("frozen", "") not in found or torch.equal(found["frozen", ""], FROZEN)


def flipped(path, place, bit):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.unlink()
    path.write_bytes(content)


def outcome(folder, whole):
    """The fault of a load of a damaged ``folder``; empty if that is refused, or as it was saved."""
    try:
        found = read(folder, RANGES)
    except LayerWiseError as e:
        return "" if str(folder) in str(e) else f"does not name it: {e}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ", ".join(str(key) for key, value in whole.items() if not (
        found[key] == value if isinstance(value, str) else torch.equal(found[key], value)))


@pytest.mark.parametrize("make", [write_one_file, write_sharded])
def test_a_flipped_bit_is_refused_or_changes_nothing(make, tmp_path):
    make(tmp_path)
    whole, wrong, rng = read(tmp_path, RANGES), [], random.Random(25)
    for path in sorted(tmp_path.iterdir()):
        size = path.stat().st_size
        # As many of the list as of the tensors, of which most bytes are padding.
        for place in rng.sample(range(size), min(size, 250)):
            bit = rng.randrange(8)
            flipped(path, place, bit)
            if line := outcome(tmp_path, whole):
                wrong.append(f"bit {bit} of byte {place} of {path.name}: {line}")
            flipped(path, place, bit)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("make", [write_one_file, write_sharded])
def test_a_flipped_bit_of_any_tensor_is_refused(make, tmp_path):
    """The bit is flipped wherever the values lie in a file."""
    make(tmp_path)
    for key, value in {**expected(RANGES), ("frozen", ""): FROZEN}.items():
        raw = value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        paths = [path for path in tmp_path.iterdir() if raw in path.read_bytes()]
        assert paths or (key[0] == "frozen" and make is write_one_file), key
        for path in paths:
            place = path.read_bytes().index(raw) + len(raw) // 2
            flipped(path, place, 3)
            with pytest.raises(LayerWiseError, match=f"{tmp_path}.* is damaged: elements .* do not match their"):
                read(tmp_path, RANGES)
            flipped(path, place, 3)


@pytest.mark.parametrize("sums", [7, *({"master.a.b": of_one, "model.a.b": of_one} for of_one in (5, {"a": "b"}))])
@pytest.mark.parametrize("make", [write_one_file, write_sharded])
def test_checksums_of_another_type_are_damage(make, sums, tmp_path, monkeypatch):
    """The header is as it was written, so that its digest tells nothing."""
    made = write_beside
    for module in (single_file, sys.modules[__name__]):
        monkeypatch.setattr(module, "write_beside", lambda *args: made(args[0], sums))
    make(tmp_path)
    with pytest.raises(LayerWiseError, match=f"{tmp_path}.* is damaged: "):
        read(tmp_path, RANGES)


def test_a_damaged_list_of_tensors_is_refused(tmp_path):
    write_sharded(tmp_path)
    path = Path(tmp_path, ".metadata")
    whole = path.read_bytes()
    for content, message in ((b"Nr\xff\xff\xff\xff" * 3 + b".", "is not a checkpoint of torch.distributed.checkpoint"),
                             (b"\x96" + b"\xff" * 7 + b"\x0f.", "is not a checkpoint of torch.distributed.checkpoint"),
                             (whole.replace(b"ds_layerwise.header", b"ds_layerwise.heater"),
                              "its list has lost ds_layerwise.header")):
        path.write_bytes(content)
        with pytest.raises(LayerWiseError, match=message):
            opened(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LayerWiseError, match=".metadata is not a file"):
        opened(tmp_path)
    path.unlink()
    path.write_bytes(whole)
    (tmp_path / "__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "__0_0.distcp")
    with pytest.raises(LayerWiseError, match="__0_0.distcp is not a file"):
        opened(tmp_path)
