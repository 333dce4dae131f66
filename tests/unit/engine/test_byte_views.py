"""Parameters that DeepSpeed can view as bytes, whatever strides they come with."""

import pytest
import torch
from torch import nn

from ds_layerwise.engine.shared_storage import viewable_as_bytes
from tests.support.rooms import rooms

pytestmark = rooms("shared_storage")


@pytest.mark.parametrize("value", [
    torch.tensor(3.0), torch.arange(6.0), torch.arange(6.0).view(2, 3).t(), torch.arange(24.0).view(1, 24).t(),
    torch.arange(12.0)[::2], torch.arange(8.0).view(2, 4)[:, :1], torch.empty(0, 3)], ids=lambda v: str(tuple(v.shape)))
def test_each_can_be_viewed_and_is_what_it_was(value):
    param, expected = nn.Parameter(value), value.clone()
    with viewable_as_bytes([param]):
        assert param.data.view(torch.uint8).numel() == 4 * expected.numel()
        assert torch.equal(param.data.view(expected.shape), expected)
    assert param.shape == expected.shape and torch.equal(param.data, expected)
