"""Commit of saves that go on beside the training at the end of a script, and end of the processes
that write.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed

from ds_layerwise.engine.final_error import has_failed, wait_for
from ds_layerwise.engine.saving import saving
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import say
from ds_layerwise.process_exit import Attempt, leave

#: Keys of the store under which ranks count that are at the end of their scripts, and of what is
#: decided there.
_AT_EXIT = "ds_layerwise/at_exit"
_DECIDED = "ds_layerwise/at_exit/decided"

#: Decision that all may commit.
_ALL_THERE = "all are there"

#: All engines. Python waits at its end for processes of theirs that write, if nobody ends these.
_engines: WeakSet[DeepSpeedEngine] = WeakSet()


def end_at_exit(engine: DeepSpeedEngine) -> None:
    """Let what ``engine`` saves beside the training be committed, and its process end, at the end
    of the script.
    """
    _engines.add(engine)
    # What is registered last is called first: before Python waits for processes.
    atexit.register(_end_at_exit)
    # Processes that multiprocessing has started call nothing of atexit. What a writer starts with
    # is given back at 0.
    Finalize(None, _end_at_exit, exitpriority=1)


def _end_at_exit() -> None:
    """Commit what a script has left at its end; a process that cannot ends with another exit code
    than 0.
    """
    failed = False
    unfinished = list(saving.unfinished)
    engines = list(_engines)
    # Leaving below calls this once more, and so does Python itself after Ctrl-C in here.
    saving.unfinished.clear()
    _engines.clear()
    if unfinished:
        alone = _alone_at_exit()
    else:
        alone = ""
    for engine in unfinished:
        with (attempt := Attempt()):
            if alone:
                raise LayerWiseError(f"{alone}; what was saved before is still there")
            saving.commit_decoupled(engine)
        if attempt.error is not None:
            failed = True
            if alone or engine.global_rank == 0:
                say(
                    f"ds_layerwise: rank {engine.global_rank}: the last checkpoint was not "
                    f"committed at the end of the script: {attempt.error}",
                    sys.stderr,
                )
    for engine in engines:
        # One whose construction has failed has none.
        writer = getattr(engine, "checkpoint_engine", None)
        if writer is not None and writer.is_decoupled():
            writer.cleanup()
    if failed and not has_failed():
        leave(1)


def _alone_at_exit() -> str:
    """Wait for the other ranks at the end of the script, and say why the last save cannot be
    committed with them.

    It is empty if all ranks are there. The first rank to know decides for all, so that none begins
    a commit without another: the last one to arrive, one that an error has ended, or one that has
    waited as long as a collective may. The others may be in one, and wait for this rank, where
    ``sys.exit`` has ended it alone.
    """
    if not dist.is_initialized():
        return "the process groups are gone; call engine.destroy() before destroy_process_group()"
    try:
        store: Any = distributed.distributed_c10d._get_default_store()
        # What is there already stays, and is what it returns.
        decide = partial(store.compare_set, _DECIDED, "")
        rank = dist.get_rank()
        if has_failed():
            decide(f"an error has ended the script of rank {rank}")
        elif store.add(_AT_EXIT, 1) == dist.get_world_size():
            decide(_ALL_THERE)
        with suppress(KeyboardInterrupt):
            # The store has the timeout of the process group.
            wait_for(store, [_DECIDED], store.timeout.total_seconds())
        decided: str = decide(
            f"rank {rank} has given up waiting for the others to come to the end of theirs"
        ).decode()
    except RuntimeError as e:
        return f"another rank has ended before ({e})"
    if decided == _ALL_THERE:
        return ""
    return decided
