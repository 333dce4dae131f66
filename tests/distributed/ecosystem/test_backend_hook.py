"""The patch that docs/proposal_backend_hook.md proposes for DeepSpeed: it applies, does what it says, and replaces what
the page says it replaces."""

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import deepspeed
import pytest

from ds_layerwise.engine.contract import contract
from ds_layerwise.engine.contract.contract import CONTRACT
from tests.distributed.ecosystem import with_registry
from tests.distributed.ecosystem.with_registry import PAGE, answers
from tests.support.rooms import rooms

pytestmark = rooms("backend", "contract", "patches")

ROOT = Path(__file__).parents[3]
PATCH = PAGE.with_suffix(".patch")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A folder with the installed DeepSpeed and the patch applied, the entry points of this package, and what
    DeepSpeed's tests import."""
    if deepspeed.__version__ != contract.NEWEST:
        pytest.skip(f"the patch is for DeepSpeed {contract.NEWEST}")
    root = tmp_path_factory.mktemp("patched")
    shutil.copytree(Path(deepspeed.__file__).parent, root / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(["patch", "-p1", "--fuzz=0", "-i", PATCH], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0 and not re.search("offset|fuzz", done.stdout), done.stdout + done.stderr
    (root / "unit").mkdir()
    (root / "unit/common.py").write_text("from tests.support.harness import DistributedTest\n")
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    group = "deepspeed.optimizer_backends"
    installed = root / "ds_layerwise-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: ds_layerwise\nVersion: 0.1.0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]{setup['options.entry_points'][group]}\n")
    return root


@pytest.mark.parametrize("which", [
    "test_optimizer_backends or trains", pytest.param("not test_optimizer_backends and not trains",
                                                      marks=pytest.mark.thorough)])
def test_the_registry_passes_its_own_test_and_ours_without_register(patched, which):
    own = patched / "tests/unit/runtime/test_optimizer_backends.py"
    ours = Path(shutil.copy(with_registry.__file__, patched))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "setup.cfg", "--rootdir", ROOT, "-p", "tests.conftest",
         "-p", "tests.distributed.conftest", "-p", "no:cacheprovider", "-k", which,
         own, ours],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{patched}{os.pathsep}{ROOT}"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ passed, \d+ deselected in", done.stdout.splitlines()[-1]), done.stdout


def test_the_page_says_where_every_wrap_goes():
    assert list(answers()) == [name.key for name in CONTRACT]
    counted = {where: list(answers().values()).count(where) for where in ("first", "second", "stays")}
    assert counted == {"first": 12, "second": 10, "stays": 9}


def test_without_the_registry_everything_is_wrapped():
    assert contract.IN_REGISTRY == frozenset()
