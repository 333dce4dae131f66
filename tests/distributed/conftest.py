"""Fixtures for the settings that most tests vary: a test with ``stage`` or ``precision`` runs once with each value."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2])
def stage(request: pytest.FixtureRequest) -> int:
    """ZeRO stages: all ranks keep gradients, or their owners alone."""
    return int(request.param)


@pytest.fixture(params=[True, False])
def overlap(request: pytest.FixtureRequest) -> bool:
    """True if buckets are reduced during the backward pass."""
    return bool(request.param)


@pytest.fixture(params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    """The precision of parameters; tests/support/training.py has the sections of a config for it."""
    return str(request.param)
