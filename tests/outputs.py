"""Outputs of commands on the pages of docs/, made by the commands: ``python -m tests.outputs --write``.

It writes the list of tests/api.py, too.

A page has a line ``<!-- output: ds-layerwise ... -->`` or ``<!-- output: python ... -->``, and below it a block of text
with the output of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from ds_layerwise import cli
from tests import api
from tests.support.documents import PAGES, ROOT

_OUTPUT = re.compile(r"<!-- output: (ds-layerwise|python) (.+) -->\n```text\n(?:(?!```).*\n)*```\n")


def with_outputs(page: str) -> str:
    """Return ``page`` with the outputs of its commands as they are now."""
    return _OUTPUT.sub(lambda match: _block(match[1], match[2]), page)


def _block(program: str, arguments: str) -> str:
    printed = (_of_ours if program == "ds-layerwise" else _of_python)(shlex.split(arguments))
    return f"<!-- output: {program} {arguments} -->\n```text\n{printed.rstrip()}\n```\n"


def _of_ours(arguments: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(arguments)
    if code:
        raise ValueError(f"ds-layerwise {shlex.join(arguments)} ended with {code}")
    return printed.getvalue()


def _of_python(arguments: list[str]) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
                          check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def pages_with_outputs() -> list[Path]:
    """Return the pages that have outputs."""
    return [path for path in PAGES if _OUTPUT.search(path.read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True, help="put them into the pages")
    parser.parse_args()
    for path in pages_with_outputs():
        path.write_text(with_outputs(path.read_text()))
    api.PAGE.write_text(api.with_api(api.PAGE.read_text()))


if __name__ == "__main__":
    main()
