"""Hooks that start the ranks of distributed tests, and the guard against distributed tests that never ran."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.harness import OwnDistributedTest, get_accelerator, num_ranks_of
from tests.support.rooms import marker_lines
from tests.support.versions import skip_unmet


@pytest.fixture(autouse=True)
def nothing_of_accelerate_stays() -> Iterator[None]:
    """Reset Accelerate: it asks once for the number of processes, and ranks, which are forks, would inherit the answer.
    """
    yield
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lines so long that no cell of a table folds."""
    monkeypatch.setattr("ds_layerwise.plan.forecast.text_tables.columns_of_terminal", lambda most: 500)


def _is_distributed(item: Any) -> bool:
    return bool(getattr(getattr(item, "cls", None), "is_dist_test", False))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NeverRan())
    for line in marker_lines():
        config.addinivalue_line("markers", line)


def _usual(sizes: list[int]) -> int:
    """Return the number of ranks that stands for all ``sizes`` unless THOROUGH=1: 3 find what 2 hide."""
    return 3 if 3 in sizes else min(sizes, key=lambda size: (size == 1, size))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.cls is not None and issubclass(metafunc.cls, OwnDistributedTest):
        sizes = num_ranks_of(metafunc.cls, metafunc.function)
        rarely = getattr(metafunc.cls, "thorough_on", None)
        if rarely is None or len(sizes) == 1:
            rarely = set(sizes) - {_usual(sizes)}
        metafunc.parametrize("_num_ranks", indirect=True, argvalues=[
            pytest.param(n, id=f"{n}rank{'s' * (n > 1)}", marks=[pytest.mark.thorough] * (n in rarely))
            for n in sizes])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("THOROUGH") != "1":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("thorough")])
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
    skip_unmet(items)
    if get_accelerator().device_name() != "cpu":
        # Forks are sound only before a unit test has used the device; see the note in harness.py.
        items.sort(key=lambda item: not _is_distributed(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: Any) -> None:
    if _is_distributed(item):
        # A new object is called: fixtures have set attributes on pytest's own. DeepSpeed's hook does the same.
        item.runtest = lambda: item.cls()(item._request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    report = yield
    expected = hasattr(report, "wasxfail") or item.get_closest_marker("may_skip")
    # The mark travels with the report to the process that ends the session, where workers of pytest-xdist run the
    # tests.
    report.never_ran = report.skipped and _is_distributed(item) and not expected
    return report


class NeverRan:
    """Let a session fail in which distributed tests were skipped."""

    def __init__(self) -> None:
        self._tests: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if getattr(report, "never_ran", False):
            self._tests.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._tests and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._tests:
            terminalreporter.section("distributed tests were skipped, so this session fails", red=True)
            for nodeid in self._tests:
                terminalreporter.line(f"{nodeid}: mark it may_skip(reason) if that is meant")
