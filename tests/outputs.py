"""Outputs of commands on the pages of docs/, made by the commands: ``python -m tests.outputs --write``.

It writes the list of tests/api.py, too.

A page has a line ``<!-- output: ds-layerwise ... -->``, and below it a block of text with what the command prints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

from ds_layerwise import cli
from tests import api
from tests.support.documents import PAGES

_OUTPUT = re.compile(r"<!-- output: ds-layerwise (.+) -->\n```text\n(?:(?!```).*\n)*```\n")


def with_outputs(page: str) -> str:
    """``page`` with the outputs of its commands as they are now."""
    return _OUTPUT.sub(lambda match: _block(match[1]), page)


def _block(arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = cli.main(shlex.split(arguments))
    if code:
        raise ValueError(f"ds-layerwise {arguments} ended with {code}")
    return f"<!-- output: ds-layerwise {arguments} -->\n```text\n{printed.getvalue().rstrip()}\n```\n"


def pages_with_outputs() -> list[Path]:
    """Those that have any."""
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
