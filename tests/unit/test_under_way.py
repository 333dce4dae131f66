"""Who hears of a transform of torch.func before it begins. What readers of weights find is a distributed test's."""

import gc
import os
import sys
import threading

import pytest
import torch
from torch._functorch import eager_transforms, vmap

from ds_layerwise.ranks import under_way
from ds_layerwise.ranks.under_way import Transforms
from tests.support.rooms import rooms

# Forward mode itself uses what is deprecated, and torch warns of a fork where it has threads.
pytestmark = [*rooms("under_way"), pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning", "ignore:.*use of fork:DeprecationWarning")]


class Listener:
    def __init__(self):
        self.heard = 0

    def hear(self):
        self.heard += 1


def beginnings():
    return (eager_transforms._grad_increment_nesting, eager_transforms.enter_jvp_nesting,
            eager_transforms._func_increment_nesting, vmap._vmap_increment_nesting)


TORCHS_OWN = beginnings()
X = torch.ones(2)
TRANSFORMS = [
    lambda: torch.func.grad(torch.sum)(X), lambda: torch.func.vjp(torch.square, X),
    lambda: torch.func.jvp(torch.square, (X, ), (X, )), lambda: torch.func.vmap(torch.square)(X),
    lambda: torch.func.functionalize(torch.square)(X), lambda: torch.vmap(torch.square)(X)]


@pytest.mark.parametrize("transform", TRANSFORMS)
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


def test_who_is_gone_is_not_heard_of_again():
    transforms, gone = Transforms(), Listener()
    transforms.listen(gone, gone.hear)
    del gone
    gc.collect()
    torch.vmap(torch.square)(X)
    assert beginnings() == TORCHS_OWN


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_error_while_it_waits_is_the_error(transform):
    class Failing(Listener):
        def hear(self):
            raise ConnectionError("rank 1 is gone")

    transforms, failing = Transforms(), Failing()
    transforms.listen(failing, failing.hear)
    with pytest.raises(ConnectionError, match="rank 1 is gone"):
        transform()
    transforms.leave(failing)
    assert torch._C._functorch.maybe_current_level() is None
    transform()


def test_a_forked_process_waits_for_nobody():
    listener = Listener()
    under_way.transforms.listen(listener, listener.hear)
    with under_way.transforms._lock:  # another thread has it at this moment
        child = os.fork()
        if child == 0:
            under_way.transforms.leave(listener)
            os._exit(0 if beginnings() == TORCHS_OWN and torch.vmap(torch.square)(X).sum() == 2 and not listener.heard
                     else 1)
    assert os.waitpid(child, 0)[1] == 0 and beginnings() != TORCHS_OWN
    under_way.transforms.leave(listener)
    assert beginnings() == TORCHS_OWN


def test_threads_that_listen_and_leave_at_once():
    transforms, errors = Transforms(), []

    def work():
        mine = Listener()
        try:
            for _ in range(300):
                transforms.listen(mine, mine.hear)
                torch.vmap(torch.square)(X)
                transforms.leave(mine)
            assert mine.heard >= 300
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and beginnings() == TORCHS_OWN


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
