"""Who hears of a transform of torch.func before it begins. What readers of weights find is a distributed test's."""

import gc

import pytest
import torch
from torch._functorch import eager_transforms, vmap

from ds_layerwise.ranks import under_way
from ds_layerwise.ranks.under_way import Transforms
from tests.support.rooms import rooms

pytestmark = rooms("under_way")


class Listener:
    def __init__(self):
        self.heard = 0

    def hear(self):
        self.heard += 1


def beginnings():
    return (eager_transforms._grad_increment_nesting, eager_transforms._jvp_increment_nesting,
            eager_transforms._func_increment_nesting, vmap._vmap_increment_nesting)


TORCHS_OWN = beginnings()
X = torch.ones(2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by forward mode itself
@pytest.mark.parametrize("transform", [
    lambda: torch.func.grad(torch.sum)(X), lambda: torch.func.vjp(torch.square, X),
    lambda: torch.func.jvp(torch.square, (X, ), (X, )), lambda: torch.func.vmap(torch.square)(X),
    lambda: torch.func.functionalize(torch.square)(X), lambda: torch.vmap(torch.square)(X)])
def test_each_transform_is_heard_of_by_all_who_listen_and_by_nobody_else(transform):
    transforms, first, second = Transforms(), Listener(), Listener()
    assert transforms.can_be_noticed
    transforms.listen(first, first.hear)
    transforms.listen(second, second.hear)
    transform()
    assert first.heard == second.heard >= 1
    heard = first.heard
    transforms.leave(first)
    transform()
    assert (first.heard, second.heard) == (heard, 2 * heard)
    transforms.leave(second)
    transforms.leave(second)
    assert beginnings() == TORCHS_OWN
    transform()
    assert second.heard == 2 * heard


def test_who_leaves_while_it_hears_and_who_is_gone():
    transforms, gone = Transforms(), Listener()

    class Leaving(Listener):
        def hear(self):
            super().hear()
            transforms.leave(self)

    leaving = Leaving()
    transforms.listen(leaving, leaving.hear)
    transforms.listen(gone, gone.hear)
    del gone
    gc.collect()
    torch.func.grad(torch.sum)(X)
    assert leaving.heard == 1 and beginnings() == TORCHS_OWN


def test_a_torch_without_them_says_so(monkeypatch):
    monkeypatch.setattr(under_way, "_BEGINNINGS", ((eager_transforms, "_no_such_function"), ))
    assert not Transforms().can_be_noticed
