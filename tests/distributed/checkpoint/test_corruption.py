"""Checkpoints with something wrong in them: every one is refused by name, on every rank, and the engine is as before.

``CASES`` lists all of them; each test works off those of one format at one world size with one engine.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from ds_layerwise.checkpoint import regular
from ds_layerwise.checkpoint.manifest import FILE_NAME, FORMAT, Manifest
from ds_layerwise.errors import LayerWiseError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, on_rank_0, states, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start, train_engine, weights

pytestmark = rooms("manifest", "regular", "universal")

MODEL, POINTER = "mp_rank_00_model_states.pt", "latest"
RANK_0, RANK_1 = (f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))

#: Files of each format; every parameter of a universal folder has the same ones. ``big`` is over the size from which
#: checksums are taken over from the archive.
FILES = {
    "regular": [RANK_0, RANK_1, MODEL, FILE_NAME],
    "universal": [MODEL, FILE_NAME, "zero/optimizer_state.pt", "zero/big/fp32.pt", "zero/big/exp_avg.pt",
                  "zero/embed.weight/exp_avg_sq.pt", "zero/norm.bias/step.pt", "zero/running/fp32.pt"],
}

#: What is written in the place of an entry beside the tensors, with a list that agrees with it.
NONSENSE = {
    "step": "three", "shapes": {"big": "wide"}, "rules": {"muon": 3}, "rule_of": {"big": "none"}, "dtypes": 5,
    "param_groups": [{"lr": "fast"}], "configured": [{"weight_decay": 0.5}], "kept": ["big"], "repeats": 7,
    "loss_scaler": "large", "loss_scaler.cur_scale": None, "param_groups.lr": None, "param_groups.betas": 0.5,
}

#: The same, of a regular checkpoint, and of the file of the model.
OF_REGULAR = {"layout": "[" * 10**5, "world_size": 10**12, "param_starts": 4, "extra_states": {"big": 1}}
OF_MODEL = {"global_steps": "three", "skipped_steps": None, "lr_scheduler": {"last_batch_iteration": "three"},
            "module": {"big": 3}}

#: Files that say no more than which step it is, and the parameters' shapes and optimizers.
SAME_IN_EVERY_RUN = ("zero/norm.bias/step.pt", "zero/optimizer_state.pt")

#: In which a bit is flipped, a byte added or the rest cut off.
REGIONS = ["header", "padding", "record", "directory", "anywhere"]


@dataclass(frozen=True)
class Case:
    """A damage: ``do`` is the name of a function below, applied to ``file``, with what else it needs."""

    format: str
    world_size: int
    do: str
    file: str
    argument: object = None
    seed: int = 0

    def __str__(self):
        return f"{self.format} at {self.world_size}: {self.do} {self.file} {self.argument or ''} #{self.seed}"


def cases(format, world_size, num_random):
    """All the damages to one format; the world size that finds them changes which bytes the random ones hit."""
    names, seeds = FILES[format], range(num_random)
    for seed in seeds:
        rng = random.Random(f"{format} {world_size} {seed}")
        yield Case(format, world_size, "flip", rng.choice(names), REGIONS[seed % len(REGIONS)], seed)
        if seed % 3 == 0:
            yield Case(format, world_size, "truncate", rng.choice(names), None, seed)
        if seed % 5 == 0:
            yield Case(format, world_size, "insert", rng.choice(names), REGIONS[seed // 5 % len(REGIONS)], seed)
    for name in names:
        for do in ("remove", "empty", "make_folder", "garbage", "append"):
            yield Case(format, world_size, do, name)
        yield Case(format, world_size, "take", name, "later")
        if name not in SAME_IN_EVERY_RUN:
            yield Case(format, world_size, "take", name, "another seed")
            yield Case(format, world_size, "take", name, "another world")
    for content in (b"", b"\n", b"missing", b"\xff\xfe\0garbage", b"x" * 5000, b"tag/../..", b"nul\0"):
        yield Case(format, world_size, "point", POINTER, content)
    yield Case(format, world_size, "make_folder", POINTER)
    yield Case(format, world_size, "newer_manifest", FILE_NAME)
    yield Case(format, world_size, "nested_manifest", FILE_NAME)
    header = RANK_0 if format == "regular" else "zero/optimizer_state.pt"
    for key in (*NONSENSE, *(OF_REGULAR if format == "regular" else ())):
        yield Case(format, world_size, "nonsense and list", header, key)
    for key in OF_MODEL.keys() - ({"module"} if format == "universal" else set()):
        yield Case(format, world_size, "nonsense and list", MODEL, key)
    if format == "regular":
        yield Case(format, world_size, "swap", RANK_0, RANK_1)
        yield Case(format, world_size, "swap", RANK_0, MODEL)
        # With a list that agrees with the files: what they say must not contradict each other all the same.
        for do, file, argument in [("swap", RANK_0, RANK_1), ("take", RANK_0, "later"), ("take", RANK_1, "later"),
                                   ("take", RANK_0, "another world"), ("copy", RANK_0, RANK_1),
                                   ("newer_format", RANK_0, None), ("newer_format", RANK_1, None),
                                   ("forget", RANK_0, "step"), ("forget", RANK_1, "param_starts"),
                                   ("remove", RANK_1, None)]:
            yield Case(format, world_size, f"{do} and list", file, argument)
    else:
        yield Case(format, world_size, "swap", "zero/big/fp32.pt", "zero/big/exp_avg.pt")
        for do, file in [("newer_format", "zero/optimizer_state.pt"), ("forget", "zero/optimizer_state.pt"),
                         ("remove", "zero/big/exp_avg.pt"), ("remove", "zero/big/fp32.pt"),
                         ("garbage", "zero/optimizer_state.pt")]:
            yield Case(format, world_size, f"{do} and list", file, "rules" if do == "forget" else None)


CASES = [*cases("regular", 1, 20), *cases("regular", 2, 30), *cases("universal", 1, 20), *cases("universal", 2, 30)]


def offset(path, region, rng):
    """The offset of a byte of ``path`` in a part of the archive that it is; of any byte, if it is none."""
    size = path.stat().st_size
    if path.suffix != ".pt" or region == "anywhere":
        return rng.randrange(size)
    with ZipFile(path) as archive:
        entry, directory = rng.choice(archive.infolist()), archive.start_dir
    raw = path.read_bytes()
    name, extra = (int.from_bytes(raw[entry.header_offset + at:entry.header_offset + at + 2], "little")
                   for at in (26, 28))
    padding = entry.header_offset + 30 + name
    record = padding + extra
    first, last = {"header": (entry.header_offset, padding), "padding": (padding, record),
                   "record": (record, record + entry.file_size), "directory": (directory, size)}[region]
    return rng.randrange(first, last) if first < last else rng.randrange(size)


class Damage:
    """Puts a folder right before, and does to it afterwards, what a case says. Files are replaced, never written to."""

    def __init__(self, root):
        self.root, self.good = root, {"regular": root / "run" / "tag", "universal": root / "run" / "tag_universal"}

    def __call__(self, case):
        """Do it; returns names of which the error must have one: a file, or a pointer, or the folder it names."""
        self.load_dir = self.root / "damaged"
        shutil.rmtree(self.load_dir, ignore_errors=True)
        self.folder = self.load_dir / self.good[case.format].name
        shutil.copytree(self.good[case.format], self.folder)
        self.replace(self.load_dir / POINTER, self.folder.name.encode())
        path, rng = (self.load_dir if case.file == POINTER else self.folder) / case.file, random.Random(str(case))
        do, _, then_list = case.do.partition(" and ")
        getattr(self, do)(path, case, rng)
        if then_list:
            (self.folder / FILE_NAME).unlink()
            Manifest.of(self.folder).write(self.folder)
        if do == "point":
            return [str(path), str(self.load_dir / case.argument.decode(errors="replace").strip())]
        if do in ("swap", "copy"):
            return [str(path), str(self.folder / case.argument)]
        if do == "nonsense":
            # All files say the same beside their tensors.
            return [f"{self.folder} is damaged", str(path)]
        # Where files contradict each other, or the list, any of them may be the wrong one.
        return [str(self.folder)] if do == "take" and (then_list or case.file == FILE_NAME) else [str(path)]

    @staticmethod
    def replace(path, content):
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def flip(self, path, case, rng):
        raw, at = bytearray(path.read_bytes()), offset(path, case.argument, rng)
        raw[at] ^= 1 << rng.randrange(8)
        self.replace(path, raw)

    def truncate(self, path, case, rng):
        self.replace(path, path.read_bytes()[:rng.randrange(path.stat().st_size)])

    def insert(self, path, case, rng):
        raw, at = path.read_bytes(), offset(path, case.argument, rng)
        self.replace(path, raw[:at] + rng.randbytes(1) + raw[at:])

    def remove(self, path, case, rng):
        path.unlink()

    def empty(self, path, case, rng):
        self.replace(path, b"")

    def garbage(self, path, case, rng):
        self.replace(path, rng.randbytes(path.stat().st_size))

    def append(self, path, case, rng):
        self.replace(path, path.read_bytes() + b"\0")

    def make_folder(self, path, case, rng):
        path.unlink()
        path.mkdir()

    def take(self, path, case, rng):
        other = {"later": self.root / "run" / "later", "another seed": self.root / "seed" / "tag",
                 "another world": self.root / "world" / "tag"}[case.argument]
        other = other.with_name(other.name + "_universal") if case.format == "universal" else other
        assert (other / case.file).read_bytes() != path.read_bytes(), f"{case}: the two are the same"
        self.replace(path, (other / case.file).read_bytes())

    def swap(self, path, case, rng):
        other = self.folder / case.argument
        one, two = path.read_bytes(), other.read_bytes()
        self.replace(path, two)
        self.replace(other, one)

    def copy(self, path, case, rng):
        self.replace(path, (self.folder / case.argument).read_bytes())

    def point(self, path, case, rng):
        self.replace(path, case.argument)

    def newer_manifest(self, path, case, rng):
        self.replace(path, json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1}).encode())

    def nested_manifest(self, path, case, rng):
        self.replace(path, b"[" * 100_000)

    def newer_format(self, path, case, rng):
        self.edit(path, lambda ours: ours.update(format=regular.FORMAT + 1))

    def forget(self, path, case, rng):
        self.edit(path, lambda ours: ours.pop(case.argument))

    def nonsense(self, path, case, rng):
        key, _, inner = case.argument.partition(".")

        def change(ours, content):
            if inner:
                held = vars(content[key]) if key == "loss_scaler" else ours[key][0]
                held[inner] = NONSENSE[case.argument]
            elif case.file == MODEL:
                content[key] = {**content[key], **OF_MODEL[key]} if key == "module" else OF_MODEL[key]
            else:
                (ours if key in ours else content)[key] = {**NONSENSE, **OF_REGULAR}[key]

        self.edit(path, change, whole=True)

    def edit(self, path, change, *, whole=False):
        content = torch.load(path, weights_only=False)
        # A universal one has an entry of that name for DeepSpeed's stage 3, beside ours.
        inside = content if regular.KEY in content else content.get("optimizer_state_dict", content)
        change(*[inside.get(regular.KEY), inside][:1 + whole])
        path.unlink()
        torch.save(content, path)


class WithBuffer(Net):
    """And a matrix that is large enough for a checksum of its own, and a buffer."""

    def __init__(self, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.big = nn.Parameter(torch.randn(130, 140))
        self.register_buffer("running", torch.randn(12))
        for p in self.parameters():
            nn.init.normal_(p)


def train(engine, num_steps, first=0):
    train_engine(engine, num_steps, first=first)
    engine.module.running += first + dist.get_world_size()


def started(**kwargs):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 40}}
    return start(WithBuffer(**kwargs), ds_config(scheduler=scheduler, layerwise={"save_universal": True}))


def everything(engine):
    """All that a load may change, copies."""
    optimizer = engine.optimizer
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    masters = {(piece.name, "fp32"): piece.master.clone() for piece in internals.records(engine)}
    counts = (optimizer.step_count, engine.global_steps, engine.global_samples, engine.skipped_steps,
              engine.micro_steps)
    return ({**states(engine), **masters, ("weights", ""): weights(engine.module).clone(),
             ("buffer", ""): engine.module.running.clone()},
            repr((groups, counts, engine.lr_scheduler.state_dict(), engine.get_lr(), optimizer.loss_scale)))


def refusal(engine, load_dir):
    """The message of the load, and what is wrong with it, if anything."""
    try:
        loaded, _ = engine.load_checkpoint(load_dir)
    except LayerWiseError as error:
        return str(error), ""
    except Exception as error:
        return str(error), f"{type(error).__name__}: {error}"
    return "", f"loaded {loaded}"


class TestCorruption(DistributedTest):
    exec_timeout = 900

    @pytest.fixture
    def good(self, class_tmpdir):
        """The files that are damaged, and what else belongs to them but of which one file does not."""
        return made_once(class_tmpdir / "good", [2, 3], self.save)

    def save(self, folder):
        engine = started()
        train(engine, 3)
        run = folder / ("run" if dist.get_world_size() == 2 else "world")
        engine.save_checkpoint(run, tag="tag")
        expected = whole_states(engine)
        if dist.get_world_size() == 3:
            return
        on_rank_0(lambda: torch.save(expected, folder / "expected.pt"))
        train(engine, 1, first=3)
        engine.save_checkpoint(run, tag="later")
        other = started(seed=8)
        train(other, 3, first=20)  # other data, too, which the states are made from
        other.save_checkpoint(folder / "seed", tag="tag")

    @pytest.mark.world_size([1, 2])
    @pytest.mark.parametrize("format", ["regular", pytest.param("universal", marks=pytest.mark.thorough)])
    def test_every_damage_is_refused_by_name(self, format, good, tmp_path):
        todo = [case for case in CASES if (case.format, case.world_size) == (format, dist.get_world_size())]
        on_rank_0(lambda: [shutil.copytree(good / run, tmp_path / run) for run in ("run", "world", "seed")])
        damage, expected, wrong = Damage(tmp_path), torch.load(good / "expected.pt"), []
        engine = started(seed=9)
        train(engine, 1, first=50)
        before, rest_before = everything(engine)
        for i, case in enumerate(todo):
            names = [damage(case)] if dist.get_rank() == 0 else [None]
            dist.broadcast_object_list(names, src=0)
            message, problem = refusal(engine, tmp_path / "damaged")
            if not problem and not any(name in message for name in names[0]):
                problem = f"does not name {names[0]}: {message}"
            after, rest_after = everything(engine)
            if rest_after != rest_before or any(not torch.equal(after[key], value) for key, value in before.items()):
                problem += " and changed the engine"
                before, rest_before = after, rest_after
            if problem:
                wrong.append(f"{case}: {problem}")
            if i % 10 == 9 or i + 1 == len(todo):
                engine.load_checkpoint(damage.good[format].parent, tag=damage.good[format].name)
                assert_equal_states(whole_states(engine), expected, case)
                train(engine, 1, first=50 + i)
                before, rest_before = everything(engine)
            dist.barrier()
        assert not wrong, "\n".join(wrong)


def test_there_are_at_least_two_hundred_different_ones():
    assert len(set(CASES)) == len(CASES) >= 200
    kinds = Counter(case.do.partition(" and ")[0] for case in CASES)
    assert kinds["flip"] >= 100 and kinds["truncate"] >= 30 and kinds["insert"] >= 16
    assert {case.file for case in CASES} == {*FILES["regular"], *FILES["universal"], POINTER}
    assert Path(FILE_NAME).suffix == ".json"
