"""``python -m ds_layerwise.run script.py [args]``: run a DeepSpeed script unchanged, with this backend registered.

Under the launcher: ``deepspeed --module ds_layerwise.run script.py [args]``. A module instead of a file:
``ds_layerwise.run -m package.module [args]``.

Note: threads under an interpreter that ends
    A gloo group has threads, which live as long as anything refers to it, ended or not; DeepSpeed's modules do. One
    that lets go of a tensor of Python's while the interpreter is taken apart ends the process with SIGABRT ("terminate
    called without an active exception"), and the launcher reports a finished run as failed. So a script that comes to
    its end, or to ``sys.exit(0)``, is ended by :func:`leave`, after which nothing is taken apart. An error goes its
    own way: ending a group may wait for ranks that wait for this one.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from typing import NoReturn

_USAGE = "usage: python -m ds_layerwise.run [-m] SCRIPT_OR_MODULE [args ...]"


def main(argv: list[str]) -> None:
    """Run what ``argv`` names as ``__main__``, with the rest of ``argv`` as its arguments.

    DeepSpeed's launcher puts ``--local_rank=N`` before everything else; the script gets it as if it had been
    launched itself.
    """
    launcher_args = []
    while argv and argv[0].startswith("--local_rank"):
        launcher_args.append(argv.pop(0))
    as_module = argv[:1] == ["-m"]
    if as_module:
        argv.pop(0)
    if not argv or argv[0].startswith("-"):
        raise SystemExit(_USAGE)
    from ds_layerwise.engine.register import register
    register()
    target, *args = argv
    sys.argv = [target, *launcher_args, *args]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # As `python script.py` does: the script's own folder comes first.
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


def leave() -> NoReturn:
    """End the process with exit code 0 once its threads, and what ``atexit`` knows of, are done, and groups ended.

    For the last line of a script; its output is written, and the interpreter is not taken apart.
    """
    # As multiprocessing ends its processes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    from torch import distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    code = 0
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120  # as the interpreter's own
    os._exit(code)


def main_and_leave(argv: list[str]) -> NoReturn:
    """:func:`main`, then :func:`leave` unless it has failed."""
    try:
        main(argv)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    leave()


if __name__ == "__main__":
    main_and_leave(sys.argv[1:])
