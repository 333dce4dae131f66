"""The ranks of ``tests/chaos.py``: forks with an engine each, which obey commands until they are killed."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Iterator, NoReturn

import torch
import torch.distributed.checkpoint as dcp

from ds_layerwise.process_exit import leave
from ds_layerwise.zero.checkpoint import disks
from tests.support import auto_ep, internals
from tests.support.faults import DiskFault, FileEvents, failing_disk, no_larger_files, watch_files
from tests.support.harness import OwnDistributedTest, _join_group
from tests.support.reference import trainable, whole_number_gradients, whole_number_loss
from tests.support.training import Net, from_all_ranks, start, whole

#: Parameters that no loss reaches, in the models that have them.
UNUSED = ("unused.weight", "unused.bias")

#: The beginning of the names of experts that ranks have parts of.
EXPERTS = "moe.experts."

#: No collective gives up before the process that watches the ranks does.
COLLECTIVE_SECONDS = 3600


class Broken(Exception):
    """An error in the middle of a backward pass."""


class _Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Broken


class Chaotic(Net):
    """Sums up the losses of any units of a step, so that a step is the same however many ranks share it.

    Args:
        has_experts: True for a layer of experts, which AutoEP spreads over ranks.
    """

    def __init__(self, *, has_experts: bool = False, **options: bool) -> None:
        super().__init__(**options)
        if has_experts:
            self.moe = auto_ep.Routed()
            with torch.no_grad():
                for param in self.moe.parameters():
                    param.copy_(torch.randn(param.shape))

    breaks_at: str | None = None
    """The parameter whose part of the next backward pass raises :class:`Broken`."""

    def forward(self, place):
        """Return the loss of the units of a micro-batch, which may be none; ``sick``, infinite or NaN, makes a gradient
        so. A rank's experts get the units of all ranks that have the experts with it."""
        step, units, factor, sick, *of_experts = place
        experts = {name for name in trainable(self) if name.startswith(EXPERTS)}
        loss = sum((self.get_parameter(name).float() * 0).sum() for name in trainable(self) if name not in UNUSED)
        for unit in units:
            loss = loss + whole_number_loss(self, (step, unit, 0), {*UNUSED, *experts})
        for unit in of_experts:
            for name in experts:
                p = self.get_parameter(name)
                grad = whole_number_gradients(name, auto_ep.whole_shape(p), step, unit, 0)
                loss = loss + (p * auto_ep.own_part(p, grad).to(p)).float().sum()
        loss = loss * factor
        if self.breaks_at is not None:
            loss = loss + _Breaks.apply(self.get_parameter(self.breaks_at).flatten()[0].float())
        return loss + self.flat.weight.flatten()[5].float() * sick if sick else loss


class Mine:
    """An object that a script puts into ``client_state``. A node where its class has changed cannot read it."""

    is_lacking = False

    def __init__(self, serial):
        self.serial = serial

    def __setstate__(self, state):
        if Mine.is_lacking:
            raise AttributeError("this node has another version of class Mine")
        self.__dict__.update(state)


class Rank:
    """An engine and the commands that it takes. Every command returns the facts that the driver has to know of it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.engine: Any = None

    def start(self, variant: dict[str, bool], config: dict[str, Any], local_rank: int, groups: dict[str, Any]) -> None:
        """Make the engine; ``groups`` are arguments of ``initialize``."""
        self.engine = start(Chaotic(**variant), config, **groups)
        self.engine.local_rank = local_rank
        size = config.get("expert_parallel", {}).get("autoep_size", 1)
        first = self.rank - self.rank % size
        self.sharing = range(first, first + size)

    def place(self, micro_batch: dict[str, Any]) -> tuple[Any, ...]:
        """Return the place of this rank in a micro-batch."""
        units = micro_batch["units"]
        own = units[self.rank]
        of_experts = [unit for rank in self.sharing for unit in units[rank]]
        return micro_batch["step"], own, micro_batch["factor"], micro_batch["sick"] if 0 in own else 0.0, *of_experts

    def train(self, micro_batches: list[dict[str, Any]]) -> dict[str, Any]:
        """Train on micro-batches, and save in one of them if it says so; return the error of the save."""
        saved: dict[str, Any] = {}
        for micro_batch in micro_batches:
            loss = self.engine(self.place(micro_batch))
            save = micro_batch.get("save", {"at": ""})
            if save["at"] == "after forward":
                saved = self.try_to_save(save["how"])
            self.backward(loss, micro_batch["way"])
            if save["at"] == "after backward":
                saved = self.try_to_save(save["how"])
            self.engine.step()
        return saved

    def backward(self, loss: torch.Tensor, way: str) -> None:
        """Run the backward pass in one of the ways that scripts have."""
        if way == "engine":
            self.engine.backward(loss)
        elif way == "scale":
            self.engine.scale(loss).backward()
        else:
            loss.backward()

    def train_broken(self, micro_batches: list[dict[str, Any]], at: int, victims: list[int], param: str) -> None:
        """Train to the end of a step, on gradients of which ``victims`` lack some: one of their passes ends early."""
        for number, micro_batch in enumerate(micro_batches):
            breaks = number == at and self.rank in victims
            self.engine.module.breaks_at = param if breaks else None
            try:
                self.train([micro_batch]) if not breaks else self.train_half(micro_batch)
            finally:
                self.engine.module.breaks_at = None

    def train_half(self, micro_batch: dict[str, Any]) -> None:
        """Train on a micro-batch whose backward pass ends early, and go on as a script does that catches the error."""
        loss = self.engine(self.place({**micro_batch, "sick": 0.0}))
        try:
            self.backward(loss, micro_batch["way"])
        except Broken:
            self.engine.step()
        else:
            raise AssertionError("the pass did not break")

    def drop(self) -> None:
        """Drop the gradients of an unfinished step."""
        self.engine.zero_grad()

    def swap(self, dtype: torch.dtype) -> None:
        """Let parameters have averages of another dtype for a moment, as an evaluation of averages does."""
        kept = {param: param.data for param in self.engine.module.parameters()}
        for param in kept:
            param.data = param.data.to(dtype)
        for param, data in kept.items():
            param.data = data

    def load_weights(self, folders: list[str], tag: str, options: dict[str, bool]) -> None:
        """Load the weights of a checkpoint alone."""
        self.engine.load_checkpoint(folders[self.rank], tag=tag, **options)

    def try_to_save(self, how: dict[str, Any]) -> dict[str, Any]:
        """Save, and go on if that fails; return the error."""
        try:
            self.save(**how)
        except Exception as error:
            return told(error)
        return {}

    def save(self, folders: list[str], tag: str | None, serial: int, latest: bool, with_object: bool) -> None:
        """Save a checkpoint."""
        client = {"serial": serial, **({"mine": Mine(serial)} if with_object else {})}
        self.engine.save_checkpoint(folders[self.rank], tag=tag, client_state=client, save_latest=latest)

    def load(self, folders: list[str], tag: str | None) -> dict[str, Any]:
        """Load a checkpoint; returns which."""
        path, client = self.engine.load_checkpoint(folders[self.rank], tag=tag)
        return {"tag": Path(path).parent.name if path else None, "serial": (client or {}).get("serial")}

    def save_one_file(self, path: str) -> None:
        """Save whole parameters in one file."""
        self.engine.optimizer.save_state_dict_to_file(path)

    def load_one_file(self, path: str) -> None:
        """Load what :meth:`save_one_file` has saved."""
        self.engine.optimizer.load_state_dict_from_file(path)

    def save_sharded(self, path: str) -> None:
        """Save with ``torch.distributed.checkpoint``."""
        dcp.state_dict_saver.save(self.engine.optimizer.sharded_state_dict(), checkpoint_id=path)

    def load_sharded(self, path: str) -> None:
        """Load what :meth:`save_sharded` has saved."""
        self.engine.optimizer.load_sharded_state_dict(path)

    def count(self, step: int, skipped: int) -> None:
        """Let the engine count from here, as a script does that has loaded something other than its checkpoints."""
        self.engine.global_steps, self.engine.skipped_steps = step, skipped
        self.engine.micro_steps = step * self.engine.gradient_accumulation_steps()

    def evaluate(self) -> None:
        """Run the model as an evaluation does."""
        self.engine.eval()
        with torch.no_grad():
            assert self.engine((0, [0], 1.0, 0.0)).isfinite()
        self.engine.train()

    def spoil_a_copy(self) -> bool:
        """Copy the module, as averages of weights do, and overwrite the copy; returns whether it was the same."""
        import copy
        twin = copy.deepcopy(self.engine.module)
        pairs = list(zip(twin.parameters(), self.engine.module.parameters(), strict=True))
        same = all(torch.equal(one.detach(), other.detach()) for one, other in pairs)
        with torch.no_grad():
            for one, _ in pairs:
                one.fill_(3)
        return same

    def report(self) -> dict[str, Any]:
        """Return the position of the engine, and all its values."""
        engine = self.engine
        # A script that reads weights between a step and the next forward pass calls this, too.
        engine.optimizer.wait_for_params()
        return {
            "step": engine.global_steps, "micro": engine.micro_steps % engine.gradient_accumulation_steps(),
            "skipped": engine.skipped_steps, "updates": engine.optimizer.step_count,
            "weights": {name: whole_stack(name, whole(p)).float().numpy().copy()
                        for name, p in engine.module.named_parameters()},
            "pieces": [(piece.name, piece.param_start, piece.master.float().numpy().copy(),
                        {key: value.float().numpy().copy() for key, value in piece.state.items()})
                       for piece in internals.records(engine)]}

    def end(self, how: str) -> NoReturn:
        """End as a script does: by ``leave()``, by its last line, or by that after ``destroy()``."""
        if how == "destroy":
            self.engine.destroy()
        if how == "leave":
            leave()
        # The interpreter does the same at its end. Objects that it destroys after that do not matter to a checkpoint.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    @contextmanager
    def faulty(self, fault: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Let something go wrong; says in ``["fired"]`` whether it has."""
        said: dict[str, Any] = {"fired": True}
        with ExitStack() as stack:
            kind = fault.get("kind")
            if kind == "die":
                stack.enter_context(FileEvents(fault["at"], die_in=fault["in"]))
            elif kind == "full":
                stack.enter_context(no_larger_files(fault["bytes"]))
            elif kind == "full for the writer":
                writer = self.engine.checkpoint_engine.ckpt_process
                if writer.is_alive():
                    stack.enter_context(no_larger_files(fault["bytes"], writer.pid))
            elif kind == "no writer":
                self.engine.checkpoint_engine.ckpt_process.kill()
                self.engine.checkpoint_engine.ckpt_process.join()
            elif kind == "class":
                Mine.is_lacking = True
            elif kind == "disk":
                disk = stack.enter_context(failing_disk(DiskFault(**fault["disk"])))
            try:
                yield said
            finally:
                Mine.is_lacking = False
                if kind == "disk":
                    said["fired"] = disk.fired


def whole_stack(name: str, value: torch.Tensor) -> torch.Tensor:
    """Return a weight, with the experts of all ranks."""
    if not name.startswith(EXPERTS):
        return value
    ranks = auto_ep.NUM_EXPERTS // value.shape[0]
    return torch.cat(from_all_ranks(value)[:ranks])


def told(error: Exception) -> dict[str, Any]:
    """Return the message of an error, in one line for the driver, and its traceback."""
    trace = "".join(traceback.format_exception(error))
    # The frames of the traceback hold files and maps.
    error.__traceback__ = None
    return {"raised": f"{type(error).__name__}: {error}".replace("\n", " "), "trace": trace}


def close_sockets() -> None:
    """Close the connections that a fork has from its rank: a rank that dies would seem alive to its peers otherwise."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.close(int(name))
        except OSError:
            continue


def end_with_parent() -> None:
    """Let the system kill this process when its parent ends, in whatever way that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(rank: int, num_ranks: int, local_size: int, port: int, folder: Path, connection: Connection) -> None:
    """Be a rank: obey the commands that come through ``connection``."""
    end_with_parent()
    os.setpgid(0, 0)  # so that a kill reaches its writer, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A write beyond the end of a full disk is an error and not the end.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The output does not go to a file: a full disk would stop the rank, too.
    sys.stdout = sys.stderr = open(os.devnull, "w")
    for stream in (1, 2):
        os.dup2(sys.stdout.fileno(), stream)
    places = open(folder / f"{rank}.place", "w")
    faulthandler.register(signal.SIGUSR1, file=places, all_threads=True)
    torch.set_num_threads(1)
    gc.unfreeze()
    test = OwnDistributedTest()
    test.backend, test.collective_timeout = "gloo", COLLECTIVE_SECONDS
    _join_group(test, rank, num_ranks, port, folder)
    os.environ.update(LOCAL_RANK=str(rank % local_size), CROSS_RANK=str(rank // local_size),
                      CROSS_SIZE=str(num_ranks // local_size))
    # All folders that are looked for are on one disk.
    disks.PATIENCE = 3.0
    watch_files()
    # DeepSpeed's writers are started afresh elsewhere, and inherit nothing.
    os.register_at_fork(after_in_child=close_sockets)
    os.register_at_fork(after_in_child=end_with_parent)
    engine = Rank(rank)
    while True:
        command, arguments, fault = pickle.loads(connection.recv_bytes())
        answer: dict[str, Any] = {}
        said: dict[str, Any] = {}
        try:
            with engine.faulty(fault) as said:
                answer["value"] = getattr(engine, command)(**arguments)
        except Exception as error:
            answer = told(error)
        answer["fired"] = said.get("fired")
        connection.send_bytes(pickle.dumps(answer))
