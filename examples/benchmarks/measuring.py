"""Time of operations that several ranks do together, or one does in turns, and their memory,
sampled from outside.

Memory is anonymous memory: allocated by a process, without files that are mapped for reading. It is
``Pss_Anon`` in /proc, so Linux alone. Where forks share some, each counts a fair part of that.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch

FORK = multiprocessing.get_context("fork")

#: Samples by process: the time on the monotonic clock, which all processes share, and MB.
Samples = dict[int, list[tuple[float, float]]]

INTERVAL_S = 0.004


@dataclass(frozen=True)
class Event:
    """An operation as one process saw it. Seconds are those of the monotonic clock, which all
    processes share."""

    what: str
    side: str
    pid: int
    start: float
    end: float
    timed: bool


@dataclass(frozen=True)
class Meeting:
    """The place where ranks meet, as torch's init_method, and the number of this node."""

    where: str
    node: int = 0
    nodes: int = 1


class Clock:
    """A clock for operations that all ranks do together."""

    def __init__(self, watched: Any) -> None:
        self.events: list[Event] = []
        self.timed = False
        self._watched = watched

    def __call__(self, what: str, side: str, operation: Callable[[], Any]) -> None:
        gc.collect()
        settle()
        dist.barrier()
        if self._watched.is_set():
            time.sleep(0.05)
        start = time.monotonic()
        operation()
        dist.barrier()
        self.events.append(Event(what, side, os.getpid(), start, time.monotonic(), self.timed))


def anonymous_mb(pid: int) -> float:
    """Return the anonymous memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def family(pid: int) -> list[int]:
    """Return a process and all processes that it has started, directly or not."""
    members = [pid]
    for parent in members:
        for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                members += [int(child) for child in tasks.read_text().split()]
    return members


def settle() -> None:
    """Write pending files to the disk, and give freed memory back to the system."""
    os.sync()
    with contextlib.suppress(AttributeError, OSError):  # a C library other than glibc
        ctypes.CDLL(None).malloc_trim(0)


def in_turns(
    sides: Mapping[str, Callable[[], object]],
    repetitions: int,
    *,
    finish: Callable[[], object],
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, float]:
    """Return the median of each side, in milliseconds. All take turns, so that a disturbance of the
    machine hits them all.

    Args:
        finish: waits until all begun work is done.
        before: calls by side that come before it each time and do not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repetitions + 1):
        for name, side in sides.items():
            if before is not None:
                before[name]()
            finish()
            start = time.perf_counter()
            side()
            finish()
            # The first turn loads and compiles everything that all need.
            if turn:
                taken[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(milliseconds) for name, milliseconds in taken.items()}


def run_ranks(
    folder: str,
    size: int,
    work: Callable[[Any], None],
    *,
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    limit_s: float = float("inf"),
    spawns: bool = False,
    meeting: Meeting | None = None,
) -> Samples:
    """Do ``work`` on ``size`` ranks, forks of this process that meet in ``folder``.

    ``work`` gets an event. While that is set, the ranks' memory is sampled.

    Args:
        device: "cpu", over gloo; or "cuda", over NCCL, each rank on the device of its number. This
            process must not have used them.
        env: variables that each rank has in its environment, too, before it uses a device.
        spawns: True for processes that import everything themselves, where this one may have used
            devices.
        meeting: the place to meet the ranks of other nodes, each of which has as many.

    Raises:
        RuntimeError: a rank failed, or was not done after ``limit_s`` seconds. The others are
            killed then.
    """
    processes: Any = multiprocessing.get_context("spawn") if spawns else FORK
    watched = processes.Event()
    meeting = meeting or Meeting(f"file://{folder}/store-{size}")
    ranks = [
        processes.Process(
            target=_rank, args=(rank, size, meeting, watched, work, device, env or {})
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    return watch(ranks, watched, limit_s)


def _rank(
    local: int,
    size: int,
    meeting: Meeting,
    watched: Any,
    work: Callable[[Any], None],
    device: str,
    env: Mapping[str, str],
) -> None:
    join(local, size, meeting, device, env)
    work(watched)
    dist.barrier()
    dist.destroy_process_group()


def join(
    local: int, size: int, meeting: Meeting, device: str = "cpu", env: Mapping[str, str] = {}
) -> None:
    """Make this process rank ``local`` of the ``size`` ranks of its node; see :func:`run_ranks`."""
    rank, world = meeting.node * size + local, meeting.nodes * size
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", **env},
        RANK=str(rank),
        LOCAL_RANK=str(local),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(size),
    )
    torch.set_num_threads(1)
    # Only inference uses this operator, building it takes a minute, and all runs would share its
    # memory.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if device == "cuda":
        torch.cuda.set_device(local)
    dist.init_distributed(
        "gloo" if device == "cpu" else "nccl",
        auto_mpi_discovery=False,
        verbose=False,
        timeout=timedelta(seconds=600),
        init_method=meeting.where,
        rank=rank,
        world_size=world,
    )


def watch(processes: Sequence[BaseProcess], watched: Any, limit_s: float = float("inf")) -> Samples:
    """Wait for all ``processes``, and sample them while the event ``watched`` is set.

    Raises:
        RuntimeError: a process failed, or was not done after ``limit_s`` seconds. The others are
            killed then.
    """
    samples: Samples = defaultdict(list)
    until = time.monotonic() + limit_s
    while any(process.is_alive() for process in processes):
        if time.monotonic() > until:
            for process in processes:
                process.kill()
                process.join()
            raise RuntimeError(f"not done after {limit_s:g} seconds")
        for process in processes:
            if process.exitcode:
                for other in processes:
                    other.kill()
            elif watched.is_set() and process.pid is not None:
                samples[process.pid].append((time.monotonic(), anonymous_mb(process.pid)))
        time.sleep(INTERVAL_S if watched.is_set() else 0.1)
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"a process ended with code {codes[0]}")
    return samples


def extra_mb(samples: Samples, event: Event) -> float:
    """Return the most memory that the process had during ``event``, over that just before; 0
    without samples."""
    before = [mb for when, mb in samples.get(event.pid, ()) if when < event.start]
    during = [mb for when, mb in samples.get(event.pid, ()) if event.start <= when <= event.end]
    return max(during) - before[-1] if before and during else 0.0
