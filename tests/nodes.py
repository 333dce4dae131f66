"""Two nodes for real: lose one in the middle of a step and of a save, and come back with two and with one.

    python -m tests.nodes --times 10
    python -m tests.nodes --ways torchrun --stages 3 --seed 4

A node is a network, a mount, a host name and a PID namespace, with a disk of its own for checkpoints (a tmpfs) and a
link to a switch. A job of two ranks a node is started as docs/clusters.md says: by the deepspeed launcher with a
hostfile, which reaches the nodes through pdsh and a stand-in for ssh, or by torchrun on each node, which meet at the
first. For each way and ZeRO stage, a small GPT (:mod:`tests.support.node_ranks`) is trained on two nodes, and

1. one node loses all its processes by SIGKILL in the middle of a step; the seed deals the node and the moment;
2. the other goes on alone: it misses files at first, and loads once those of the lost node have been brought;
3. both go on from their last common step, and one of them is lost in the middle of a save;
4. the other goes on alone, as in 2;
5. both go on to the end.

Everything is compared with a run that nobody has stopped. Two nodes have the same losses, weights, masters and states,
bit for bit. One node loads the same masters and states, bit for bit, and its losses are within :data:`BOUND`.

This needs root on Linux, iproute2 and pdsh. Everything is in namespaces that the kernel removes when this process ends,
with their processes. The last line says how many times everything was as it has to be; the exit code is 1 unless it
always was. This is a tool; ``tests/distributed/checkpoint/test_nodes.py`` runs a short form.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_layerwise.checkpoint.files.manifest import FILE_NAME

ROOT = Path(__file__).parents[1]
STEPS = 10
WAYS, STAGES = ("deepspeed", "torchrun"), (1, 2, 3)

#: The largest difference of a loss on another number of ranks.
BOUND = 1e-5

#: Limits in seconds: of a collective, of a job, and of a chain of jobs.
COLLECTIVE, JOB, CHAIN = 120, 1800, 7200

#: The environment variable that names the folder of all written files, in the process that is in its own namespaces.
APART = "DS_LAYERWISE_NODES_APART"

SSH = """#!/bin/sh
# Stands in for ssh: no network, no user, but a command on another node, in an environment of its own.
while :; do case "$1" in -[op]) shift 2;; -*) shift;; *) break;; esac; done
host=$1; shift
exec nsenter --target "$(cat {folder}/$host.pid)" --net --mount --uts --pid \\
    env -i HOME={folder} PATH=/usr/sbin:/usr/bin:/sbin:/bin sh -c "$*"
"""


#: A prefix that runs a command in namespaces of its own, and ends its processes when the command ends.
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")

#: Programs of util-linux, iproute2 and pdsh.
NEEDS = ("unshare", "nsenter", "ip", "pdsh")


class Wrong(Exception):
    """A value is not as it has to be."""


def call(*words: object) -> None:
    """Run a command of the system.

    Raises:
        RuntimeError: the command failed.
    """
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")


def program(name: str) -> str:
    """Return the path of a program in the environment of this interpreter."""
    return str(Path(sys.executable).with_name(name))


@dataclass
class Node:
    """A machine. All nodes see ``folder``, except ``folder / "checkpoints"``, which is its own."""

    index: int
    folder: Path
    process: subprocess.Popen[str] | None = None

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def disk(self) -> Path:
        """The path of its checkpoints for processes outside of all nodes."""
        return self.folder / f"disk of {self.name}"

    def start(self, disk: Path | None = None) -> None:
        """Boot the node, with its own disk or another one."""
        port = f"port{self.index}"
        boot = (f'mount --bind "{disk or self.disk}" {self.folder}/checkpoints && mount --bind {self.folder}/hosts '
                f"/etc/hosts && hostname {self.name} && ip link set lo up && echo up && exec sleep {CHAIN}")
        self.process = subprocess.Popen([*UNSHARE, "--uts", "sh", "-c", boot], text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if not self.process.stdout or (line := self.process.stdout.readline()) != "up\n":
            raise RuntimeError(f"{self.name} does not start: {line}")
        pid = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().strip()
        (self.folder / f"{self.name}.pid").write_text(pid)
        call("ip", "link", "add", port, "type", "veth", "peer", "name", "link0", "netns", pid)
        call("ip", "link", "set", port, "master", "switch0", "up")
        inside = ("nsenter", "--target", pid, "--net", "ip")
        call(*inside, "address", "add", f"10.77.0.{self.index + 1}/24", "dev", "link0")
        call(*inside, "link", "set", "link0", "up")

    def kill(self) -> None:
        """End all its processes by SIGKILL, the first of a PID namespace and with it the others."""
        if self.process is None:
            return
        os.kill(int((self.folder / f"{self.name}.pid").read_text()), signal.SIGKILL)
        self.process.wait()
        self.process = None
        subprocess.run(["ip", "link", "del", f"port{self.index}"], capture_output=True)


@dataclass
class Job:
    """A job on some of the nodes."""

    commands: list[list[str]]
    out: Path
    env: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()
        with open(self.out / "log", "wb") as log:
            self.processes = [subprocess.Popen(command, env=self.env, cwd=self.out.parent, stdout=log, stderr=log,
                                               stdin=subprocess.DEVNULL) for command in self.commands]
        self.until = time.monotonic() + JOB

    def is_running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def wait(self, name: str = "") -> None:
        """Wait until the job ends, or has written the file ``name``.

        Raises:
            Wrong: the job takes too long, or ends before it has written.
        """
        while not (name and (self.out / name).exists()):
            if not self.is_running():
                if name:
                    raise Wrong(f"a job ended before it wrote {name!r}\n{self.said()}")
                return
            if time.monotonic() > self.until:
                raise Wrong(f"a job does not come to {name or 'its end'} in {JOB} s\n{self.said()}")
            time.sleep(0.1)

    def end(self) -> None:
        """Kill the launching processes; those that they have started end with their node."""
        for process in self.processes:
            process.kill()
            process.wait()

    def said(self) -> str:
        return (self.out / "log").read_text(errors="replace")[-6000:]

    def notes(self) -> list[dict[str, Any]]:
        """Return the notes of rank 0."""
        return [json.loads(line) for line in (self.out / "notes").read_text().splitlines()]

    def at_its_end(self) -> list[dict[str, Any]]:
        """Return the same for a job that has trained up to the last step.

        Raises:
            Wrong: the job has failed.
        """
        if any(process.returncode for process in self.processes):
            raise Wrong(f"a job failed\n{self.said()}")
        if STEPS not in (self.notes()[-1].get("saved"), self.notes()[-1].get("loaded")):
            raise Wrong(f"a job ended before step {STEPS}\n{self.said()}")
        return self.notes()


class Cluster:
    """Two nodes on a switch, and the environment of their jobs."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks
        for name in ("checkpoints", "bin"):
            (folder / name).mkdir()
        self.nodes = [Node(index, folder) for index in range(2)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"10.77.0.{node.index + 1} {node.name}\n" for node in self.nodes))
        (folder / "bin" / "ssh").write_text(SSH.format(folder=folder))
        (folder / "bin" / "ssh").chmod(0o755)
        self.exports = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "link0", "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1",
                        **{key: value for key, value in os.environ.items() if key.startswith("PYTHON")
                           and key != "PYTHONPATH"}}
        # The deepspeed launcher sets these on every node.
        (folder / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in self.exports.items()))
        call("ip", "link", "set", "lo", "up")
        call("ip", "link", "add", "switch0", "type", "bridge")
        call("ip", "link", "set", "switch0", "up")

    def fresh(self) -> None:
        """Boot both nodes, with empty disks."""
        for node in self.nodes:
            node.kill()
            if node.disk.is_mount():
                call("umount", node.disk)
            node.disk.mkdir(exist_ok=True)
            call("mount", "-t", "tmpfs", "tmpfs", node.disk)
            node.start()

    def job(self, way: str, nodes: list[Node], options: list[str]) -> Job:
        """Start a job as docs/clusters.md says."""
        options = ["-m", "tests.support.node_ranks", f"--steps={STEPS}", f"--checkpoints={self.folder}/checkpoints",
                   f"--out={self.folder}/out", f"--timeout={COLLECTIVE}", *options]
        if way == "deepspeed":
            (self.folder / "hostfile").write_text(
                "".join(f"{node.name} slots={self.ranks}\n" for node in nodes))
            # Without --force_multi the launcher would take a single node of a hostfile for its own machine.
            commands = [[program("deepspeed"), "--hostfile", "hostfile", "--force_multi",
                         "--module", "ds_layerwise.run", *options]]
        else:
            exports = "; ".join(f"export {key}={value}" for key, value in self.exports.items())
            torchrun = [program("torchrun"), "--nnodes", str(len(nodes)), "--nproc_per_node", str(self.ranks),
                        "--rdzv_id", "run1", "--rdzv_backend", "c10d", "--rdzv_endpoint", f"{nodes[0].name}:29500",
                        "-m", "ds_layerwise.run", *options]
            commands = [["ssh", node.name, f"{exports}; exec", *torchrun] for node in nodes]
        env = {**os.environ, **self.exports, "HOME": str(self.folder),
               "PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        return Job(commands, self.folder / "out", env)


def went_on_from(notes: list[dict[str, Any]], steps: list[int]) -> None:
    """Check the step from which a job went on.

    Raises:
        Wrong: the step is none of ``steps``.
    """
    first = next((note["loaded"] for note in notes if "loaded" in note), 0)
    if first not in steps:
        raise Wrong(f"a job went on from step {first}, expected one of {steps}")


def the_same(notes: list[dict[str, Any]], truth: list[dict[str, Any]], steps: list[int]) -> None:
    """Compare the notes of two nodes, which went on from one of ``steps``.

    Raises:
        Wrong: a bit differs.
    """
    went_on_from(notes, steps)
    for note in notes:
        saved = {"saved": note["loaded"], "states": note["states"]} if "loaded" in note else note
        if saved not in truth:
            raise Wrong(f"two nodes noted {note}, and the run that nobody stopped did not")


def nearly_the_same(notes: list[dict[str, Any]], truth: list[dict[str, Any]], steps: list[int]) -> float:
    """Compare the notes of one node, which went on from one of ``steps``; return the largest difference of a loss.

    Raises:
        Wrong: the difference is beyond the bound, or the loaded values differ in a bit.
    """
    the_same([note for note in notes if "loaded" in note], truth, steps)
    losses = {note["step"]: note["losses"] for note in truth if "step" in note}
    far = [abs(float.fromhex(loss) - float.fromhex(wanted)) for note in notes if "step" in note
           for loss, wanted in zip(note["losses"], losses[note["step"]], strict=True)]
    if beyond := [distance for distance in far if not distance <= BOUND]:
        raise Wrong(f"on one node a loss is {beyond[0]:.1e} away")
    return max(far)


class Chain:
    """All jobs of one way to start jobs and one ZeRO stage, from the first step to the last."""

    def __init__(self, cluster: Cluster, way: str, stage: int, rng: random.Random) -> None:
        self.cluster, self.way, self.stage, self.rng = cluster, way, stage, rng
        self.lost: list[str] = []
        self.far = 0.0

    @contextmanager
    def job(self, nodes: list[Node], *options: str) -> Iterator[Job]:
        job = self.cluster.job(self.way, nodes, [f"--stage={self.stage}", *options])
        try:
            yield job
        finally:
            if job.is_running():
                # The nodes end first: a process that loses its ssh becomes a child of this one, and no node ends until
                # it is reaped.
                for node in nodes:
                    node.kill()
            job.end()

    def unstopped(self) -> list[dict[str, Any]]:
        """Return the notes of a run that nobody stops."""
        self.cluster.fresh()
        with self.job(self.cluster.nodes) as job:
            job.wait()
            return job.at_its_end()

    def run(self, truth: list[dict[str, Any]]) -> None:
        """Go through all steps of the list above.

        Raises:
            Wrong: a value is not as it has to be.
        """
        self.cluster.fresh()
        self.lose("step", truth, [0], [4])
        self.lose("save", truth, [4], [6, 8])
        with self.job(self.cluster.nodes) as job:
            job.wait()
            the_same(job.at_its_end(), truth, [6, 8])

    def lose(self, kind: str, truth: list[dict[str, Any]], before: list[int], after: list[int]) -> None:
        """Let both nodes go on, lose one of them in a step or a save, let the other go on alone, and boot both.

        Args:
            before, after: the steps from which jobs may go on.

        Raises:
            Wrong: a value is not as it has to be.
        """
        victim, rank, part = self.rng.randrange(2), self.rng.randrange(self.cluster.ranks), self.rng.random()
        lost, other = self.cluster.nodes[victim], self.cluster.nodes[1 - victim]
        with self.job(self.cluster.nodes, f"--stop_in={kind}", f"--stop_at={part}",
                      f"--stop_rank={victim * self.cluster.ranks + rank}") as job:
            job.wait("stopped")
            lost.kill()
            began = time.monotonic()
            job.wait()
            seconds = time.monotonic() - began
            if not all(process.returncode for process in job.processes):
                raise Wrong(f"a job that lost a node ended well\n{job.said()}")
            the_same(job.notes(), truth, before)
            where = (job.out / "stopped").read_text()
        self.lost.append(f"{lost.name} in a {kind} at {where}, noticed in {seconds:.0f} s")
        other.kill()
        self.go_on_alone(other, lost, truth, after)
        for node in (lost, other):
            node.start()

    def go_on_alone(self, node: Node, lost: Node, truth: list[dict[str, Any]], after: list[int]) -> None:
        """Let one node go on, on a copy of its disk, to which the other's files are brought."""
        disk = self.cluster.folder / "copy"
        shutil.rmtree(disk, ignore_errors=True)
        shutil.copytree(node.disk, disk)
        node.start(disk)
        with self.job([node], "--lacks_files") as job:
            job.wait("refused")
            error = (job.out / "refused").read_text()
            if "_optim_states.pt is missing" not in error:
                raise Wrong(f"a load without the files of the other node says: {error}")
            tag = newest_of_both(disk, lost.disk)
            for path in (lost.disk / tag).iterdir():
                if not (disk / tag / path.name).exists():
                    shutil.copy(path, disk / tag)
            (job.out / "tag").write_text(tag)
            (job.out / "tag").rename(job.out / "brought")
            job.wait()
            self.far = max(self.far, nearly_the_same(job.at_its_end(), truth, after))
        node.kill()


def newest_of_both(one: Path, other: Path) -> str:
    """Return the newest tag that is the same save on two disks, by the id in its list of files."""
    def saves(disk: Path) -> dict[str, str]:
        return {path.parent.name: json.loads(path.read_text())["save"]["id"] for path in disk.glob(f"*/{FILE_NAME}")}

    theirs = saves(other)
    return max((tag for tag, save in saves(one).items() if theirs.get(tag) == save and "." not in tag),
               key=lambda tag: int(tag.removeprefix("global_step")))


def rounds(options: argparse.Namespace, folder: Path) -> int:
    """Go through all chains, so many times; return how many times one went wrong."""
    cluster, truth, failed = Cluster(folder, options.ranks), dict[int, list[dict[str, Any]]](), 0
    for number in range(options.first - 1, options.first - 1 + options.times):
        rng, right = random.Random(f"{options.seed} {number}"), True
        for stage in options.stages:
            for way in options.ways:
                signal.alarm(CHAIN)
                chain = Chain(cluster, way, stage, rng)
                try:
                    if stage not in truth:
                        truth[stage] = chain.unstopped()
                    chain.run(truth[stage])
                    outcome = f"right; one node within {chain.far:.1e}"
                except Wrong as wrong:
                    right, outcome = False, f"WRONG: {wrong}"
                print(f"{number + 1}. {way}, stage {stage}: {'; '.join([*chain.lost, outcome])}", flush=True)
        failed += not right
    for node in cluster.nodes:
        node.kill()
    signal.alarm(0)
    return failed


def out_of_time(*_: object) -> None:
    raise TimeoutError(f"a chain of jobs took more than {CHAIN} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1, help="how often (default: 1)")
    parser.add_argument("--first", type=int, default=1, help="the number of the first time (default: 1)")
    parser.add_argument("--seed", type=int, default=1, help="of who is lost, and when (default: 1)")
    parser.add_argument("--ranks", type=int, default=2, help="on a node (default: 2)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=STAGES)
    options = parser.parse_args()
    if APART in os.environ:
        signal.signal(signal.SIGALRM, out_of_time)
        failed = rounds(options, Path(os.environ[APART]))
        print(f"{options.times - failed} of {options.times}")
        sys.exit(failed > 0)
    if missing := [name for name in NEEDS if not shutil.which(name)]:
        parser.error(f"{', '.join(missing)} is not there; install iproute2, pdsh and util-linux")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with tempfile.TemporaryDirectory(prefix="nodes_") as folder:
        sys.exit(subprocess.run([*UNSHARE, sys.executable, "-m", "tests.nodes", *sys.argv[1:]],
                                env={**os.environ, APART: folder}).returncode)


if __name__ == "__main__":
    main()
