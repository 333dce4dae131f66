"""Checks of a class of ``torch.optim.Optimizer``: it must not do things that fail if each rank owns
only some parameters.

Note: what is tested
    One instance trains two parameters. In addition, each of them is trained alone, as a rank would
    do it, by instances that continue from a copy of the state every other step, and that are made
    with another learning rate. A parameter that may be cut is also trained in two pieces. The
    results must agree. Each step seeds the random numbers again, so that those for the first
    parameter are equal; the second parameter is not compared if the class draws random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.recipe import Shape
from ds_layerwise.optimizers.foreign.any_torch_recipe import AnyTorch
from ds_layerwise.optimizers.foreign.probe import (
    SMALL,
    aside,
    draw,
    flat,
    make,
    naming,
    set_rate,
    step_of,
)
from ds_layerwise.optimizers.rule import Hyper, UpdateRule

#: The number of steps of a check. Some effects come late.
_STEPS = 12

#: The attributes of an optimizer that are checked in another way.
_APART = ("defaults", "state", "param_groups")

#: A learning rate that no class has as its default.
_LR = 0.0123


def check(recipe: AnyTorch, new_rule: Callable[[], UpdateRule]) -> None:
    """Refuse a class that treats parts of a model differently from the whole, or differs after a
    load.

    Args:
        new_rule: makes a rule for the class that has seen no parameter yet.

    Raises:
        ConfigError: an instance cannot be made; its update of a parameter depends on others, which
            are on other ranks, or on something outside of the parameter's state; or it is to be cut
            by element, and draws random numbers, the update of an element depends on others, or the
            states of a piece depend on its length.
    """
    shapes: list[Shape] = [(60,), (24,)]
    if recipe.whole:
        shapes = [(6, 10), (10, 4)]
    together = _together(recipe, shapes)
    if not recipe.whole:
        _check_keys_of_pieces(recipe)

    def alone(index: int, part: slice = slice(None), seed: int = 0) -> Tensor:
        values = [value[part].clone() for value in _values(index, shapes[index])]
        return _alone(recipe, new_rule, values, seed)

    draws = not torch.equal(alone(0), alone(0, seed=_STEPS))
    by_chance = ""
    if draws:
        by_chance = (
            "it draws random numbers elsewhere than in step, for one parameter after another in "
            "their order, or from a generator of its own, or "
        )
    for index in range(1 if draws else 2):
        if not _agree(alone(index), together[index]):
            raise ConfigError(
                f"{recipe.rule} does otherwise where each parameter has an instance of its own "
                "that goes on from optimizer.state[param], as after a load, than where one has "
                f"all: {by_chance}what it does depends on other parameters, on something that it "
                "keeps elsewhere, or on more of the lr that it is made with than its parameter "
                "groups tell; this class cannot be used here"
            )
    if draws and not recipe.whole:
        raise ConfigError(
            f"{recipe.rule} draws random numbers, and parameters of the scalar optimizer are cut "
            "by element into pieces that lie on several ranks, which draw different ones; use it "
            "as matrix_optimizer"
        )
    if not recipe.whole:
        pieces = torch.cat([alone(0, slice(24)), alone(0, slice(24, 60))])
        if not _agree(pieces, together[0]):
            raise ConfigError(
                f"{recipe.rule} does to one element what depends on the others of its parameter, "
                "and parameters of the scalar optimizer are cut by element; use it as "
                "matrix_optimizer"
            )


def _check_keys_of_pieces(recipe: AnyTorch) -> None:
    """Refuse a class that keeps other states for a long piece than for a short one: the cuts of
    parameters depend on the number of ranks.

    Raises:
        ConfigError: names the states.
    """
    short, *others = [set(recipe.states((numel,))) for numel in (1, 60, SMALL + 1, 2**20)]
    if differ := set().union(*others).symmetric_difference(short):
        raise ConfigError(
            f"{recipe.rule} keeps {', '.join(sorted(differ))} of a parameter of some sizes and not "
            "of others, and how long the pieces of a parameter are depends on the number of "
            "ranks; use it as matrix_optimizer"
        )


def _values(index: int, shape: Shape) -> list[Tensor]:
    """Return the parameter with this ``index``, and the gradients of all steps."""
    with aside(index):
        return [draw(shape) for _ in range(_STEPS + 1)]


def _together(recipe: AnyTorch, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return the parameters after steps of one instance that has all of them.

    Raises:
        ConfigError: it keeps something outside of a parameter's state, which is not in a checkpoint
            and may combine all parameters; names the place.
    """
    values = list(map(_values, range(len(shapes)), shapes))
    params = [value[0] for value in values]
    with aside():
        optimizer = make(recipe, *params, lr=_LR)
    (group,) = optimizer.param_groups
    set_rate(group, _LR)
    if "weight_decay" in group:
        group["weight_decay"] = 0.0
    first: dict[str, str] = {}
    found: dict[str, None] = {}
    for step in range(_STEPS):
        for param, value in zip(params, values, strict=True):
            param.grad = value[1 + step]
        with aside(step):
            step_of(recipe, optimizer, shapes[0])
        for where, text in _elsewhere(optimizer).items():
            if first.setdefault(where, text) != text:
                found[where] = None
    ids = list(map(id, params))
    for key in optimizer.state:
        if id(key) not in ids:
            found[f"optimizer.state[{key!r}]"] = None
    if found:
        raise ConfigError(
            f"{recipe.rule} goes on from {', '.join(found)}, and not from optimizer.state[param] "
            "alone: ranks own some parameters each, and a checkpoint has what is kept of each; "
            "this class cannot be used here"
        )
    return params


def _elsewhere(optimizer: Optimizer) -> dict[str, str]:
    """Return everything that an optimizer keeps outside of its states, as text, by place."""
    (group,) = optimizer.param_groups
    found = {}
    for key, value in vars(optimizer).items():
        if key not in _APART:
            found[f"optimizer.{key}"] = _text(value)
    for key, value in group.items():
        # Numbers that count are known, and other changing numbers are refused.
        if key != "params" and not isinstance(value, (int, float)):
            found[f"optimizer.param_groups[0][{key!r}]"] = _text(value)
    return found


def _text(value: Any) -> str:
    parts = flat(value)
    for path, each in parts.items():
        if isinstance(each, Tensor):
            parts[path] = each.tolist()
    return str(parts)


def _alone(
    recipe: AnyTorch,
    new_rule: Callable[[], UpdateRule],
    values: list[Tensor],
    seed: int,
) -> Tensor:
    """Return a parameter after steps of its own instances."""
    param, *grads = values
    rule = new_rule()
    state = rule.init_state(param)
    hyper = Hyper(lr=_LR, weight_decay=0.0, momentum=0.0, betas=(0.0, 0.0), eps=0.0)
    for step, grad in enumerate(grads):
        if step % 2:
            rule = new_rule()
            state = {key: value.clone() for key, value in state.items()}
        what = f"{recipe.rule} cannot go on from its state after {step} steps, as after a load"
        with naming(what), aside(seed + step):
            rule.update_([param], [grad], [state], hyper)
    return param


def _agree(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)
