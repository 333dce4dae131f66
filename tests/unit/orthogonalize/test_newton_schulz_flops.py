"""The FLOPs of Newton-Schulz, against counts by hand and against the products that run."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.errors import LayoutError
from ds_layerwise.orthogonalize.newton_schulz import coefficients, newton_schulz
from ds_layerwise.orthogonalize.newton_schulz_cost import newton_schulz_flops
from tests.support.rooms import rooms

pytestmark = rooms("newton_schulz_cost")


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 10])
@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (32, 32), (3, 16, 112)])
def test_flops_are_those_of_the_products_that_run(shape, steps, method):
    *batch, rows, cols = shape
    with FlopCounterMode(display=False) as counter:
        newton_schulz(torch.ones(shape), coefficients("simple", steps), method=method, dtype=torch.float32)
    predicted = newton_schulz_flops(rows, cols, steps=steps, method=method, batch=math.prod(batch))
    assert predicted == counter.get_total_flops()


def test_flops_of_five_steps_in_units_of_the_cubed_short_side():
    m = 10
    assert newton_schulz_flops(m, m, method="standard") == 30 * m**3
    assert newton_schulz_flops(m, m) == 30 * m**3  # a square runs as standard
    assert newton_schulz_flops(4 * m, m, method="standard") == 90 * m**3
    assert newton_schulz_flops(m, 4 * m) == 60 * m**3
    assert newton_schulz_flops(m, 4 * m, batch=3) == 180 * m**3


@pytest.mark.parametrize("arguments, message", [
    ({"rows": 0}, "at least 1, got 0, 3, 5, 1"),
    ({"steps": 0}, "at least 1, got 2, 3, 0, 1"),
    ({"batch": -1}, "at least 1, got 2, 3, 5, -1"),
    ({"method": "grm"}, "method must be one of gram, standard, got 'grm'"),
])
def test_flops_of_something_that_cannot_run_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        newton_schulz_flops(**{"rows": 2, "cols": 3, **arguments})
