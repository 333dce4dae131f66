"""Tests that need a release which need not be the installed one."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement


def needs(requirement: str, reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped where another release is installed, and may be.

    Args:
        requirement: a package and the releases that it takes, like ``deepspeed>=0.19.7``.
        reason: what other releases lack.
    """
    return pytest.mark.needs(requirement, reason)


def unmet(requirement: str, reason: str) -> str | None:
    """Return in words why a test that :func:`needs` this is skipped; None if the installed release meets it."""
    wanted = Requirement(requirement)
    installed = metadata.version(wanted.name)
    if wanted.specifier.contains(installed, prereleases=True):
        return None
    return f"needs {requirement}, and {installed} is installed: {reason}"


def skip_unmet(items: list[pytest.Item]) -> None:
    """Skip the tests whose needs are not met, and let the session pass without them."""
    for item in items:
        for mark in item.iter_markers("needs"):
            if why := unmet(*mark.args):
                item.add_marker(pytest.mark.skip(reason=why))
                item.add_marker(pytest.mark.may_skip(why))
