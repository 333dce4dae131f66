"""Lines of the start-up table that depend on the device."""

from types import SimpleNamespace

import pytest
import torch

from ds_layerwise.zero.start_report import timer_told
from tests.support.rooms import rooms

pytestmark = rooms("start_report")


@pytest.mark.parametrize("enabled, synchronized, device, told", [
    (True, True, "cuda", True), (True, True, "cpu", False), (False, True, "cuda", False), (True, False, "cuda", False)])
def test_a_timer_that_waits_for_the_device_is_told(enabled, synchronized, device, told):
    timer = SimpleNamespace(enabled=enabled, synchronized=synchronized)
    line = timer_told(timer, torch.device(device))
    assert ("set timers.throughput.synchronized to false" in line) == told == bool(line)
