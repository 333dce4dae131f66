"""Fixtures for the settings that most tests of meshes vary."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.thorough), 2])
def stage(request: pytest.FixtureRequest) -> int:
    """ZeRO stages: all ranks keep gradients, or their owners alone. Tests of the step compare them in every run."""
    return int(request.param)
