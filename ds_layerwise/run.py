"""``python -m ds_layerwise.run script.py [args]``: a DeepSpeed script with this backend registered.

Under the launcher: ``deepspeed --module ds_layerwise.run script.py [args]``. A module instead of a
file: ``ds_layerwise.run -m package.module [args]``.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

from ds_layerwise.process_exit import leave

_USAGE = "usage: python -m ds_layerwise.run [-m] SCRIPT_OR_MODULE [args ...]"


def main(argv: list[str]) -> dict[str, object]:
    """Run the script or module in ``argv`` as ``__main__``, with the rest of ``argv`` as its
    arguments.

    DeepSpeed's launcher adds ``--local_rank=N`` before all other arguments. The script gets it, as
    if it had been launched directly.
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
        return runpy.run_module(target, run_name="__main__", alter_sys=True)
    # As with `python script.py`, the script's own folder comes first.
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    return runpy.run_path(target, run_name="__main__")


def main_and_leave(argv: list[str]) -> NoReturn:
    """Run :func:`main`, then :func:`leave` unless it has failed."""
    # Keep a reference: an uncollected text file may otherwise be closed before its buffer is
    # written.
    kept: object
    try:
        kept = main(argv)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        kept = end  # noqa: F841
    leave()


if __name__ == "__main__":
    main_and_leave(sys.argv[1:])
