"""Tests that run on several ranks: DeepSpeed's ``DistributedTest``, without its start-up cost and its silent skips.

    class TestX(DistributedTest):
        world_size = [1, 2]                       # or an int; one test each

        @pytest.mark.parametrize("gas", [1, 4])
        def test_y(self, gas, class_tmpdir): ...  # runs on every rank

        @pytest.mark.world_size(4)
        def test_z(self): ...

Fixtures and parameters are evaluated once, in the pytest process, and handed to every rank. ``class_tmpdir`` is one
directory for all ranks and all tests of a class. :func:`made_once` writes the files there that several tests read. The
hooks that make pytest start ranks are in ``conftest.py``.

With ``DEEPSPEED_CHECKOUT`` in the environment, ``DistributedTest`` is the one of that checkout
(``tests/unit/common.py``). So the same tests run under the harness that this one imitates.

Note: ranks are forks of the pytest process. A fork finds torch, deepspeed and the test module imported and starts in
milliseconds, where a spawned rank imports for seconds. A fork is only sound while this process has no threads that a
rank needs. So everything here keeps torch at one thread, and on an accelerator ``conftest.py`` runs distributed tests
first, before a unit test can have started autograd's device threads.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import inspect
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Callable, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# NVML counts the devices: the CUDA runtime's own count would leave a driver behind that forks cannot use.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
if os.environ.get("DS_ACCELERATOR") == "cpu":
    # Autograd starts a thread a visible device, and refuses to work in forks of a process that has one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator

torch.set_num_threads(1)

#: After the first rank has failed, the others get this long to report their errors. Then they are killed.
GRACE_SECONDS = 15.0
#: A rank that is asked for its place gets this long to begin its answer.
ANSWER_SECONDS = 20.0


def device() -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.device(get_accelerator().current_device_name())


class OwnDistributedTest:
    """Runs every test method on ``world_size`` ranks, each in a process of its own.

    A test passes when all ranks return. It fails with the traceback of the rank that failed first, or, after
    ``exec_timeout`` seconds, with the place where each rank hangs. Nothing is skipped for want of devices.
    """

    is_dist_test: ClassVar[bool] = True

    world_size: int | list[int] = 2
    backend: str | None = None
    """The backend of torch.distributed; None is the accelerator's own: gloo on a CPU, nccl on CUDA."""
    init_distributed: bool = True
    set_dist_env: bool = True
    exec_timeout: float = 300
    """Seconds until all ranks are killed and the test fails."""
    collective_timeout: float = 120
    """Seconds a collective may wait for a rank before it raises."""
    reuse_dist_env: bool = False
    """Part of DeepSpeed's interface, without effect: a fork costs too little to be kept."""
    requires_cuda_env: bool = True
    """Part of DeepSpeed's interface, without effect: nothing is skipped for want of an accelerator."""

    @pytest.fixture(scope="class")
    @classmethod
    def class_tmpdir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a directory that all ranks and all tests of the class share."""
        return tmp_path_factory.mktemp(cls.__name__)

    @pytest.fixture(autouse=True)
    def _num_ranks(self, request: pytest.FixtureRequest) -> int:
        return request.param

    def __call__(self, request: pytest.FixtureRequest) -> None:
        method = getattr(self, request.node.originalname)
        self.world_size = num_ranks = request.getfixturevalue("_num_ranks")
        wanted = inspect.signature(method).parameters
        kwargs = {name: request.getfixturevalue(name) for name, parameter in wanted.items()
                  if parameter.default is parameter.empty or name in request.fixturenames}
        run_ranks(self, num_ranks, method, kwargs)


def num_ranks_of(cls: type, function: Callable[..., Any]) -> list[int]:
    """Return the world sizes that a method of a distributed test class runs with. A mark overrides the class."""
    sizes: Any = getattr(cls, "world_size")
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "world_size":
            sizes, = mark.args
    sizes = [sizes] if isinstance(sizes, int) else list(sizes)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise pytest.UsageError(f"{cls.__name__}: world_size must be a positive int or a list of them, got {sizes}")
    return sizes


def run_ranks(test: OwnDistributedTest, num_ranks: int, function: Callable[..., None], kwargs: dict[str, Any]) -> None:
    """Call ``function(**kwargs)`` on every rank.

    Raises:
        pytest.fail.Exception: a rank raised, died or skipped, not all of them returned in time, or this machine has
            too few devices for them.
    """
    if test.backend is None:
        test.backend = get_accelerator().communication_backend_name()
    if get_accelerator().device_name() != "cpu" and get_accelerator().device_count() < num_ranks:
        pytest.fail(
            f"{num_ranks} ranks need as many devices, this machine has {get_accelerator().device_count()}; "
            "export DS_ACCELERATOR=cpu to run them on the CPU", pytrace=False
        )
    _import_what_engines_import()
    with tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder, port = Path(name), free_port()
        # A fork's collector writes to every object that it looks at, and each page that it writes to is copied first.
        gc.collect()
        gc.freeze()
        # Every fork would write the rest of these buffers once more.
        sys.stdout.flush()
        sys.stderr.flush()
        fork = multiprocessing.get_context("fork")
        ranks: list[BaseProcess] = [
            fork.Process(target=_rank, args=(test, rank, num_ranks, port, folder, function, kwargs))
            for rank in range(num_ranks)
        ]
        try:
            with warnings.catch_warnings():
                # Python warns about threads of this process, which no rank needs; see the note at the top.
                warnings.simplefilter("ignore", DeprecationWarning)
                for process in ranks:
                    process.start()
            ended = _wait(ranks, test.exec_timeout)
            places = _places(ranks, folder) if any(p.is_alive() for p in ranks) else {}
        finally:
            _kill(ranks)
        message = _verdict(ranks, ended, places, folder, test.exec_timeout)
    if message:
        pytest.fail(message, pytrace=False)


def made_once(folder: Path, world_sizes: list[int], function: Callable[..., None], **kwargs: Any) -> Path:
    """Return ``folder``, into which ``function(folder, **kwargs)`` has written on every rank of each of
    ``world_sizes``.

    The function is called for the first test that asks for this folder. A fixture returns the folder to tests that only
    read it, so that none of them needs another to have run::

        @pytest.fixture
        def saved(self, class_tmpdir, precision):
            return made_once(class_tmpdir / precision, [1, 3], self.save, precision=precision)

    Raises:
        pytest.fail.Exception: as in :func:`run_ranks`, for every test that asks.
    """
    failure = folder.with_name(f"{folder.name} failed")
    if failure.exists():
        pytest.fail(failure.read_text(), pytrace=False)
    if not folder.exists():
        folder.mkdir(parents=True)
        try:
            for num_ranks in world_sizes:
                run_ranks(OwnDistributedTest(), num_ranks, function, {"folder": folder, **kwargs})
        except BaseException as error:
            failure.write_text(str(error))
            raise
    return folder


@functools.cache
def _import_what_engines_import() -> None:
    """Import once, here, the modules that the first engine would import in every rank of every test, for seconds.

    DeepSpeed also finds out here which of its operators the machine could build, by compiling and linking. This backend
    finds out whether DeepSpeed has all that it needs.
    """
    for module in ("torch._dynamo", "torch.utils.flop_counter", "deepspeed.runtime.zero.muon.muon_optimizer",
                   "deepspeed.module_inject.auto_ep_layer", "rich.console", "rich.table",
                   "ds_layerwise.engine.engine_hooks", "ds_layerwise.optimizers.rules.muon_family",
                   "ds_layerwise.optimizers.rules.elementwise"):
        importlib.import_module(module)
    # What errors say of each section is made once.
    importlib.import_module("ds_layerwise.config.run_config").RunConfig.from_ds_config(
        {"optimizer": {"type": "LayerWiseMuon", "params": {"lr": 1.0, "muon_lr": 1.0}},
         "zero_optimization": {"stage": 1}, "layerwise": {"overrides": [{"name": "*", "lr_scale": 1.0}]}})
    importlib.import_module("ds_layerwise.engine.contract.contract").missing()
    getattr(importlib.import_module("deepspeed.ops"), "__compatible_ops__", None)


#: Sockets that keep the ports of :func:`free_port` from other processes. They are few, as each takes a file descriptor.
_HELD: deque[socket.socket] = deque(maxlen=16)


def free_port() -> int:
    """Return a TCP port for a server that sets SO_REUSEADDR, as torch's stores do. No other process gets it for some
    time.

    Note: the system may give a port that was let go of to the near end of any connection, before the server takes it. A
    port that is bound and not listened on goes only to a process that asks for it by number.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    if len(_HELD) == _HELD.maxlen:
        _HELD[0].close()
    _HELD.append(held)
    return int(held.getsockname()[1])


def _rank(test: OwnDistributedTest, rank: int, num_ranks: int, port: int, folder: Path,
          function: Callable[..., None], kwargs: dict[str, Any]) -> None:
    os.setpgid(0, 0)  # so that a kill reaches what this rank started, too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    places = open(folder / f"{rank}.place", "w")
    faulthandler.register(signal.SIGUSR1, file=places, all_threads=True)
    torch.set_num_threads(1)
    try:
        _join_group(test, rank, num_ranks, port, folder)
        function(**kwargs)
        if test.init_distributed:
            # This barrier finds a rank that entered one collective more than the others, before the next test would.
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        skipped = isinstance(error, pytest.skip.Exception)
        text = "".join(traceback.format_exception(type(error), error, _own_frames(error)))
        if skipped:
            text = f"skipped inside a rank, where nobody would notice: {error}\n\n{text}"
        record = {"time": time.monotonic(), "text": text, "line": f"{type(error).__name__}: {error}".split("\n")[0]}
        (folder / f"{rank}.failure").write_text(json.dumps(record))
        # Not sys.exit: it would wait for threads that a failed collective leaves behind.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _own_frames(error: BaseException) -> Any:
    """Return the error's traceback from the first frame that is not of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _join_group(test: OwnDistributedTest, rank: int, num_ranks: int, port: int, folder: Path) -> None:
    # Only inference uses this operator. Building it takes a compiler and a minute, a build that was killed leaves a
    # lock that every later one waits for, and each run leaves 66 MiB a rank in /dev/shm for good.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if test.set_dist_env:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
                          WORLD_SIZE=str(num_ranks), LOCAL_SIZE=str(num_ranks))
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(rank)
    if test.init_distributed:
        deepspeed.init_distributed(
            dist_backend=test.backend, init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks,
            timeout=timedelta(seconds=test.collective_timeout), auto_mpi_discovery=False,
        )


def _wait(ranks: list[BaseProcess], timeout: float) -> dict[int, float]:
    """Return the times at which ranks ended: all of them, or those before the timeout, or until shortly after a
    failure."""
    deadline = time.monotonic() + timeout
    ended: dict[int, float] = {}
    while len(ended) < len(ranks) and (left := deadline - time.monotonic()) > 0:
        wait([p.sentinel for i, p in enumerate(ranks) if i not in ended], timeout=left)
        for i, process in enumerate(ranks):
            if i not in ended and not process.is_alive():
                if process.exitcode and all(ranks[j].exitcode == 0 for j in ended):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                ended[i] = time.monotonic()
    return ended


def _places(ranks: list[BaseProcess], folder: Path) -> dict[int, str]:
    """Return the place in the code of each rank that still runs."""
    alive = [i for i, process in enumerate(ranks) if process.is_alive()]
    for i in alive:
        os.kill(ranks[i].pid or 0, signal.SIGUSR1)
    places: dict[int, str] = {}
    until = time.monotonic() + ANSWER_SECONDS
    while True:
        time.sleep(0.2)
        before, places = places, {i: (folder / f"{i}.place").read_text() for i in alive
                                if (folder / f"{i}.place").exists()}
        answered = all(places.get(i) or not ranks[i].is_alive() for i in alive)
        # A rank writes its answer line by line.
        if (answered and places == before) or time.monotonic() > until:
            return places


def _kill(ranks: list[BaseProcess]) -> None:
    for process in ranks:
        if process.pid is None:
            continue
        for kill in (os.killpg, os.kill):  # its group, or itself if it died or was stopped before it had one
            try:
                kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.join()


def _verdict(ranks: list[BaseProcess], ended: dict[int, float], places: dict[int, str], folder: Path,
             timeout: float) -> str:
    """Return why the test failed, the first failure in full and the others in a line; empty if it didn't."""
    # A rank that died without a word comes first: the others fail because of it.
    failures: list[tuple[bool, float, int, str, str]] = []  # had words, when, rank, in full, in a line
    for i, process in enumerate(ranks):
        record_path = folder / f"{i}.failure"
        if record_path.exists():
            record = json.loads(record_path.read_text())
            failures.append((True, record["time"], i, record["text"], record["line"]))
        elif i in ended and process.exitcode:
            code = process.exitcode
            cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            failures.append((False, ended[i], i, cause, cause))
    if not failures and not places:
        return ""
    if not failures:
        hanging = "\n\n".join(f"rank {i} is here:\n{text}" for i, text in sorted(places.items()))
        return f"ranks {sorted(places)} of {len(ranks)} still ran after {timeout:g} s and were killed\n\n{hanging}"
    failures.sort()
    _, _, first, text, _ = failures[0]
    others = [f"rank {i} then: {line}" for _, _, i, _, line in failures[1:]]
    others += [f"rank {i} still ran and was killed" for i in sorted(places)]
    return "\n".join([f"rank {first} of {len(ranks)} failed first:", "", text, *others])


def _checkout_distributed_test(checkout: str) -> type:
    """Return ``DistributedTest`` of a DeepSpeed checkout. No wheel has it."""
    folder = Path(checkout) / "tests"
    if not (folder / "unit" / "common.py").exists():
        raise FileNotFoundError(f"DEEPSPEED_CHECKOUT={checkout} holds no tests/unit/common.py")
    # It skips a test with more ranks than LOCAL_SIZE on a CPU, and counts sockets when that is unset.
    os.environ["LOCAL_SIZE"] = str(max(64, int(os.environ.get("LOCAL_SIZE", 0))))
    sys.path.insert(0, str(folder))
    with warnings.catch_warnings():
        # DeepSpeed's class uses names that pytest keeps for itself, and our setup.cfg makes warnings errors.
        warnings.simplefilter("ignore", pytest.PytestDeprecationWarning)
        Theirs = importlib.import_module("unit.common").DistributedTest  # its package is called unit, ours tests.unit

    # Every rank of DeepSpeed's harness imports this file; see _join_group for the reason.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # The class_tmpdir of DeepSpeed is a method, which pytest calls deprecated, and returns no pathlib.Path.
    return type("DistributedTest", (Theirs, ), {"class_tmpdir": OwnDistributedTest.class_tmpdir})


DistributedTest: Any = OwnDistributedTest
if os.environ.get("DEEPSPEED_CHECKOUT"):
    DistributedTest = _checkout_distributed_test(os.environ["DEEPSPEED_CHECKOUT"])
