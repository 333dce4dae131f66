"""Comparisons of an engine that trains on whole-number gradients with the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor, nn

from ds_layerwise.optimizers.recipe import Hyper
from tests.support.checkpoints import masters
from tests.support.reference import Recipe, Reference, Run, train, trainable, whole_number_gradients
from tests.support.training import MATRICES, Net, assert_same_on_all_ranks, recipe_for, relative_error, whole


def by_the_oracle(make: Callable[[], nn.Module] = Net, num_steps: int = 3, **recipe: Any) -> Run:
    """Train the oracle as ``ds_config`` says, on a model whose loss takes a (step, micro-batch, rank)."""
    return train(make, lambda *place: place, lambda module, place: module(place), recipe_for(make(), **recipe),
                 num_steps)


def start_oracle(module: nn.Module, **recipe: Any) -> Reference:
    """Return the oracle before its first step, for tests that change something on the way; see :func:`oracle_step`."""
    return Reference(trainable(module), recipe_for(module, **recipe))


def oracle_step(reference: Reference, step: int, *, gas: int = 1, frozen: Collection[str] = ()) -> Any:
    """Take a step on the whole-number gradients of :class:`Net`. Parameters in ``frozen`` stay as they are."""
    kept = {name: (reference.params[name].clone(), copy.deepcopy(reference.state[name])) for name in frozen}
    done = reference.step([[{name: whole_number_gradients(name, p.shape, step, micro, rank) / gas
                             for name, p in reference.params.items() if name not in frozen} for micro in range(gas)]
                           for rank in range(dist.get_world_size())])
    for name, (param, state) in kept.items():
        reference.params[name], reference.state[name] = param, state
    return done


def assert_trained_as(module: nn.Module, expected: Run | Reference, bound: float = 1e-5, but: Collection[str] = (),
                      where: object = "") -> None:
    """Check that the trained parameters, except ``but``, are as ``expected``, and that all ranks have the same."""
    values = expected.params if isinstance(expected, Reference) else expected.model_params
    for name, p in trainable(module).items():
        if name not in but:
            assert relative_error(whole(p).float(), values[name].float()) < bound, (name, where)
    assert_same_on_all_ranks(module)


def assert_gradients_equal(gradients: Mapping[str, tuple[int, Tensor]], expected: Mapping[str, Tensor],
                           factor: float = 1) -> None:
    """Compare this rank's pieces, bit for bit. Muon and Adam forget the scale of a gradient: only this sees a missing
    division."""
    for name, (first, values) in gradients.items():
        wanted = expected[name].flatten()[first:first + values.numel()] * factor
        assert torch.equal(values.cpu(), wanted), name


def compared_to(expected: Run, factor: float = 1) -> Callable[[int, Mapping[str, tuple[int, Tensor]]], None]:
    """Return a ``check`` for :func:`train_engine` that compares each step's gradients with the oracle's."""
    return lambda step, gradients: assert_gradients_equal(gradients, expected.steps[step].grads, factor)


def assert_masters_are(engine: Any, expected: Mapping[str, Tensor], bound: float = 1e-5) -> None:
    """Compare masters that are put together from all ranks, so that the dtype of the parameters does not matter."""
    for name, value in masters(engine).items():
        assert relative_error(value, expected[name]) < bound, name


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-5,
                 atol: float = 1e-6) -> None:
    """Compare each value of ``found`` with that of its name in ``expected``, element by element within rounding."""
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=partial("{}: {}".format, name))


def mean_gradient(name: str, shape: Sequence[int], step: int, num_ranks: int) -> Tensor:
    """Return the average over so many ranks of the whole-number gradients of one micro-batch."""
    micro_batches = [whole_number_gradients(name, shape, step, 0, rank) for rank in range(num_ranks)]
    return torch.stack(micro_batches).sum(0) / num_ranks


def by_its_rule(recipe: Any, name: str, param: Tensor, ranks_of_step: Sequence[int], hyper_of: Callable[[int], Hyper],
                after: Callable[[int, dict[str, Tensor]], None] = lambda step, state: None) -> Tensor:
    """Train a parameter of :class:`Net` by its rule alone, in one piece, for a step on each of so many ranks.

    ``after`` each step a test may change the states.
    """
    batch, *matrix = MATRICES.get(name, (0, *param.shape))
    rule, value = recipe, param.detach().clone().view(matrix if batch < 2 else (batch, *matrix))
    state = rule.init_state(value)
    for step, num_ranks in enumerate(ranks_of_step):
        grad = mean_gradient(name, param.shape, step, num_ranks).view(value.shape)
        rule.update_([value], [grad], [state], hyper_of(step))
        after(step, state)
    return value.view(param.shape)


def each_alone(module: nn.Module, recipe_of: Callable[[str, Recipe], Recipe], num_steps: int,
               num_ranks: int) -> dict[str, Tensor]:
    """Return the oracle's masters, each parameter trained on its own, with the recipe that ``recipe_of`` makes of the
    whole one."""
    masters = {}
    for name, param in trainable(module).items():
        whole = recipe_for(module)
        matrices = {name: whole.matrices[name]} if name in whole.matrices else {}
        oracle = Reference({name: param}, recipe_of(name, replace(whole, matrices=matrices)))
        for step in range(num_steps):
            oracle.step([[{name: whole_number_gradients(name, param.shape, step, 0, rank)}]
                         for rank in range(num_ranks)])
        masters[name] = oracle.params[name]
    return masters
