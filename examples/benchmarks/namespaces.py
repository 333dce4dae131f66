"""A cluster on one machine: nodes are network namespaces, and links between them have the given
rate.

It needs root on Linux, iproute2, and the kernel's bridge, veth and tbf.

Note: nothing is left behind
    Namespaces have no names. The caller moves into one of its own, which is the switch, and every
    node's first process into another. The kernel removes them, and all interfaces in them, when
    their last process is gone. Processes end with the one that started them, even if that is
    killed.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from measuring import Meeting, join

FORK = multiprocessing.get_context("fork")

#: Bytes of an Ethernet frame, and those that TCP over IPv4 carries in it with its time stamps.
FRAME, PAYLOAD = 1514, 1448

INTERFACE = "link0"
_SWITCH = "switch0"
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PORT = 29500


@dataclass(frozen=True)
class Cluster:
    """Equal nodes, each with one link.

    Args:
        mbit_s: rate of the link, each way, Mbit/s of whole frames.
    """

    nodes: int
    ranks_per_node: int
    mbit_s: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks in all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def link_gb_s(self) -> float:
        """Return the rate that a link carries for TCP each way, GB/s."""
        return self.mbit_s / 8000 * PAYLOAD / FRAME

    def __str__(self) -> str:
        return f"{self.nodes} nodes x {self.ranks_per_node}, {self.mbit_s} Mbit/s"


def _address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def _ip(*words: object, tool: str = "ip") -> str:
    """Return the output of ``ip`` or ``tc``.

    Raises:
        RuntimeError: the command failed.
    """
    done = subprocess.run([tool, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


def _limit(interface: str, mbit_s: int) -> None:
    # A burst holds the largest segment that the kernel hands over in one piece. Frames count as
    # they would travel.
    _ip(
        "qdisc",
        "add",
        "dev",
        interface,
        "root",
        "tbf",
        "rate",
        f"{mbit_s}mbit",
        "burst",
        "128kb",
        "latency",
        "100ms",
        tool="tc",
    )


def _into_own_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise RuntimeError(
            f"a network namespace cannot be made ({os.strerror(ctypes.get_errno())}); be root"
        )
    _ip("link", "set", "lo", "up")


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def be_the_switch() -> None:
    """Move this process into a network of its own, to which nodes can be joined. It leaves every
    other one.

    Raises:
        RuntimeError: this is no Linux, not root, or without iproute2.
    """
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("ip", "tc"))):
        raise RuntimeError(
            "nodes are network namespaces: this needs Linux with iproute2 (ip and tc)"
        )
    _into_own_network()
    _ip("link", "add", _SWITCH, "type", "bridge")
    _ip("link", "set", _SWITCH, "up")


def sent_bytes() -> int:
    """Return the bytes that this node has sent over its link, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counts.split()[8])
    raise RuntimeError(f"this process is on no node: it has no interface {INTERFACE}")


def run(cluster: Cluster, work: Callable[[Cluster], Any], *, timeout_s: float = 1800) -> Any:
    """Do ``work`` on every rank of ``cluster``, and return the result of rank 0. Call
    :func:`be_the_switch` first.

    Ranks are forks of this process that talk over gloo. Their output goes to stderr.

    Raises:
        RuntimeError: a rank failed, or took too long. The others are killed then.
    """
    nodes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(cluster.nodes):
                here, there = FORK.Pipe()
                node = FORK.Process(
                    target=_node, args=(cluster, index, there, os.getpid(), Path(folder), work)
                )
                node.start()
                nodes.append(node)
                _join(cluster, index, here, node)
            _wait(nodes, time.monotonic() + timeout_s)
            return torch.load(Path(folder, "result"), weights_only=False)
        finally:
            for node in nodes:
                node.kill()
            for node in nodes:
                node.join()
            for index in range(len(nodes)):
                # A namespace is removed some time after its last process: the next node of that
                # name may come earlier.
                subprocess.run(["ip", "link", "del", f"port{index}"], capture_output=True)


def _join(cluster: Cluster, index: int, pipe: Connection, node: BaseProcess) -> None:
    """Put a link between the switch and a node that is in its own network."""
    if not pipe.poll(60):
        raise RuntimeError(f"node {index} did not start")
    pipe.recv()
    port = f"port{index}"
    _ip("link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", node.pid)
    _ip("link", "set", port, "master", _SWITCH, "up")
    _limit(port, cluster.mbit_s)
    pipe.send("joined")


def _wait(processes: list[BaseProcess], deadline: float) -> None:
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            break
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks took too long")
        time.sleep(0.05)
    if codes := [process.exitcode for process in processes if process.exitcode]:
        raise RuntimeError(f"a process ended with code {codes[0]}")


def _node(
    cluster: Cluster,
    index: int,
    pipe: Connection,
    parent: int,
    folder: Path,
    work: Callable[[Cluster], Any],
) -> None:
    _end_with_parent(parent)
    _into_own_network()
    pipe.send("apart")
    pipe.recv()
    _ip("address", "add", f"{_address(index)}/16", "dev", INTERFACE)
    _ip("link", "set", INTERFACE, "up")
    _limit(INTERFACE, cluster.mbit_s)
    ranks = [
        FORK.Process(target=_rank, args=(cluster, index, local, os.getpid(), folder, work))
        for local in range(cluster.ranks_per_node)
    ]
    for process in ranks:
        process.start()
    try:
        _wait(ranks, float("inf"))
    finally:
        for process in ranks:
            process.kill()


def _rank(
    cluster: Cluster,
    node: int,
    local: int,
    parent: int,
    folder: Path,
    work: Callable[[Cluster], Any],
) -> None:
    _end_with_parent(parent)
    os.dup2(2, 1)
    meeting = Meeting(f"tcp://{_address(0)}:{_PORT}", node, cluster.nodes)
    env = {
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "MASTER_ADDR": _address(0),
        "MASTER_PORT": str(_PORT),
    }
    join(local, cluster.ranks_per_node, meeting, env=env)
    result = work(cluster)
    if dist.get_rank() == 0:
        torch.save(result, folder / "result")
    dist.barrier()
    dist.destroy_process_group()
