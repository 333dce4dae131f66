"""The states that a class of ``torch.optim.Optimizer`` keeps for a parameter.

Note: how they are found
    A class makes its states at its first step. So it makes two on a tensor of the device "meta",
    which has a shape and no memory. If that fails, because the class reads computed values, it
    makes them on a small parameter whose sides are all different: a side of a state that equals one
    of them, or the product of all, stands for the same of the real shape; any other side is a
    constant. Real steps raise an error if this was wrong.

    A number in a state that the second step changes is a 0-d float64 state here. A number named
    :data:`COUNT` counts steps. 0-d tensors are on the host.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError, few
from ds_layerwise.optimizers.dtypes import DTYPE_BYTES
from ds_layerwise.optimizers.recipe import Shape, States, StateSpec

#: The name of the state that counts steps.
COUNT = "step"

#: Up to this number of elements, a class that reads values steps on the real shape.
_SMALL = 4096

#: The sides of the small parameter. None is another one, a product of others, or a likely constant
#: in a class.
_SIDES = (5, 7, 11, 13, 17, 19)

#: The number of steps that a class is asked for: two show which numbers change.
_STEPS = 2

#: The place of a count of steps in a parameter group.
_COUNT_OF_GROUP = f"optimizer.param_groups[0].{COUNT}"


class ForeignClass(Protocol):
    """A class with its arguments."""

    @property
    def rule(self) -> str:
        """The path of the class."""

    def make(self, *params: Tensor) -> Optimizer:
        """Return a new optimizer for ``params``."""


class _UnableError(ConfigError):
    """The class cannot be constructed for a parameter, or cannot step on it."""


@dataclass(frozen=True)
class Leaf:
    """A tensor or a number in the states of a class."""

    key: str
    """The name in this package; :data:`COUNT` if it counts steps."""
    kind: type
    """Tensor, or the type of the number."""
    spec: StateSpec
    ahead: int | None
    """The difference of a counter to the number of steps; None for others."""


@dataclass(frozen=True)
class Kept:
    """The states that a class keeps for a parameter of one shape."""

    state: Any
    """The state with a :class:`Leaf` in place of each tensor or number."""
    ahead: int | None
    """The difference to the number of steps of a counter in a parameter group; None without one."""
    flops: int

    def specs(self) -> States:
        """Return the specs of all states by their names in this package."""
        specs = {}
        for leaf in flat(self.state).values():
            if isinstance(leaf, Leaf) and leaf.ahead is None:
                specs[leaf.key] = leaf.spec
        return {**specs, COUNT: StateSpec((), on_host=True)}


@cache
def kept_of(kind: ForeignClass, shape: Shape) -> Kept:
    """Return the states that the class of ``kind`` keeps for a parameter of ``shape``.

    Raises:
        ConfigError: it cannot step on it, goes on from something that is not in the state of a
            parameter, or keeps something that is neither a tensor nor a number.
    """
    try:
        return _asked(kind, shape, "meta")
    except _UnableError:
        small = shape
    if math.prod(shape) > _SMALL:
        small = _SIDES[-len(shape) :]
    kept = _asked(kind, small, "cpu")
    sides = {math.prod(small): math.prod(shape), **dict(zip(small, shape, strict=True))}

    def grown(_: str, leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        of_real = tuple(sides.get(side, side) for side in leaf.spec.shape)
        return replace(leaf, spec=replace(leaf.spec, shape=of_real))

    return replace(kept, state=rebuilt(kept.state, grown))


def _asked(kind: ForeignClass, shape: Shape, device: str) -> Kept:
    """Return the states that the class makes for a parameter on ``device``."""
    with _aside(), FlopCounterMode(display=False) as counter:
        param = torch.randn(shape, dtype=torch.float32, device="cpu").to(device)
        with naming(f"{kind.rule} cannot be made for a parameter"):
            optimizer = kind.make(param)
        before = _elsewhere(optimizer)
        states = []
        for _ in range(_STEPS):
            param.grad = torch.randn_like(param)
            with naming(f"{kind.rule} cannot step on a parameter of {shape}"):
                optimizer.step()
            states.append(rebuilt(optimizer.state.get(param, {}), lambda _, value: value))
    after = _elsewhere(optimizer)
    changed = [where for where in after if after[where] != before.get(where)]
    changed += [f"optimizer.state[{key!r}]" for key in optimizer.state if key is not param]
    if changed and changed != [_COUNT_OF_GROUP]:
        raise ConfigError(
            f"{kind.rule} goes on from {few(changed)}, and not from optimizer.state[param] "
            "alone: ranks own some parameters each, and a checkpoint has what is kept of each; "
            "this class cannot be used here"
        )
    first, last = states
    seen = flat(first)

    def leaf(path: str, value: Any) -> Any:
        return _leaf(kind.rule, path, plain_tensor(value), seen.get(path))

    return Kept(
        state=rebuilt(last, leaf),
        ahead=after[_COUNT_OF_GROUP] - _STEPS if changed else None,
        flops=counter.get_total_flops() // _STEPS,
    )


def _elsewhere(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers that an optimizer has outside of its states, and the versions of its
    tensors there, by place.
    """
    (group,) = optimizer.param_groups
    places = {}
    for key, value in vars(optimizer).items():
        if key not in ("defaults", "state", "param_groups"):
            places[f"optimizer.{key}"] = value
    for key, value in group.items():
        if key not in ("params", "lr", "weight_decay"):
            places[f"optimizer.param_groups[0].{key}"] = value
    found = {}
    for path, value in flat(places).items():
        if isinstance(value, Tensor):
            found[path] = (id(value), value._version)
        elif type(value) in (int, float):
            found[path] = value
    return found


def _leaf(rule: str, key: str, value: Any, first: Any) -> Any:
    """Return a :class:`Leaf` for ``value``, or the value itself if it is a constant.

    Args:
        first: the value in its place one step before.
    """
    if value is None or isinstance(value, (str, torch.dtype, torch.device)):
        return value
    spec = StateSpec((), "float64", on_host=True)
    # A subclass, as for quantised states, would come back from this package's state as a plain
    # tensor.
    if type(value) is Tensor:
        spec = StateSpec(tuple(value.shape), str(value.dtype)[6:], on_host=not value.dim())
    elif not isinstance(value, (int, float)):
        raise ConfigError(
            f"{rule} keeps {key} of a parameter as {type(value).__name__}, which is neither a "
            "plain tensor nor a number; it could not be saved"
        )
    elif value == first:
        return value
    if spec.dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"{rule} keeps {key} in {spec.dtype}, which cannot be saved; known: "
            f"{', '.join(DTYPE_BYTES)}"
        )
    ahead = None
    if key == COUNT and not spec.shape:
        ahead = 0
        if not (isinstance(value, Tensor) and value.is_meta):
            ahead = int(value) - _STEPS
    elif key in (COUNT, "fp32"):
        key = f"own.{key}"
    return Leaf(key, type(value), spec, ahead)


def plain_tensor(value: Any) -> Any:
    """Return the tensor that an ``nn.Parameter`` is, and anything else as it is."""
    return value.detach() if type(value) is torch.nn.Parameter else value


def flat(value: Any) -> dict[str, Any]:
    """Return every leaf of nested dicts, lists and tuples, by its path: keys with dots between."""
    found: dict[str, Any] = {}
    rebuilt(value, found.__setitem__)
    return found


def rebuilt(value: Any, change: Callable[[str, Any], Any], before: str = "") -> Any:
    """Return the same dicts, lists and tuples, with each leaf replaced by the result of ``change``
    of its path, which begins with ``before``.
    """
    if isinstance(value, Mapping):
        found = {}
        for key, each in value.items():
            found[key] = rebuilt(each, change, f"{before}{key}.")
        return found
    if isinstance(value, (list, tuple)):
        items = [rebuilt(each, change, f"{before}{index}.") for index, each in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    return change(before.removesuffix("."), value)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Replace an error of foreign code by one that names ``what`` failed.

    Raises:
        _UnableError: that code has raised.
    """
    try:
        yield
    except ConfigError:
        raise
    except FOREIGN_ERRORS as e:
        text = " ".join(str(e).split())
        raise _UnableError(f"{what}: {type(e).__name__}: {text}") from e


@contextmanager
def _aside() -> Iterator[None]:
    """Leave the run's random numbers unchanged, and ignore its default device."""
    state, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    finally:
        random.setstate(state)
        numpy.random.set_state(of_numpy)
