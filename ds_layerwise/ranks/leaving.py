"""The end of a process that has had process groups.

Note: threads under an interpreter that ends
    A gloo group has threads, which live as long as anything refers to it, ended or not; DeepSpeed's modules do. One
    that lets go of a tensor of Python's while the interpreter is taken apart ends the process with SIGABRT ("terminate
    called without an active exception"), and the launcher reports a finished run as failed. So a script that comes to
    its end, or to ``sys.exit(0)``, is ended by :func:`leave`, after which nothing is taken apart. An error that other
    ranks may not have goes its own way: ending a group may wait for ranks that wait for this one.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int = 0) -> NoReturn:
    """End the process once its threads, and what ``atexit`` knows of, are done, and groups ended.

    For the last line of a script; its output is written, and the interpreter is not taken apart.

    Args:
        code: the exit code; every rank leaves, with whatever code.
    """
    # As multiprocessing ends its processes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    from torch import distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as the interpreter's own
    os._exit(code)
