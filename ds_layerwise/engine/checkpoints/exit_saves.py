"""The commit of background saves at the end of a script, and the end of the processes that write
them.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import deepspeed.comm as dist
from torch import distributed

from ds_layerwise.engine.checkpoints import saving
from ds_layerwise.engine.contract import patches
from ds_layerwise.engine.final_error import has_failed, wait_for
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.output import say
from ds_layerwise.process_exit import Attempt, leave

#: The keys of the store with the count of ranks at the end of their scripts, and with the decision
#: made there.
_AT_EXIT = "ds_layerwise/at_exit"
_DECIDED = "ds_layerwise/at_exit/decided"

#: The decision that all ranks may commit.
_ALL_THERE = "all are there"


def end_at_exit() -> None:
    """Commit the background saves of all engines at the end of the script, and end their writer
    processes, for which Python would wait.
    """
    # The last function to be registered is called first, before Python waits for processes.
    atexit.register(_end_at_exit)
    # Processes started by multiprocessing do not run atexit functions. Resources of a writer are
    # released at priority 0, so this comes before.
    Finalize(None, _end_at_exit, exitpriority=1)


def _end_at_exit() -> None:
    """Commit the saves left at the end of a script. A process that cannot do so exits with a code
    other than 0.
    """
    failed = False
    unfinished = dict(saving.unfinished)
    engines = list(patches.engines)
    # The exit below calls this function again, and so does Python after Ctrl-C in here.
    saving.unfinished.clear()
    patches.engines.clear()
    alone = _alone_at_exit() if unfinished else ""
    for engine, save in unfinished.items():
        with (attempt := Attempt()):
            if alone:
                raise LayerWiseError(f"{alone}; what was saved before is still there")
            saving.unfinished[engine] = save
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
        # An engine whose construction failed has no writer.
        writer = getattr(engine, "checkpoint_engine", None)
        if writer is not None and writer.is_decoupled():
            writer.cleanup()
    if failed and not has_failed():
        leave(1)


def _alone_at_exit() -> str:
    """Wait for the other ranks at the end of the script. Return why the last save cannot be
    committed with them; empty if all ranks are there.

    The first rank that knows the outcome decides for all, so that no rank begins a commit without
    another. This is the last rank to arrive, a rank that an error has ended, or a rank that has
    waited as long as a collective may. If ``sys.exit`` has ended only this rank, the others may be
    in a collective and wait for it.
    """
    if not dist.is_initialized():
        return "the process groups are gone; call engine.destroy() before destroy_process_group()"
    try:
        store: Any = distributed.distributed_c10d._get_default_store()
        # compare_set keeps an existing value and returns it.
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
    return "" if decided == _ALL_THERE else decided
