"""The snapshot for a process that writes beside the training: values of its own, of each tensor once."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from ds_layerwise.engine.checkpoints.save_snapshot import snapshot
from tests.support.rooms import rooms

pytestmark = rooms("save_snapshot")


def test_wrappers_of_one_shape_are_not_taken_for_tied_weights():
    """They have no address, as torchao's tensors have none."""
    held = {name: TwoTensor(torch.full((3,), value), torch.full((3,), value + 1))
            for name, value in (("a", 1.), ("b", 5.))}
    copied = snapshot(held)
    for name, value in held.items():
        assert type(copied[name]) is TwoTensor and copied[name].a is not value.a
        assert torch.equal(copied[name].a, value.a) and torch.equal(copied[name].b, value.b), name


@pytest.mark.parametrize(("values", "view"), [(torch.tensor([1 + 2j, 3 + 4j]), torch.conj),
                                              (torch.tensor([1., 2.]), torch._neg_view)])
def test_a_view_that_reads_other_values_out_of_the_same_memory(values, view):
    copied = snapshot([values, view(values)])
    assert torch.equal(copied[0], values) and torch.equal(copied[1], view(values))


def test_tensors_without_values_keep_their_shapes():
    copied = snapshot({"meta": torch.ones(2, 3, device="meta", dtype=torch.bfloat16), "none": torch.ones(0, 4)})
    assert copied["meta"].is_meta and copied["meta"].shape == (2, 3) and copied["meta"].dtype == torch.bfloat16
    assert copied["none"].shape == (0, 4)


def test_tied_weights_stay_tied():
    weight = nn.Parameter(torch.arange(6.).view(2, 3))
    copied = snapshot({"a": weight, "b": weight, "detached": weight.detach(), "again": weight.detach()})
    assert copied["a"] is copied["b"] is not weight and copied["detached"] is copied["again"]
    assert all(torch.equal(value, weight) for value in copied.values())
