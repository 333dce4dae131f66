"""Random events from a seed: saves, loads, kills, faults of disks, damage; a plain twin is compared after each.

    python tests/chaos.py --seed 1 --events 500
    python tests/chaos.py --seed 1 --events 300 --meshes
    python tests/chaos.py --seed 1000 --events 1000 --campaign 5     # 200 models of five events each
    python tests/chaos.py --seed 1 --first 51 --until 73 --keep FOLDER

A campaign is a model that is trained from its first step on, with checkpoints in one folder that all ranks share, or in
one per node; a run is several campaigns. Ranks are forks that obey commands until an event kills them. Then others take
their places: they may be more or fewer, and have another config. After each event every rank's weights, and all masters
and states, are compared with those of the twin after as many steps (:mod:`tests.support.reference`, without ranks and
buffers), and, to the bit, with the engine's own values from before. Gradients are whole numbers, so that every number
of ranks and of micro-batches makes the same sums.

The driver knows the possible results of each event. A killed save is there or not; if it is not, the one before it is.
A load that fails has changed nothing. A damaged file is refused, or does not matter. If one rank raises, all do.

Each event is one line. The last line counts the events, those that differed, and those that hung; each of these ends
its campaign. The exit code is 1 if there were any. This is a tool; ``tests/distributed/checkpoint/test_chaos.py`` runs
a short one.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from tests.support import chaos_ranks
from tests.support.auto_ep import section
from tests.support.chaos_ranks import UNUSED, Chaotic
from tests.support.harness import _import_what_engines_import, free_port
from tests.support.reference import Recipe, Reference, trainable, whole_number_gradients
from tests.support.training import MATRICES, VARIANTS, ds_config

#: Samples of each step, dealt to ranks and micro-batches.
UNITS = 8
#: The largest relative difference from the twin, of the norm of a tensor, after many steps of float32 products in
#: another order.
BOUND = {"fp32": 1e-4, "bf16": 1e-4}
#: Skipped steps of each eleven, and the value of one element of a gradient there.
SICK = {5: float("nan"), 8: float("inf")}


#: Faults by rank; and the answer of each rank, None for a dead one.
Faults = dict[int, dict[str, Any]]
Answers = list[dict[str, Any] | None]


class Difference(Exception):
    """A value is not as it has to be."""


class Hang(Exception):
    """A rank does not answer. The message says where each rank is."""


def sick(step: int) -> float:
    """Return the value of one element of a gradient in this step, NaN or infinite; 0 where all elements are finite."""
    return SICK.get(step % 11, 0.0)


class Twin:
    """The plain run, one snapshot a step."""

    def __init__(self, variant: dict[str, bool], precision: str, clip: float) -> None:
        module, dtype = Chaotic(**variant), torch.bfloat16 if precision == "bf16" else torch.float32
        params = {_as_spread(name): p for name, p in trainable(module).items()}
        views = {**MATRICES, **{name: (1, *p.shape)[-3:] for name, p in params.items() if name.startswith("moe.")}}
        recipe = Recipe(matrices={name: view for name, view in views.items() if name in params}, muon_lr=0.02,
                        adam_lr=0.003, weight_decay=0.1, param_dtype=dtype, accum_dtype=dtype, clip=clip, skip=True)
        self.bound = BOUND[precision]
        self.frozen = {name: p.detach().to(dtype).float().numpy().copy() for name, p in module.named_parameters()
                       if _as_spread(name) not in params}
        self._reference = Reference(params, recipe)
        self._steps: list[dict[str, Any]] = []
        self._note()

    def _note(self) -> None:
        twin = self._reference
        self._steps.append({
            "updates": twin.updates, "skipped": sum(twin.overflows),
            "weights": {name: p.float().numpy().copy() for name, p in twin.model_params().items()} | self.frozen,
            "states": {(name, key): value.numpy().flatten().copy() for name, p in twin.params.items()
                       for key, value in {"fp32": p, **twin.state[name]}.items()}})

    def at(self, step: int) -> dict[str, Any]:
        """Return the snapshot after so many steps."""
        while len(self._steps) <= step:
            number = len(self._steps) - 1
            grads: dict[str, Any] = {
                name: sum(whole_number_gradients(name, p.shape, number, unit, 0) for unit in range(UNITS))
                for name, p in self._reference.params.items() if name not in UNUSED}
            if sick(number):
                grads["flat.weight"].view(-1)[5] = sick(number)
            self._reference.step([[grads]])
            self._note()
        return self._steps[step]

    def differences(self, reports: list[dict[str, Any]], step: int) -> list[str]:
        """List the differences of any rank from the twin after so many steps."""
        expected, lines = self.at(step), []
        for rank, report in enumerate(reports):
            lines += [f"rank {rank} has {key} {report[key]}, expected {value}" for key, value in
                      {"step": step, "updates": expected["updates"], "skipped": expected["skipped"]}.items()
                      if report[key] != value]
        lines += self.other_weights(reports, step)
        states = assembled(reports)
        for key, value in expected["states"].items():
            lines += self._far(f"{key[1]} of {key[0]}", states.get(key), value)
        return lines

    def other_weights(self, reports: list[dict[str, Any]], step: int) -> list[str]:
        """List the weights of any rank that differ from the twin's after so many steps."""
        expected, lines = self.at(step)["weights"], []
        for rank, report in enumerate(reports):
            if report["weights"].keys() != expected.keys():
                lines.append(f"rank {rank} has other parameters")
            for name, value in expected.items():
                if not np.array_equal(report["weights"][name], reports[0]["weights"][name]):
                    lines.append(f"rank {rank} has other weights of {name} than rank 0")
                lines += self._far(f"weights of {name} on rank {rank}", report["weights"][name], value,
                                   2**-8 if self.bound and name not in self.frozen and _is_rounded(value) else 0)
        return lines

    def _far(self, what: str, value: Any, expected: Any, more: float = 0.0) -> list[str]:
        if value is None or value.shape != expected.shape:
            return [f"{what} is missing or not whole"]
        far = float(np.linalg.norm((value - expected).astype(np.float64))) / max(
            1e-30, float(np.linalg.norm(expected.astype(np.float64))))
        return [f"{what} is {far:.1e} away"] if not far <= self.bound + more else []


def _as_spread(name: str) -> str:
    """Return the name of a parameter after AutoEP has replaced the layer of experts."""
    return name.replace("moe.router.", "moe.router.gate.")


def _is_rounded(value: Any) -> bool:
    """Return whether all values are bfloat16. One between two of these may be rounded to either."""
    return bool((value.view(np.uint32) & 0xFFFF == 0).all())


def assembled(reports: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Return masters (key ``fp32``) and states by (parameter, key), put together from all ranks."""
    parts: dict[tuple[str, str], list[tuple[int, Any]]] = {}
    for report in reports:
        for name, start, master, state in report["pieces"]:
            for key, value in {"fp32": master, **state}.items():
                parts.setdefault((name, key), []).append((start, value))
    return {key: np.concatenate([value.reshape(-1) for _, value in sorted(found, key=lambda part: part[0])])
            if found[0][1].ndim else np.unique([value for _, value in found]) for key, found in parts.items()}


class Ranks:
    """The forks of a process group, from its beginning until they are killed."""

    def __init__(self, num_ranks: int, local_size: int, limit: float) -> None:
        self.limit, self.num_ranks, self.local_size = limit, num_ranks, local_size
        self.folder = Path(tempfile.mkdtemp(prefix="chaos_ranks_"))
        port, fork = free_port(), multiprocessing.get_context("fork")
        self._connections, self._processes = [], []
        self.traces: list[str] = []
        sys.stdout.flush()
        for rank in range(num_ranks):
            mine, theirs = fork.Pipe()
            process = fork.Process(target=chaos_ranks.serve,
                                   args=(rank, num_ranks, local_size, port, self.folder, theirs))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def ask(self, command: str, arguments: dict[str, Any] | None = None, faults: Faults | None = None,
            *, deadly: str = "") -> Answers:
        """Give all ranks the same command, with their ``faults``. Return their answers, None for a rank that died.

        Args:
            deadly: "all" if the others are killed when a rank dies, "one" if the others are waited for.

        Raises:
            Hang: the ranks are not done in time.
            Difference: a rank died, and nobody has killed it.
        """
        faults, answers = faults or {}, dict[int, Any]()
        for rank, connection in enumerate(self._connections):
            connection.send_bytes(pickle.dumps((command, arguments or {}, faults.get(rank, {}))))
        until = time.monotonic() + self.limit
        while len(answers) < self.num_ranks:
            waiting = [rank for rank in range(self.num_ranks) if rank not in answers]
            wait([self._connections[rank] for rank in waiting], timeout=0.05)
            for rank in waiting:
                is_alive = self._processes[rank].is_alive()
                try:
                    if self._connections[rank].poll(0):
                        answers[rank] = pickle.loads(self._connections[rank].recv_bytes())
                        continue
                except (EOFError, ConnectionResetError):
                    is_alive = False
                if not is_alive:
                    answers[rank] = None
                    if faults.get(rank, {}).get("kind") != "die":
                        raise Difference(f"rank {rank} died in {command} with code {self._processes[rank].exitcode}")
                    if deadly == "all":
                        self.kill()
                        return [answers.get(rank) for rank in range(self.num_ranks)]
            if deadly and None in answers.values():
                # A script ends after an error, or in its next collective, which the others notice.
                for rank in answers:
                    self._kill(rank)
            if time.monotonic() > until and len(answers) < self.num_ranks:
                raise Hang(f"{command}: no answer of {waiting} in {self.limit:g} s\n{self.places(waiting)}")
        self.traces += [f"rank {rank} in {command}:\n{answer['trace']}" for rank, answer in answers.items()
                        if answer and "trace" in answer]
        return [answers[rank] for rank in range(self.num_ranks)]

    def end(self, how: str) -> None:
        """Let the script end on all ranks.

        Raises:
            Hang: a rank does not end.
            Difference: a rank fails.
        """
        for connection in self._connections:
            connection.send_bytes(pickle.dumps(("end", {"how": how}, {})))
        until = time.monotonic() + self.limit
        while any(process.is_alive() for process in self._processes):
            time.sleep(0.02)
            if time.monotonic() > until:
                alive = [rank for rank, process in enumerate(self._processes) if process.is_alive()]
                raise Hang(f"the end of the script, by {how}: {alive} go on after {self.limit:g} s\n"
                           f"{self.places(alive)}")
        codes = [process.exitcode for process in self._processes]
        if any(codes):
            raise Difference(f"scripts end, by {how}, with codes {codes}")

    def places(self, ranks: list[int]) -> str:
        """Return the places of these ranks in the code, in their own words."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(f"rank {rank} is here:\n{(self.folder / f'{rank}.place').read_text()[:6000]}"
                         for rank in range(self.num_ranks) if rank in ranks)

    def kill(self) -> None:
        """End all ranks, and the processes that they have started."""
        for rank in range(self.num_ranks):
            self._kill(rank)
        for process in self._processes:
            process.join()

    def _kill(self, rank: int) -> None:
        for kill in (os.killpg, os.kill):
            try:
                kill(self._processes[rank].pid or 0, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def forget(self) -> None:
        """Kill the ranks and remove their files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class Save:
    """The content that a checkpoint must have."""

    serial: int
    step: int
    done: list[list[int]]
    """Units of the next step that were done after 0, 1, ... micro-batches of it."""
    gas: int
    path: str
    """The history of the run. The same path leads to the same bits."""
    has_object: bool = False


@dataclass
class Options:
    """Settings that may change from one start of the script to the next."""

    ranks: int
    stage: int
    gas: int
    overlap: bool
    bucket_numel: int
    late_weights: bool
    universal: bool
    writer: str
    mesh: int
    """The number of ranks that share a sequence, or over which experts are spread; 1 without."""
    offload: float
    """The share of masters and states in host memory; if it is 1 at stage 3, the weights' cuts are there, too."""

    def __str__(self) -> str:
        more = [name for name, value in (("overlap", self.overlap), ("late weights", self.late_weights),
                                         (f"mesh {self.mesh}", self.mesh > 1),
                                         ("universal", self.universal), (f"offload {self.offload:g}", self.offload))
                if value]
        return ", ".join([f"{self.ranks} ranks, stage {self.stage}, gas {self.gas}",
                          *([f"{self.writer} writer"] if self.writer else []), *more])


@dataclass
class Disk:
    """The content that folders of checkpoints may have."""

    tags: dict[str, set[int]] = field(default_factory=dict)
    """Serial numbers of the saves that may be there, by tag; 0 stands for no save."""
    latest: set[str | None] = field(default_factory=lambda: {None})
    """Tags that may be named as the latest; None for no name at all."""

    def at(self, tag: str) -> set[int]:
        """Return the saves that may be in ``tag``."""
        return self.tags.setdefault(tag, {0})


class Campaign:
    """A model and its events, from its first step to the end of the campaign."""

    def __init__(self, rng: random.Random, root: Path, limit: float, *, meshes: bool = False) -> None:
        self.rng, self.root, self.limit = rng, root, limit
        root.mkdir(parents=True)
        self.kind = rng.choice(["sequences", "experts", "experts"]) if meshes else ""
        self.on_nodes = rng.random() < 0.5 and self.kind != "experts"
        self.local_size = 1 if rng.random() < 0.75 else 2
        self.name_variant = rng.choice(sorted(VARIANTS))
        self.precision = rng.choice(["fp32", "fp32", "bf16"])
        self.clip = rng.choice([0.0, 1.0])
        # A rank on a disk of its own finds no other rank's part, so each must keep its part of the parameters.
        self.bucket_numel = rng.choice([600, 10**9])
        # Stage 3 splits in another way, so ranks on disks of their own keep to it. It takes no parameters without
        # elements.
        self.stages = rng.choice([[1, 2], [3] if self.on_nodes else [1, 2, 3, 3, 3]])
        if self.name_variant == "odd":
            self.stages = [1, 2]
        self.with_objects = rng.random() < 0.3
        self.variant = VARIANTS[self.name_variant]
        if self.kind == "experts":
            self.variant = self.variant | {"has_experts": True}
        self.twin = Twin(self.variant, self.precision, self.clip)
        self.disk, self.saves = Disk(), dict[int, Save]()
        self.outside: dict[str, set[int]] = {}
        self.bits: dict[str, str] = {}
        self.pending: tuple[str, int, bool] | None = None
        self.ranks: Ranks | None = None
        self.options = self._options()
        self.step, self.micro, self.done, self.path = 0, 0, list[list[int]]([[]]), ""
        self.said: list[str] = []

    def __str__(self) -> str:
        where = f"{2 if self.on_nodes else 1} disk{'s' * self.on_nodes}"
        kind = self.kind or "no mesh"
        return f"{where}, {kind}, {self.name_variant}, {self.precision}, clip {self.clip:g}; {self.options}"

    # Actions of the script

    def _options(self) -> Options:
        rng = self.rng
        writer = "" if self.with_objects else rng.choice(["", "", "python", "decoupled", "decoupled", "decoupled"])
        ranks = 2 * self.local_size if self.on_nodes else rng.choice([2, 2, 2, 2, 1, 3, 4])
        stage = rng.choice(self.stages)
        mesh = rng.choice([size for size in (1, 2, 4) if ranks % size == 0]) if self.kind else 1
        return Options(
            mesh=mesh, ranks=ranks, stage=stage, gas=rng.choice([1, 2, 4]), overlap=rng.random() < 0.5,
            bucket_numel=self.bucket_numel if self.on_nodes else rng.choice([600, 600, 10**9]),
            late_weights=stage < 3 and rng.random() < 0.3,
            universal=stage < 3 and not self.on_nodes and rng.random() < 0.25, writer=writer,
            offload=rng.choice([0, 0, 0.5, 1]))

    @property
    def num_ranks(self) -> int:
        return self.options.ranks

    @property
    def num_batches(self) -> int:
        """The number of ranks, or groups of ranks, with batches of their own."""
        return self.num_ranks // (self.options.mesh if self.kind == "sequences" else 1)

    def start(self) -> None:
        """Start the script afresh: at step 0, with any content on disks."""
        if self.ranks is not None:
            self.ranks.forget()
        options = self.options
        checkpoint: dict[str, Any] = {"use_node_local_storage": self.on_nodes}
        if options.writer:
            checkpoint["writer"] = {"type": "PYTHON", "decoupled": options.writer == "decoupled",
                                    "data_parallel": "replica"}
        config = ds_config(gas=options.gas, clip=self.clip, bucket_numel=options.bucket_numel, overlap=options.overlap,
                           stage=options.stage, checkpoint=checkpoint,
                           layerwise={"save_universal": options.universal,
                                      "overlap_param_gather": options.late_weights},
                           **({"bf16": {"enabled": True}} if self.precision == "bf16" else {}))
        if options.offload:
            config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": options.offload}
            if options.stage == 3 and options.offload == 1:
                config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        groups = {}
        if self.kind == "experts":
            config["expert_parallel"] = section(options.mesh, moe_layer_pattern="moe")
        elif options.mesh > 1:
            groups["mesh_param"] = (self.num_ranks // options.mesh, options.mesh)
        local_size = self.local_size if self.on_nodes else self.num_ranks
        self.ranks = Ranks(self.num_ranks, local_size, self.limit)
        self.pending = None
        self.step, self.micro, self.done, self.path = 0, 0, [[]], ""
        self.all_well(self.ranks.ask("start", {"variant": self.variant, "config": config, "local_rank": 0,
                                               "groups": groups}))

    def folders(self) -> list[str]:
        """Return by rank the folder where it saves."""
        if not self.on_nodes:
            return [str(self.root / "saved")] * self.num_ranks
        return [str(self.root / f"node {rank // self.local_size}" / "saved") for rank in range(self.num_ranks)]

    def ask(self, command: str, arguments: dict[str, Any] | None = None, faults: Faults | None = None,
            deadly: str = "") -> Answers:
        assert self.ranks is not None
        return self.ranks.ask(command, arguments, faults, deadly=deadly)

    def all_well(self, answers: Answers) -> list[dict[str, Any]]:
        """Return the answers. None may be an error."""
        for rank, answer in enumerate(answers):
            if answer is None or "raised" in answer:
                raise Difference(f"rank {rank} raised: {answer and answer['raised']}")
        return [answer for answer in answers if answer is not None]

    def alike(self, answers: Answers) -> str:
        """Return the error that all ranks have raised; empty if none has.

        Raises:
            Difference: some ranks have raised, and others not.
        """
        raised = [answer.get("raised", "") for answer in answers if answer is not None]
        if any(raised) and not all(raised):
            raise Difference(f"ranks {[rank for rank, what in enumerate(raised) if what]} raised and the others did "
                             f"not: {next(filter(None, raised))}")
        return max(raised, key=len, default="")

    def deal(self, done: list[int], micro: int) -> list[list[list[int]]]:
        """Deal the units that are not done yet to the micro-batches from ``micro`` on, and there to ranks."""
        ranks, left = self.num_ranks, self.options.gas - micro
        dealt: list[list[list[int]]] = [[[] for _ in range(ranks)] for _ in range(left)]
        for index, unit in enumerate(unit for unit in range(UNITS) if unit not in done):
            slot = index % (left * ranks)
            dealt[slot // ranks][slot % ranks].append(unit)
        return dealt

    def micro_batches(self, number: int) -> list[dict[str, Any]]:
        """Return the next ``number`` micro-batches, of any steps."""
        dealt: list[dict[str, Any]] = []
        step, micro, done = self.step, self.micro, self.done[-1]
        while len(dealt) < number:
            for units in self.deal(done, micro):
                dealt.append({"step": step, "units": units, "sick": sick(step),
                              "way": self.rng.choice(["engine", "engine", "loss", "scale"]),
                              "factor": float(self.options.gas * self.num_batches)})
            step, micro, done = step + 1, 0, []
        return dealt[:number]

    def took(self, micro_batches: list[dict[str, Any]]) -> None:
        """Count micro-batches that the engine has trained on."""
        for micro_batch in micro_batches:
            self.done.append(self.done[-1] + [unit for units in micro_batch["units"] for unit in units])
            self.micro += 1
            if self.micro == self.options.gas:
                self.path = hashlib.sha256(f"{self.path} {self.num_ranks}".encode()).hexdigest()
                self.step, self.micro, self.done = self.step + 1, 0, [[]]
                self.settle()

    def settle(self) -> None:
        """Note that the save which went on beside the training is over."""
        if self.pending is not None:
            tag, serial, latest = self.pending
            self.pending = None
            self._is_there(tag, serial, latest)

    def _is_there(self, tag: str, serial: int, latest: bool) -> None:
        self.disk.tags[tag] = {serial}
        if self.options.universal:
            self.disk.tags[f"{tag}_universal"] = {serial}
        if latest:
            self.disk.latest = {tag}

    def _may_be_there(self, tag: str, serial: int, latest: bool) -> None:
        self.disk.at(tag).add(serial)
        if self.options.universal:
            self.disk.at(f"{tag}_universal").add(serial)
        if latest:
            self.disk.latest = self.disk.latest | {tag}

    def new_save(self, extra: list[list[int]] | None = None) -> Save:
        """Return a save that begins now; ``extra`` has the units of the current micro-batch."""
        done = [*self.done, *([self.done[-1] + [unit for units in extra for unit in units]] if extra else [])]
        save = Save(len(self.saves) + 1, self.step, done, self.options.gas, self.path,
                    self.with_objects and self.rng.random() < 0.5)
        self.saves[save.serial] = save
        return save

    def train(self, number: int) -> None:
        """Train on so many micro-batches."""
        batches = self.micro_batches(number)
        self.all_well(self.ask("train", {"micro_batches": batches}))
        self.took(batches)

    def finish_step(self) -> None:
        """Train to the end of a step. A save beside the training ends there."""
        self.train(self.options.gas - self.micro)

    def some_micro_batches(self, most: int = 3) -> int:
        """Return a random number of micro-batches, up to ``most`` steps."""
        return self.rng.randint(1, most * self.options.gas)

    def save(self, faults: Faults | None = None, deadly: str = "", then_train: int | None = 0) -> str:
        """Save at the current point of the engine, or within the next micro-batch; return the error.

        Args:
            then_train: train on so many micro-batches after that, with the same faults; None for as many as are left of
                the step, and one more. A save beside the training ends at the end of a step.
        """
        rng = self.rng
        if rng.random() < 0.6:
            self.train(self.some_micro_batches(2))
        if then_train is None:
            then_train = self.options.gas - self.micro + 1
        tag = rng.choice(["a", "b", None])
        latest = rng.random() < 0.9
        within = rng.random() < 0.3
        batches = self.micro_batches(1 + then_train) if within or then_train else []
        save = self.new_save(batches[0]["units"] if within else None)
        name = f"global_step{self.step}" if tag is None else tag
        how = {"folders": self.folders(), "tag": tag, "serial": save.serial, "latest": latest,
               "with_object": save.has_object}
        before = self.pending
        self.pending = None
        self._may_be_there(name, save.serial, latest)
        self.said.append(f"save {save.serial} as {name}, step {self.step}+{self.micro}")
        if within:
            at = rng.choice(["after forward", "after backward"])
            self.said.append(at)
            batches = [{**batches[0], "save": {"at": at, "how": how}}, *batches[1:]]
            answers = self.ask("train", {"micro_batches": batches}, faults, deadly)
            raised = self.verdict(answers, faults)
            if raised:
                return raised
            # The script goes on after a save that has failed.
            raised = self.verdict([answer and {**answer, **answer["value"]} for answer in answers], faults)
            if not raised:
                # The save that was pending is over, too: the new one has waited for it.
                self._over(before, name, save.serial, latest)
            self.took(batches)
            return raised
        raised = self.verdict(self.ask("save", how, faults, deadly), faults)
        if raised:
            return raised
        self._over(before, name, save.serial, latest)
        if then_train:
            raised = self.verdict(self.ask("train", {"micro_batches": batches}, faults, deadly), faults)
            if not raised:
                self.took(batches)
        return raised

    def _over(self, before: tuple[str, int, bool] | None, tag: str, serial: int, latest: bool) -> None:
        """Note that a save has returned. The save before it is whole, and this one, too, unless it goes on."""
        if before is not None:
            self._is_there(*before)
            self._may_be_there(tag, serial, latest)
        if self.options.writer == "decoupled":
            self.pending = (tag, serial, latest)
        else:
            self._is_there(tag, serial, latest)

    def verdict(self, answers: Answers, faults: Faults | None) -> str:
        """Return the error of all ranks, "killed" if one is dead, empty if there is none."""
        faults = faults or {}
        if None in answers:
            return "killed"
        raised = self.alike(answers)
        if raised and not any(answer and answer["fired"] for rank, answer in enumerate(answers) if rank in faults):
            raise Difference(f"nothing was wrong, and ranks raised: {raised}")
        return raised

    def candidates(self, tag: str | None) -> set[int]:
        """Return the saves of which one has to be loaded; 0 stands for none."""
        return set().union(*(self.disk.at(name) if name else {0} for name in
                             (self.disk.latest if tag is None else {tag})))

    def load(self, tag: str | None, faults: Faults | None = None, *, may_fail: bool = False,
             deadly: str = "") -> str:
        """Load the latest checkpoint or a tag, and go on from there; return the error.

        Args:
            may_fail: whether a file was damaged, so that an error is right.
        """
        candidates = self.candidates(tag)
        answers = self.ask("load", {"folders": self.folders(), "tag": tag}, faults, deadly)
        if None in answers:
            return "killed"
        raised = self.alike(answers)
        fired = any(answer and answer["fired"] for rank, answer in enumerate(answers) if rank in (faults or {}))
        if not raised and self.pending is not None:
            # The save ended before the load began to look for files.
            self.settle()
            candidates = self.candidates(tag)
        if raised and fired and self.pending is not None:
            # The save has ended first, and the error may be its own.
            self._may_be_there(*self.pending)
            self.pending = None
        if raised:
            # A tag that may not be there need not be found. The latest must be found: saves exist for that.
            nothing = 0 in candidates and (tag is not None or candidates == {0})
            if not (fired or may_fail or nothing):
                raise Difference(f"{tag or 'the latest'} is lost ({sorted(candidates)} may be there): {raised}")
            return raised
        found = [answer["value"] for answer in answers if answer]
        if any(each != found[0] for each in found):
            raise Difference(f"ranks have loaded different checkpoints: {found}")
        loaded, serial = found[0]["tag"], found[0]["serial"]
        if loaded is None:
            if 0 not in candidates or (tag is None and None not in self.disk.latest):
                raise Difference(f"{tag or 'the latest'} is lost: nothing was found, {sorted(candidates)} may be there")
            return "nothing there"
        if tag is None and loaded not in self.disk.latest or serial not in self.disk.at(loaded):
            raise Difference(f"{loaded} was loaded with save {serial}, and {sorted(candidates)} may be there, in "
                             f"{self.disk.latest if tag is None else tag}")
        self.disk.tags[loaded] = {serial}
        self.go_on_from(self.saves[serial])
        self.said.append(f"loaded {serial} from {loaded}")
        return ""

    def go_on_from(self, save: Save, *, whole: bool = False) -> None:
        """Go on from the save that was loaded."""
        self.step, self.path = save.step, save.path
        micro = 0 if whole else self.reports()[0]["micro"]
        if micro >= len(save.done):
            raise Difference(f"save {save.serial} goes on after {micro} micro-batches, and had {len(save.done) - 1}")
        self.micro, self.done = micro, save.done[:micro + 1]

    def reports(self) -> list[dict[str, Any]]:
        """Return each rank's position and values."""
        return [answer["value"] for answer in self.all_well(self.ask("report"))]

    def check(self) -> None:
        """Compare all ranks with the twin, and with the values from before.

        Raises:
            Difference: a value is otherwise.
        """
        reports = self.reports()
        if wrong := [f"rank {rank} is in micro-batch {report['micro']}, expected {self.micro}"
                     for rank, report in enumerate(reports) if report["micro"] != self.micro]:
            raise Difference("; ".join(wrong))
        if wrong := self.twin.differences(reports, self.step):
            more = f" and {len(wrong) - 4} more" * (len(wrong) > 4)
            raise Difference(f"step {self.step}: {'; '.join(wrong[:4])}{more}")
        states = assembled(reports)
        digest = hashlib.sha256(b"".join(states[key].tobytes() for key in sorted(states))).hexdigest()
        if self.bits.setdefault(self.path, digest) != digest:
            raise Difference(f"step {self.step} has other bits than when this run was there before")

    def restart(self, tag: str | None = None) -> str:
        """Start the script again, perhaps with another config, and load."""
        self.options = self._options()
        self.said.append(f"restart: {self.options}")
        self.start()
        return self.load(tag)

    def die(self, deadly: str, command: Callable[[Faults, str], str]) -> str:
        """Let a random rank die somewhere in ``command``."""
        victim = self.rng.randrange(self.num_ranks)
        if self.rng.random() < 0.5:
            # A save does most of its work in the first hundreds of calls.
            at, name = int(self.rng.choice([30, 150, 400, 1200]) * self.rng.random()), ""
        else:
            at, name = self.rng.randrange(4), self.rng.choice(MOMENTS)
        self.said.append(f"rank {victim} dies at {name or 'event'} {at}, {deadly}")
        return command({victim: {"kind": "die", "at": at, "in": name}}, deadly)

    # Events

    def event_train(self) -> None:
        self.train(self.some_micro_batches())

    def event_save(self) -> None:
        self.save()
        if self.rng.random() < 0.5:
            self.train(self.some_micro_batches(1))

    def event_load(self) -> None:
        self.load(self.some_tag())

    def some_tag(self) -> str | None:
        """Return None for the latest, or any tag that may be there."""
        tags = sorted(tag for tag, serials in self.disk.tags.items() if serials != {0})
        return self.rng.choice(tags) if tags and self.rng.random() < 0.5 else None

    def event_restart(self) -> None:
        """Kill all ranks between two events."""
        self.train(self.some_micro_batches(1))
        self.restart(self.some_tag())

    def event_end(self) -> None:
        """End the script right after a save. Its last save is there."""
        self.save()
        how = self.rng.choice(["leave", "return", "destroy"])
        self.said.append(f"ends by {how}")
        assert self.ranks is not None
        self.ranks.end(how)
        self.settle()
        self.restart()

    def event_killed_save(self) -> None:
        then = self.rng.randint(0, self.options.gas) if self.options.writer == "decoupled" else 0
        died = self.die(self.rng.choice(["all", "one"]),
                        lambda faults, deadly: self.save(faults, deadly, then_train=then))
        self.said.append(died or "survived")
        self.restart(self.some_tag() if self.rng.random() < 0.3 else None)

    def event_killed_load(self) -> None:
        died = self.die(self.rng.choice(["all", "one"]),
                        lambda faults, deadly: self.load(self.some_tag(), faults, deadly=deadly))
        self.said.append(died or "survived")
        self.restart()

    def event_killed_step(self) -> None:
        batches = self.micro_batches(self.some_micro_batches())
        died = self.die(self.rng.choice(["all", "one"]), lambda faults, deadly: self.verdict(
            self.ask("train", {"micro_batches": batches}, faults, deadly), faults))
        if not died:
            self.took(batches)
        self.said.append(died or "survived")
        self.restart()

    def disk_fault(self, kind: str) -> dict[str, Any]:
        """Return an error of the disk of one rank, somewhere in its next command."""
        rng = self.rng
        error = rng.choice(["EIO", "ESTALE", "EACCES"] if kind != "write" else ["ENOSPC", "EACCES", "EIO", "EROFS"])
        most = {"read": 8, "write": 12, "stat": 25}[kind]
        fault = {"kind": kind, "number": rng.randrange(most), "error": error, "stays": rng.random() < 0.4,
                 "folder": str(self.root), "name": ""}
        if rng.random() < 0.4:
            fault |= {"name": rng.choice(["latest", "manifest", ".incomplete", "model_states"]),
                      "number": rng.randrange(3)}
        self.said.append(f"{error} at {kind} {fault['number']} of {fault['name'] or 'any file'}"
                         f"{' and on' if fault['stays'] else ''}")
        return {"kind": "disk", "disk": fault}

    def event_failed_save(self) -> None:
        """Let the disk of one rank fail in a save. All ranks give the save up; the save before is there."""
        rng = self.rng
        victim = rng.randrange(self.num_ranks)
        kinds = ["disk", "disk", "full"]
        if self.options.writer == "decoupled":
            kinds += ["full for the writer", "no writer"]
        kind = rng.choice(kinds)
        if kind == "disk":
            fault = self.disk_fault(rng.choice(["write", "write", "read", "stat"]))
        else:
            fault = {"kind": kind, "bytes": rng.choice([0, 500, 4000, 20000])}
            self.said.append(f"{kind}, {fault['bytes']} bytes")
        self.said.append(f"on rank {victim}")
        beside = self.options.writer == "decoupled"
        raised = self.save({victim: fault}, then_train=None if beside else 0)
        self.said.append(raised[:100] or "went well")
        if beside and raised:
            # DeepSpeed decides what the engine can do without its writer.
            self.restart()
        elif raised:
            self.after_an_error()

    def after_an_error(self) -> None:
        """Check that the engine is where it was. Only the engine knows how much it still has of an unfinished step."""
        micro = self.reports()[0]["micro"]
        if micro >= len(self.done):
            raise Difference(f"after an error the engine is in micro-batch {micro}, before in {self.micro}")
        self.micro, self.done = micro, self.done[:micro + 1]
        self.check()
        if self.rng.random() < 0.5:
            self.train(self.some_micro_batches(1))
            self.check()
        self.load(None)

    def event_failed_load(self) -> None:
        """Let one rank fail to read a checkpoint that all load. Nothing changes, and the next load works."""
        rng = self.rng
        self.train(self.some_micro_batches(1))
        victim = rng.randrange(self.num_ranks)
        fault = {"kind": "class"} if self.with_objects and rng.random() < 0.4 else \
            self.disk_fault(rng.choice(["read", "read", "stat"]))
        self.said.append(f"{fault['kind']} on rank {victim}")
        raised = self.load(self.some_tag(), {victim: fault})
        self.said.append(raised[:100] or "went well")
        if raised:
            self.after_an_error()

    def event_damage(self) -> None:
        """Damage a file of a checkpoint. The load refuses it, or the damage does not matter."""
        rng = self.rng
        self.finish_step()
        places = sorted({Path(folder) for folder in self.folders()})
        files = sorted(path for place in places for tag, found in self.disk.tags.items() if 0 not in found
                       and len(found) == 1 for path in (place / tag).rglob("*") if path.is_file())
        if not files:
            self.save()
            return
        path = rng.choice(files)
        content = path.read_bytes()
        how = rng.choice(["bit", "bit", "bit", "cut", "gone"])
        if how == "gone":
            path.unlink()
        elif how == "cut" or not content:
            path.write_bytes(content[:rng.randrange(len(content) + 1)])
        else:
            at = rng.randrange(len(content))
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1:])
        place = next(place for place in places if path.is_relative_to(place))
        tag = path.relative_to(place).parts[0]
        self.said.append(f"{how} in {path.relative_to(place)}")
        raised = self.load(tag, may_fail=True)
        self.said.append(raised[-100:] or "went well")
        self.check_after(raised)
        path.write_bytes(content)
        self.load(tag)

    def check_after(self, raised: str) -> None:
        """Compare with the twin after a load that may have failed."""
        if raised:
            micro = self.reports()[0]["micro"]
            self.micro, self.done = micro, self.done[:micro + 1]
        self.check()

    def event_lost_node(self) -> None:
        """Remove the folder of a node. Nothing is loaded anywhere until it is back."""
        self.settle()
        place = self.root / f"node {self.rng.randrange(2)}"
        if None in self.disk.latest or not place.exists():
            self.save()
            return
        self.finish_step()
        away = place.rename(place.with_name("away"))
        tag = self.some_tag()
        self.said.append(f"{place.name} is away, load {tag}")
        raised = self.load(tag, may_fail=True)
        self.said.append(raised[:100])
        if not raised:
            raise Difference(f"a checkpoint without the part of {place.name} was loaded")
        self.check_after(raised)
        if place.exists():
            shutil.rmtree(place)
        away.rename(place)
        self.load(None)

    def event_beside(self) -> None:
        """Run an evaluation, or copy the model, at any moment."""
        # A copy would have the groups of AutoEP's layers.
        if self.rng.random() < 0.5 or self.kind == "experts":
            self.all_well(self.ask("evaluate"))
        elif self.options.stage < 3 and not all(answer["value"] for answer in self.all_well(self.ask("spoil_a_copy"))):
            raise Difference("a copy of the module has other weights")
        self.train(1)

    def event_broken_pass(self) -> None:
        """Let a backward pass of some ranks end early, in any micro-batch of a step. No rank takes that step, and all
        go on without its gradients."""
        rng = self.rng
        if rng.random() < 0.5:
            self.train(self.some_micro_batches(1))
        if self.options.stage == 3:
            # Before its second pass DeepSpeed compares modules over ranks, of which one may wait elsewhere.
            self.finish_step()
            self.train(1)
        batches = self.micro_batches(self.options.gas - self.micro)
        at = rng.randrange(len(batches))
        victims = sorted(rng.sample(range(self.num_ranks), rng.randint(1, self.num_ranks)))
        param = rng.choice(["embed.weight", "square.weight", "conv.weight", "head.weight"])
        self.said.append(f"the pass of ranks {victims} ends at {param} in micro-batch {self.micro + at}")
        answers = self.ask("train_broken", {"micro_batches": batches, "at": at, "victims": victims, "param": param})
        raised = self.alike(answers)
        if not raised:
            raise Difference("a step was taken with the gradients of half a pass")
        self.said.append(raised[:100])
        self.all_well(self.ask("drop"))
        # Only the engine knows how many micro-batches of the step are left.
        self.micro = self.reports()[0]["micro"]
        self.done = [[] for _ in range(self.micro + 1)]
        self.check()
        self.finish_step()

    def event_swap(self) -> None:
        """Swap averages in and out, in any micro-batch."""
        if self.rng.random() < 0.5:
            self.train(self.some_micro_batches(1))
        dtype = self.rng.choice([torch.float32, torch.bfloat16, torch.float64])
        self.said.append(f"averages in {dtype} swapped in and out, step {self.step}+{self.micro}")
        self.all_well(self.ask("swap", {"dtype": dtype}))
        self.train(self.some_micro_batches(1))

    def event_weights_alone(self) -> None:
        """Load the weights of a save alone, and train on; then go on from the whole save."""
        rng = self.rng
        self.finish_step()
        self.settle()
        sure = sorted(tag for tag, serials in self.disk.tags.items() if 0 not in serials and len(serials) == 1)
        if not sure:
            self.save()
            return
        tag = rng.choice(sure)
        options = rng.choice([{"load_module_only": True}, {"load_optimizer_states": False}])
        self.said.append(f"weights of {tag}, {', '.join(options)}")
        self.all_well(self.ask("load_weights", {"folders": self.folders(), "tag": tag, "options": options}))
        serial, = self.disk.tags[tag]
        if wrong := self.twin.other_weights(self.reports(), self.saves[serial].step):
            raise Difference(f"weights alone of {tag}: {'; '.join(wrong[:4])}")
        if rng.random() < 0.5:
            self.all_well(self.ask("train", {"micro_batches": self.micro_batches(self.options.gas)}))
        self.load(tag)

    def event_outside(self) -> None:
        """Save without the engine: one file, and torch.distributed.checkpoint. Load it at once or later."""
        rng = self.rng
        kind = rng.choice(["one_file", "sharded"])
        path = self.root / kind
        if self.options.stage == 3:
            return
        if kind not in self.outside or rng.random() < 0.5:
            if self.micro:
                self.finish_step()
            save = self.new_save()
            if kind == "sharded":
                shutil.rmtree(path, ignore_errors=True)
            self.all_well(self.ask(f"save_{kind}", {"path": str(path)}))
            self.outside[kind] = {save.serial}
            self.said.append(f"save {save.serial} as {kind}")
            self.train(self.some_micro_batches())
        faults = {rng.randrange(self.num_ranks): self.disk_fault("read")} if rng.random() < 0.3 else {}
        answers = self.ask(f"load_{kind}", {"path": str(path)}, faults)
        raised = self.alike(answers)
        if raised and not any(answer and answer["fired"] for answer in answers):
            raise Difference(f"{kind} is lost: {raised}")
        self.said.append(f"load {kind}: {raised[:80] or 'went well'}")
        if raised:
            self.check_after(raised)
            return
        save, = (self.saves[serial] for serial in self.outside[kind])
        self.go_on_from(save, whole=True)
        expected = self.twin.at(save.step)
        self.all_well(self.ask("count", {"step": save.step, "skipped": expected["skipped"]}))


#: Names of calls of the package and of the system. A save is killed at these, or at any moment.
MOMENTS = ["begin", "sign", "claim", "seal", "publish", "publish", "_exchange", "rename", "replace", "point", "point",
           "remove", "recover", "finish_save", "_listed", "check_arrived"]

#: Weights of the events.
EVENTS = {"train": 8, "save": 14, "load": 8, "restart": 7, "end": 6, "killed_save": 18, "killed_load": 4,
          "killed_step": 4, "failed_save": 16, "failed_load": 14, "damage": 8, "lost_node": 4, "beside": 3,
          "outside": 5, "broken_pass": 6, "swap": 5, "weights_alone": 6}

class Run:
    """All campaigns of a seed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root = Path(tempfile.mkdtemp(prefix="chaos_", dir=options.folder))
        self.counts: Counter[str] = Counter()
        self.campaign: Campaign | None = None
        self.first = 0

    def run(self) -> int:
        """Let all events happen; return how many of them went wrong."""
        began = time.monotonic()
        first, number = self.options.first - 1, 0
        try:
            for number in range(first, self.options.until or self.options.events):
                if time.monotonic() - began > self.options.seconds:
                    break
                if (number - first) % self.options.campaign == 0:
                    self.end_campaign()
                self.event(number)
            else:
                number += 1
        finally:
            self.end_campaign()
            shutil.rmtree(self.root, ignore_errors=True)
        took = time.monotonic() - began
        print(f"{number - first} events, {self.counts['difference']} differences, {self.counts['hang']} hangs, "
              f"in {took:.0f} s", flush=True)
        return self.counts["difference"] + self.counts["hang"]

    def event(self, number: int) -> None:
        """Let the next event happen, in the current campaign or a new one."""
        rng, began = random.Random(f"{self.options.seed} {number}"), time.monotonic()
        kind, outcome, more = "begin", "ok", ""
        try:
            if self.campaign is None:
                folder = self.root / f"from {number + 1}"
                print(f"{number + 1:4} a campaign begins", flush=True)
                self.campaign, self.first = Campaign(
                    rng, folder, self.options.limit, meshes=self.options.meshes), number
                print(f"     {self.campaign}", flush=True)
                self.campaign.start()
            campaign = self.campaign
            campaign.rng, campaign.said = rng, []
            kind, = rng.choices(list(EVENTS), [
                0 if kind == ("outside" if campaign.on_nodes else "lost_node") else weight
                for kind, weight in EVENTS.items()])
            getattr(campaign, f"event_{kind}")()
            campaign.check()
        except Difference as wrong:
            outcome, more = "DIFFERENCE", str(wrong)
            self.counts["difference"] += 1
        except Hang as wrong:
            outcome, more = "HANG", str(wrong)
            self.counts["hang"] += 1
        campaign = self.campaign
        place = f"{campaign.step}+{campaign.micro}"
        print(f"{number + 1:4} {time.monotonic() - began:5.1f} s {kind:12} {place:>6} {'; '.join(campaign.said)}"
              f"{f' {outcome}: {more}' * bool(more)}", flush=True)
        if outcome != "ok":
            self.went_wrong(number, campaign)

    def went_wrong(self, number: int, campaign: Campaign) -> None:
        """Print how to repeat the event, keep its files, and give the campaign up."""
        print(f"     again: python tests/chaos.py --seed {self.options.seed} --first {self.first + 1} "
              f"--until {number + 1}\n     {campaign}", flush=True)
        if campaign.ranks is not None and self.options.keep:
            kept = Path(self.options.keep) / f"seed {self.options.seed} event {number + 1}"
            campaign.ranks.kill()
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(campaign.root, kept / "disk", symlinks=True)
            (kept / "errors").write_text("\n".join(campaign.ranks.traces))
        self.end_campaign()

    def end_campaign(self) -> None:
        """Kill the ranks of the campaign and remove its folders."""
        if self.campaign is not None:
            if self.campaign.ranks is not None:
                self.campaign.ranks.forget()
            shutil.rmtree(self.campaign.root, ignore_errors=True)
        self.campaign = None


def main() -> NoReturn:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--first", type=int, default=1, help="begin a campaign at this event, as a failure names it")
    parser.add_argument("--until", type=int, help="the last event, as a failure names it")
    parser.add_argument("--campaign", type=int, default=25, help="events after which the next campaign begins")
    parser.add_argument("--meshes", action="store_true", help="share sequences between ranks, or spread experts")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no event after so long")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a command hangs")
    parser.add_argument("--folder", help="where to save; a temporary folder by default")
    parser.add_argument("--keep", help="where to copy the disks and the logs of what went wrong")
    options = parser.parse_args()
    multiprocessing.set_start_method("fork")  # also for DeepSpeed's decoupled writers, in milliseconds
    torch.set_num_threads(1)
    _import_what_engines_import()
    # The handler lets open contexts end, which removes folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    sys.exit(1 if Run(options).run() else 0)


if __name__ == "__main__":
    main()
