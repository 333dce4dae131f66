"""The end of a script: saves that go on beside the training are committed, and the processes that write are ended."""

from __future__ import annotations

import atexit
import sys
import time
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed

from ds_layerwise.engine import saving
from ds_layerwise.engine.last_words import has_failed
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import say
from ds_layerwise.ranks.leaving import Attempt, leave

#: Where ranks count that are at the end of their scripts, and for how many seconds they wait for the others.
_AT_EXIT, _PATIENCE = "ds_layerwise/at_exit", 300

#: All engines. Python waits at its end for processes of theirs that write, if nobody ends these.
_engines: WeakSet[DeepSpeedEngine] = WeakSet()


def end_at_exit(engine: DeepSpeedEngine) -> None:
    """Let what ``engine`` saves beside the training be committed, and its process end, at the end of the script."""
    _engines.add(engine)
    # What is registered last is called first: before Python waits for processes.
    atexit.unregister(_end_at_exit)
    atexit.register(_end_at_exit)
    # Processes that multiprocessing has started call nothing of atexit.
    Finalize(None, _end_at_exit, exitpriority=0)


def _end_at_exit() -> None:
    """Commit what a script has left at its end; a process that cannot ends with another exit code than 0."""
    alone = _alone_at_exit() if saving.unfinished else ""
    unfinished, engines = list(saving.unfinished), list(_engines)
    # Leaving below calls this once more.
    saving.unfinished.clear()
    _engines.clear()
    for engine in dict.fromkeys([*unfinished, *engines]):
        # One whose construction has failed has none.
        writer = getattr(engine, "checkpoint_engine", None)
        if writer is None or not writer.is_decoupled():
            continue
        with (attempt := Attempt()):
            if engine in unfinished and alone:
                raise LayerWiseError(alone)
            saving.commit_decoupled(engine)
        writer.cleanup()
        if attempt.error is not None and engine.global_rank == 0:
            say(f"ds_layerwise: the last checkpoint was not committed at the end of the script: {attempt.error}; what "
                "was saved before is still there", sys.stderr)
        if attempt.error is not None and not has_failed():
            leave(1)


def _alone_at_exit() -> str:
    """Why this rank cannot commit a save with the others at the end of the script; empty if it can.

    The others may be waiting for this rank somewhere else, where an error or ``sys.exit`` has ended it alone.
    """
    if has_failed():
        return "an error has ended the script"
    if not dist.is_initialized():
        return "the process groups are gone; call engine.destroy() before destroy_process_group()"
    until = time.monotonic() + _PATIENCE
    try:
        store: Any = distributed.distributed_c10d._get_default_store()
        store.add(_AT_EXIT, 1)
        while store.add(_AT_EXIT, 0) % dist.get_world_size():
            if time.monotonic() > until:
                return f"the other ranks have not come to the end of theirs within {_PATIENCE} s"
            time.sleep(0.05)
    except RuntimeError as e:
        return f"another rank has ended before ({e})"
    return ""
