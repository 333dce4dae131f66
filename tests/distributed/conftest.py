"""What most tests vary, each by a fixture: who asks for ``stage`` or ``precision`` runs once with each."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[1, 2])
def stage(request: pytest.FixtureRequest) -> int:
    """Of ZeRO: gradients are kept by everybody, or by their owners alone."""
    return int(request.param)


@pytest.fixture(params=[True, False])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether buckets are reduced while the backward pass goes on."""
    return bool(request.param)


@pytest.fixture(params=["fp32", "bf16"])
def precision(request: pytest.FixtureRequest) -> str:
    """Of parameters; tests/support/training.py has the sections of a config for it."""
    return str(request.param)
