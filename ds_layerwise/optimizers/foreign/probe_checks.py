"""Checks of things that a class of ``torch.optim.Optimizer`` must not do, or ranks that own some
parameters each cannot run it.

Note: what is tried
    What it keeps after some steps, and where. Then steps of one instance that has two parameters,
    against those of instances as a run has them: of one parameter or one piece, made with another
    learning rate, and going on from a copy of the state. What comes out must be alike. What a class
    draws at random differs anyway, and is not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.foreign.client_object import set_rate
from ds_layerwise.optimizers.foreign.probe import (
    ERRORS,
    SMALL,
    STEPS,
    aside,
    draw,
    make,
    said,
    states_of,
    step_of,
    walk,
)
from ds_layerwise.optimizers.rule import Hyper, UpdateRule
from ds_layerwise.recipes.rules.any_torch_recipe import AnyTorch
from ds_layerwise.recipes.rules.client_recipe import ClientTorch

#: Steps of a run that is resumed, and after how many of them: something may come late.
_LONG, _RESUMED = 12, (1, 7)

#: A learning rate that no class has for its default.
_LR = 0.0123


def check(recipe: AnyTorch, new_rule: Callable[[], UpdateRule]) -> None:
    """Refuse a class that does not do with parts of a model what it does with all of it, or after a
    load what it does without.

    Args:
        new_rule: makes a rule for the class, which has seen no parameter yet.

    Raises:
        ConfigError: it cannot be made; what it does to a parameter depends on others, which are on
            other ranks, or on what is not in the state of that one; or it is to be cut by element,
            and what it does to one depends on others.
    """
    shapes: list[tuple[int, ...]] = [(6, 10), (10, 4)] if recipe.whole else [(60,), (24,)]
    _check_where_it_keeps(recipe, shapes[0])
    if not recipe.whole:
        _check_keys_of_pieces(recipe)
    expected = _trained(recipe, shapes, seed=0)
    if not torch.equal(expected, _trained(recipe, shapes, seed=1)):
        return  # What it draws at random differs from run to run anyway.
    value, grads = draw(shapes[0], 0), [draw(shapes[0], 100 + step) for step in range(_LONG)]
    if not _agree(_in_instances(recipe, new_rule, value, grads), expected):
        raise ConfigError(
            f"{recipe.rule} does otherwise where each parameter has an instance of its own that "
            "goes on from optimizer.state[param], as after a load, than where one has all: what "
            "it does depends on other parameters, on something that it keeps elsewhere, or on "
            "more of the lr that it is made with than its parameter groups tell; this class "
            "cannot be used here"
        )
    if not recipe.whole:
        halves = []
        for part in (slice(0, 24), slice(24, 60)):
            own = [grad[part] for grad in grads]
            halves.append(_in_instances(recipe, new_rule, value[part], own))
        if not _agree(torch.cat(halves), expected):
            raise ConfigError(
                f"{recipe.rule} does to one element what depends on the others of its parameter, "
                "and parameters of the scalar optimizer are cut by element; use it as "
                "matrix_optimizer"
            )


def _check_where_it_keeps(recipe: AnyTorch, shape: tuple[int, ...]) -> None:
    """Refuse a class that goes on from what it keeps elsewhere than in the state of a parameter.

    Raises:
        ConfigError: names where; such a thing is not in a checkpoint, and may be of all parameters
            together.
    """
    with aside():
        param = draw(shape, 0)
        optimizer = make(recipe, param)
        found = []
        for step in range(STEPS):
            param.grad = draw(shape, 1 + step)
            step_of(recipe, optimizer, shape)
            found.append({where: _told(value) for where, value in _elsewhere(optimizer, param)})
    changed = [where for where, value in found[-1].items() if value != found[0].get(where)]
    if changed or (
        changed := [where for where in found[-1] if where.startswith("optimizer.state")]
    ):
        raise ConfigError(
            f"{recipe.rule} goes on from {', '.join(changed)}, and not from optimizer.state[param] "
            "alone: ranks own some parameters each, and a checkpoint has what is kept of each; "
            "this class cannot be used here"
        )


def _elsewhere(optimizer: Optimizer, param: Tensor) -> Iterator[tuple[str, Any]]:
    """Return everything that an optimizer of ``param`` keeps beside its state, by its place."""
    for key, value in vars(optimizer).items():
        if key not in ("defaults", "state", "param_groups"):
            yield f"optimizer.{key}", value
    for key, value in optimizer.param_groups[0].items():
        # Of numbers, those that count are known, and others have been refused.
        if key not in ("lr", "weight_decay", "params") and not isinstance(value, (int, float)):
            yield f"optimizer.param_groups[0][{key!r}]", value
    for other in optimizer.state:
        if other is not param:
            yield f"optimizer.state[{other!r}]", None


def _told(value: Any) -> str:
    """The numbers, texts and tensors in ``value`` as text; what else there is counts for
    nothing.
    """

    def told(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each.tolist()
        return each if isinstance(each, (int, float, str)) else None

    return str([(path, told(each)) for path, each in walk(value)])


def _check_keys_of_pieces(recipe: AnyTorch) -> None:
    """Refuse a class that keeps other things of a long piece than of a short one: how parameters
    are cut depends on the number of ranks.

    Raises:
        ConfigError: names what it keeps.
    """
    short, *others = [set(states_of(recipe, (numel,))) for numel in (1, 60, SMALL + 1, 2**20 + 1)]
    if differ := set().union(*others).symmetric_difference(short):
        raise ConfigError(
            f"{recipe.rule} keeps {', '.join(sorted(differ))} of a parameter of some sizes and not "
            "of others, and how long the pieces of a parameter are depends on the number of "
            "ranks; use it as matrix_optimizer"
        )


def _trained(recipe: AnyTorch, shapes: list[tuple[int, ...]], *, seed: int) -> Tensor:
    """The first of some parameters after steps of one instance that has them all, with so much
    chance.
    """
    with aside():
        torch.manual_seed(seed)
        params = [draw(shape, index) for index, shape in enumerate(shapes)]
        # An object that a script has made keeps what it took of its lr without us, too.
        optimizer = (
            make(recipe, *params)
            if isinstance(recipe, ClientTorch)
            else make(recipe, *params, lr=_LR)
        )
        (group,) = optimizer.param_groups
        set_rate(group, _LR)
        if "weight_decay" in group:
            group["weight_decay"] = 0.0
        for step in range(_LONG):
            for index, param in enumerate(params):
                param.grad = draw(tuple(param.shape), 100 * (1 + index) + step)
            step_of(recipe, optimizer, shapes[0])
    return params[0]


def _in_instances(
    recipe: AnyTorch, new_rule: Callable[[], UpdateRule], value: Tensor, grads: list[Tensor]
) -> Tensor:
    """A parameter after as many steps, alone, and resumed on the way."""
    with aside():
        param, rule = value.clone(), new_rule()
        state = rule.init_state(param)
        for step, grad in enumerate(grads):
            if step in _RESUMED:
                rule, state = new_rule(), {key: value.clone() for key, value in state.items()}
            try:
                rule.update_(
                    [param],
                    [grad],
                    [state],
                    Hyper(lr=_LR, weight_decay=0.0, momentum=0.0, betas=(0.0, 0.0), eps=0.0),
                )
            except ERRORS as e:
                raise ConfigError(
                    f"{recipe.rule} cannot go on from its state after {step} steps, as after a "
                    f"load: {said(e)}"
                ) from e
    return param


def _agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)
