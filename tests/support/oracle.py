"""The oracle beside an engine that trains on whole-number gradients: how far it gets, and what must be the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor, nn

from tests.support.checkpoints import masters
from tests.support.reference import Reference, Run, train, trainable, whole_number_gradients
from tests.support.training import Net, assert_same_on_all_ranks, recipe_for, relative_error


def by_the_oracle(make: Callable[[], nn.Module] = Net, num_steps: int = 3, **recipe: Any) -> Run:
    """What training must give for a model whose loss takes a (step, micro-batch, rank), as ``ds_config`` says it."""
    return train(make, lambda *place: place, lambda module, place: module(place), recipe_for(make(), **recipe),
                 num_steps)


def start_oracle(module: nn.Module, **recipe: Any) -> Reference:
    """The oracle before its first step, for tests that change something on the way; see :func:`oracle_step`."""
    return Reference(trainable(module), recipe_for(module, **recipe))


def oracle_step(reference: Reference, step: int, *, gas: int = 1, frozen: Collection[str] = ()) -> Any:
    """A step on the whole-number gradients that :class:`Net` has; nothing moves what is ``frozen``."""
    kept = {name: (reference.params[name].clone(), copy.deepcopy(reference.state[name])) for name in frozen}
    done = reference.step([[{name: whole_number_gradients(name, p.shape, step, micro, rank) / gas
                             for name, p in reference.params.items() if name not in frozen} for micro in range(gas)]
                           for rank in range(dist.get_world_size())])
    for name, (param, state) in kept.items():
        reference.params[name], reference.state[name] = param, state
    return done


def assert_trained_as(module: nn.Module, expected: Run | Reference, bound: float = 1e-5, but: Collection[str] = (),
                      where: object = "") -> None:
    """What is trained is as ``expected``, ``but`` for some, and the same on all ranks."""
    values = expected.params if isinstance(expected, Reference) else expected.model_params
    for name, p in trainable(module).items():
        if name not in but:
            assert relative_error(p.detach().float(), values[name].float()) < bound, (name, where)
    assert_same_on_all_ranks(module)


def assert_gradients_equal(gradients: Mapping[str, tuple[int, Tensor]], expected: Mapping[str, Tensor],
                           factor: float = 1) -> None:
    """This rank's pieces, bit for bit. Muon and Adam forget the scale of a gradient: only this sees a missing division.
    """
    for name, (first, values) in gradients.items():
        wanted = expected[name].flatten()[first:first + values.numel()] * factor
        assert torch.equal(values.cpu(), wanted), name


def compared_to(expected: Run, factor: float = 1) -> Callable[[int, Mapping[str, tuple[int, Tensor]]], None]:
    """For ``train_engine(check=...)``: the gradients of each step are those of the oracle."""
    return lambda step, gradients: assert_gradients_equal(gradients, expected.steps[step].grads, factor)


def assert_masters_are(engine: Any, expected: Mapping[str, Tensor], bound: float = 1e-5) -> None:
    """Put together from all ranks, whatever the parameters are rounded to."""
    for name, value in masters(engine).items():
        assert relative_error(value, expected[name]) < bound, name
