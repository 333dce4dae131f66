"""Ranks that may die: forks like those of :mod:`.harness`. Their ends are returned, and do not fail the test."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import deepspeed.comm as dist
import torch

from tests.support.harness import OwnDistributedTest, _import_what_engines_import, _join_group, free_port


def fork_ranks(num_ranks, function, *args, collective_timeout=120.0, exec_timeout=240):
    """Call ``function(*args)`` on ranks that may die. Return the exit code of each, and its error."""
    _import_what_engines_import()
    test = OwnDistributedTest()
    test.collective_timeout = collective_timeout
    with tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder, port = Path(name), free_port()
        sys.stdout.flush()
        sys.stderr.flush()
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=_forked, args=(test, rank, num_ranks, port, folder, function, args))
                 for rank in range(num_ranks)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for process in ranks:
                process.start()
        deadline = time.monotonic() + exec_timeout
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in hanging:
            ranks[rank].kill()
            ranks[rank].join()
        if hanging:
            raise TimeoutError(f"ranks {hanging} still ran after {exec_timeout} s")
        raised = [folder / f"{rank}.raised" for rank in range(num_ranks)]
        return [(process.exitcode, path.read_text() if path.exists() else "")
                for process, path in zip(ranks, raised, strict=True)]


def _forked(test, rank, num_ranks, port, folder, function, args):
    torch.set_num_threads(1)
    # A collection in the middle of a save would call functions that close files.
    gc.disable()
    # A rank that fails prints so, as expected; the report of the test has it.
    sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        _join_group(test, rank, num_ranks, port, folder)
        function(*args)
        dist.barrier()
    except BaseException as error:
        (folder / f"{rank}.raised").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)
