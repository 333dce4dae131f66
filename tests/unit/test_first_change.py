"""The worked examples of docs/first_change.md: its patches fit the repository, and its tests pass with them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.support.documents import DOCS, ROOT, blocks_of
from tests.support.rooms import rooms

pytestmark = rooms("outside")

#: Per example, the commands of its block, the first of which applies its patch.
EXAMPLES = [[shlex.split(line) for line in block.text.splitlines()] for block in blocks_of(DOCS / "first_change.md")
            if block.text.startswith("git apply")]
COPIED = ("ds_layerwise", "tests", "docs", "examples", "ds_configs")


def run(words, folder):
    program = [sys.executable] if words[0] == "python" else words[:1]
    # git looks for no repository around the copy, and the workers of pytest-xdist are those of this session.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run([*program, *words[1:]], cwd=folder, capture_output=True, text=True,
                          env={**env, "GIT_CEILING_DIRECTORIES": str(folder.parent)})
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository."""
    folder = tmp_path_factory.mktemp("clone") / "copy"
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, folder)
    return folder


def test_each_patch_fits(copy):
    assert {words[-1] for words, *_ in EXAMPLES} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "first_change").iterdir()}
    for apply, *_ in EXAMPLES:
        run([*apply[:2], "--check", *apply[2:]], copy)


@pytest.mark.thorough
def test_both_fit_together_and_their_tests_pass(copy):
    for commands in EXAMPLES:
        for words in commands:
            run(words, copy)
