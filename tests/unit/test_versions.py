"""Claims about versions in setup.cfg, README.md, docs/, the contract and the workflow, against what was run."""

import re
from configparser import ConfigParser

import pytest

from ds_layerwise.engine.contract import contract
from tests import matrix
from tests.matrix import ENVIRONMENTS, ROOT, Environment, ends
from tests.support.rooms import rooms

pytestmark = rooms("outside")


def test_a_failed_run_has_a_reason():
    assert matrix.read().keys() <= {each.name for each in ENVIRONMENTS}
    assert not matrix.unknown(matrix.read())


def test_the_page_is_made_of_the_results():
    assert matrix.PAGE.read_text() == matrix.page(matrix.read()), "python -m tests.matrix --write"


def test_bounds_are_the_ends_of_what_was_run():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    oldest, newest = ends("deepspeed")
    major, minor, _ = newest.split(".")
    assert (contract.OLDEST, contract.NEWEST, contract.BELOW) == (oldest, newest, f"{major}.{int(minor) + 1}")
    required = setup["options"]["install_requires"].split()
    assert f"deepspeed>={oldest},<{contract.BELOW}" in required
    assert f"torch>={ends('torch')[0].removesuffix('.0')}" in required
    assert setup["options"]["python_requires"] == f">={ends('python')[0]}"
    said = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert said == sorted({each.python for each in ENVIRONMENTS}, key=lambda python: int(python.split(".")[1]))


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_pages_say_the_same(page):
    assert matrix.sentence() in " ".join((ROOT / page).read_text().split())


def test_the_workflow_runs_both_ends():
    lines = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    found = re.findall(r'python: "(.+)", name: (\S+)}', lines)
    oldest, newest = (Environment(*(ends(what)[i] for what in ("python", "torch", "deepspeed"))) for i in (0, 1))
    assert found == [(oldest.python, oldest.name), (newest.python, newest.name)]
    assert {oldest, newest} <= set(ENVIRONMENTS)


def told(test, outcome, error=""):
    return {"test": test, "outcome": outcome, "error": error}


def test_results_of_a_run_are_counted_by_file():
    lines = [{"started": "a.py::one"}, told("a.py::one", "passed"), told("a.py::two[x]", "skipped"),
             told("a.py::four", "skipped", "needs deepspeed>=9, and 0.19.4 is installed: it has no wheels"),
             told("b.py::A::three", "passed"), told("b.py::A::three", "failed", "at the end"),
             told("c.py", "failed", "cannot be imported")]
    assert matrix.outcomes(lines) == {
        "a.py": {"passed": 1, "skipped": 2, "failed": {}, "lacking": {
            "a.py::four": "`deepspeed>=9`: it has no wheels"}},
        "b.py": {"passed": 0, "skipped": 0, "failed": {"b.py::A::three": "at the end"}},
        "c.py": {"passed": 0, "skipped": 0, "failed": {"c.py": "cannot be imported"}}}


def test_unknown_failures_and_files_that_were_not_run_are_told(monkeypatch):
    one, other = (each.name for each in ENVIRONMENTS[:2])
    monkeypatch.setattr(matrix, "ENVIRONMENTS", ENVIRONMENTS[:2])
    monkeypatch.setattr(matrix, "REASONS", ((re.escape(one), "t: known", "Why."),))
    files = {"f.py": {"passed": 1, "skipped": 0, "failed": {"f.py::t": "known"}}}
    failing = {"date": "2026-01-01", "files": files}
    passing = {"date": "2026-01-01", "files": {"f.py": {"passed": 2, "skipped": 0, "failed": {}}}}
    assert matrix.unknown({one: failing, other: passing}) == {}
    assert matrix.unknown({one: passing, other: failing}) == {f"{other} f.py::t": "known"}
    monkeypatch.setattr(matrix, "files_of", lambda patterns: ["f.py"])
    told = matrix.page({one: failing, other: {"date": "2026-01-02", "files": {"g.py": passing["files"]["f.py"]}}})
    assert "| 1 | 1 | 1 | 2026-01-01 |\n" in told and "| 2 | 0 | 1 | 2026-01-02 |\n" in told
    assert ("| file | a | b |\n| --- | --- | --- |\n| f.py | 1 fail (1) | not run |\n| g.py | not run | pass |\n\n"
            "## Why tests fail\n\n**1.** Why.\n\n* `f.py::t`\n") in told
    assert "| 0 | 0 | 1 | not yet |\n" in matrix.page({one: failing})
