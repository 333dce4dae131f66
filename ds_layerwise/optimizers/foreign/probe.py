"""The states that a class of ``torch.optim.Optimizer`` keeps, found by a few steps of it.

Note: how a state is found, without the memory of one
    A class makes its state when it first steps. So it steps on tensors of the device "meta", which
    have shapes and no memory. Where that fails, because a class looks into what it has computed, it
    steps on a small shape whose sides are all different. A side of a state that is one of them, or
    all of them together, is the same of the real shape; any other stays as it is. Whether that is
    true shows at the real steps, which raise otherwise.

Note: numbers
    Beside tensors, classes keep numbers of Python, in a state or in the parameter group. One that
    counts steps is ``step`` to this package; another that changes is a state of its own, without
    axes, in float64.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.dtypes import DTYPE_BYTES
from ds_layerwise.recipes.base.recipe import StateSpec
from ds_layerwise.recipes.rules.any_torch_recipe import AnyTorch
from ds_layerwise.recipes.rules.client_recipe import ClientTorch

#: The state that counts steps, whatever else there is.
COUNT = "step"

#: Steps of a probe. What a class keeps must be there, and its numbers must have shown how they
#: change, by then.
STEPS = 3

#: Up to so many elements, a probe takes the real shape, with memory.
SMALL = 4096

#: Sides of which no one is another's, nor a product of others, nor what a class has for a constant.
_SAMPLE = (5, 7, 11, 13, 17, 19)

#: What code that nobody here wrote raises when it does not like what it gets.
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor, or a number that changes, in what a class keeps."""

    key: str
    """The name in this package; :data:`COUNT` for one that counts steps."""
    kind: type
    """Tensor, or the type of the number."""
    spec: StateSpec
    ahead: int | None = None
    """The number of steps that a counter is ahead of them; None for others."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The states that a class keeps of a parameter of one shape."""

    states: tuple[Any, ...]
    """After each of the first steps, and all later ones as after the last: its state, with a
    :class:`Leaf` in each place that has a tensor, or a number that changes."""
    groups: Mapping[str, Leaf]
    """The numbers of a parameter group that count steps, by key."""
    flops: int

    def after(self, step: int) -> Any:
        """The state after ``step`` steps, one or more."""
        return self.states[min(step, len(self.states)) - 1]

    def specs(self) -> dict[str, StateSpec]:
        """Return every state by the name in this package."""
        specs = {}
        for state in self.states:
            for _, leaf in walk(state):
                if isinstance(leaf, Leaf) and leaf.ahead is None:
                    specs[leaf.key] = leaf.spec
        return {**specs, COUNT: StateSpec((), on_host=True)}


def class_of(recipe: AnyTorch) -> type[Optimizer]:
    """The class of ``recipe``.

    Raises:
        ConfigError: there is none at its path, or it is no ``torch.optim.Optimizer``.
    """
    module, _, name = recipe.rule.partition(":")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"{recipe.rule} cannot be imported ({e}); write the path of a class as "
            "package.module:Class, and install its package on every node"
        ) from e
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(f"{recipe.rule} is no class of torch.optim.Optimizer, got {found!r}")
    return found


def make(recipe: AnyTorch, *params: Tensor, lr: float = 1e-3) -> Optimizer:
    """A new optimizer of ``recipe`` for ``params``.

    Raises:
        ConfigError: the class does not take the arguments, or it has no ``lr``.
    """
    if isinstance(recipe, ClientTorch):
        made: Optimizer = recipe.prototype.make(params)
        return made
    of_groups = sorted({"lr", "weight_decay", "params"} & recipe.arguments.keys())
    if of_groups:
        raise ConfigError(
            f"{recipe.rule} is given {', '.join(of_groups)}, which parameter groups have; set "
            "optimizer.params.lr (muon_lr for matrices) and optimizer.params.weight_decay"
        )
    kind = class_of(recipe)
    try:
        optimizer = kind(list(params), lr=lr, **recipe.arguments)  # type: ignore[call-arg]
    except ERRORS as e:
        raise ConfigError(
            f"{recipe.rule} cannot be made with {recipe.arguments or 'no arguments'}: {said(e)}"
        ) from e
    if "lr" not in optimizer.param_groups[0]:
        raise ConfigError(
            f"{recipe.rule} keeps no lr in its parameter groups, so that no schedule could move it"
        )
    return optimizer


def step_of(recipe: AnyTorch, optimizer: Optimizer, shape: tuple[int, ...]) -> None:
    """Take one step of a probe.

    Raises:
        ConfigError: the class cannot.
    """
    try:
        optimizer.step()
    except ERRORS as e:
        raise ConfigError(f"{recipe.rule} cannot step on a parameter of {shape}: {said(e)}") from e


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf of nested dicts, lists and tuples, with the path to it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from walk(each, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from walk(each, (*path, index))
    else:
        yield path, value


def rebuilt(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The same dicts, lists and tuples around what ``change`` makes of what lies in them."""
    if isinstance(value, Mapping):
        return {key: rebuilt(each, change, (*path, key)) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(
            rebuilt(each, change, (*path, index)) for index, each in enumerate(value)
        )
    return change(path, value)


@lru_cache(maxsize=None)
def kept_of(recipe: AnyTorch, shape: tuple[int, ...]) -> Kept:
    """Return the states that the class of ``recipe`` keeps of a parameter of ``shape``.

    Raises:
        ConfigError: it cannot step on it, or keeps what cannot be told from shapes, or is neither
            tensor nor number.
    """
    if math.prod(shape) <= SMALL:
        return _observed(recipe, shape, "cpu")
    sample = _SAMPLE[-len(shape) :]
    small = _observed(recipe, sample, "cpu")
    try:
        return _counted_as(small, _observed(recipe, shape, "meta"))
    except ConfigError:
        return _of_shape(small, sample, shape)


def _counted_as(small: Kept, large: Kept) -> Kept:
    """``large`` with what ``small`` has for tensors without axes: only memory shows what these
    count.
    """
    known = [dict(walk(state)) for state in small.states]

    def told(index: int) -> Callable[[Path, Any], Any]:
        def change(path: Path, leaf: Any) -> Any:
            twin = known[index].get(path)
            if not (
                isinstance(leaf, Leaf)
                and isinstance(twin, Leaf)
                and leaf.kind is twin.kind is Tensor
            ):
                return leaf
            return leaf if leaf.spec.shape or twin.spec.shape else twin

        return change

    return Kept(
        tuple(rebuilt(state, told(index)) for index, state in enumerate(large.states)),
        large.groups,
        large.flops,
    )


def states_of(recipe: AnyTorch, shape: tuple[int, ...]) -> dict[str, StateSpec]:
    """Return the states of a parameter of ``shape`` by name. Raises as :func:`kept_of`."""
    return kept_of(recipe, shape).specs()


def refusal_of(recipe: AnyTorch, shape: tuple[int, ...]) -> str | None:
    """Why the class cannot step on a matrix of ``shape``; None if it can."""
    try:
        kept_of(recipe, shape)
    except ConfigError as e:
        return f"cannot be trained by {recipe.rule}: {e}"
    return None


def _observed(recipe: AnyTorch, shape: tuple[int, ...], device: str) -> Kept:
    states: list[Any] = []
    groups: list[dict[Path, Any]] = []
    with aside(), FlopCounterMode(display=False) as counter:
        param = draw(shape, 0).to(device)
        optimizer = make(recipe, param)
        (group,) = optimizer.param_groups
        for step in range(STEPS):
            param.grad = draw(shape, 1 + step).to(device)
            step_of(recipe, optimizer, shape)
            states.append(
                rebuilt(dict(optimizer.state.get(param, {})), lambda _, value: _described(value))
            )
            groups.append(
                {
                    (key,): value
                    for key, value in group.items()
                    if key not in ("lr", "weight_decay", "params")
                    and isinstance(value, (int, float))
                }
            )
    seen = [dict(walk(state)) for state in states]
    return Kept(
        tuple(
            rebuilt(state, lambda path, value: _leaf(recipe, seen, path, value)) for state in states
        ),
        _counts_of_group(recipe, groups),
        counter.get_total_flops() // STEPS,
    )


def _counts_of_group(recipe: AnyTorch, seen: list[dict[Path, Any]]) -> dict[str, Leaf]:
    counts = {}
    for path, value in seen[-1].items():
        leaf, (key,) = _leaf(recipe, seen, path, value), path
        if isinstance(leaf, Leaf) and leaf.ahead is None:
            raise ConfigError(
                f"{recipe.rule} computes {key} for all parameters of a group together, and ranks "
                "own some each; it cannot run on parts of a model"
            )
        if isinstance(leaf, Leaf):
            counts[str(key)] = leaf
    return counts


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The description of a tensor: with its value where it has no axes and memory."""

    shape: tuple[int, ...]
    dtype: str
    on_host: bool
    value: float | None


def _described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    known = value.dim() == 0 and value.device.type == "cpu"
    return _Tensor(
        tuple(value.shape),
        str(value.dtype).removeprefix("torch."),
        known,
        float(value) if known else None,
    )


def _leaf(recipe: AnyTorch, seen: list[dict[Path, Any]], path: Path, value: Any) -> Any:
    """Return the entry at ``path`` of a description: a :class:`Leaf`, or the value itself where it
    never changes.
    """
    if value is None or isinstance(value, (str, torch.dtype, torch.device)):
        return value
    key = ".".join(map(str, path))
    if not isinstance(value, (_Tensor, bool, int, float)):
        raise ConfigError(
            f"{recipe.rule} keeps {key} of a parameter, which is neither tensor nor number, got "
            f"{type(value).__name__}; it could not be saved"
        )
    found = []
    for step in seen:
        number = step.get(path)
        found.append(number.value if isinstance(number, _Tensor) else number)
    ahead = _ahead(found)
    if ahead is None and key in (COUNT, "fp32"):
        key = f"own.{key}"
    if isinstance(value, _Tensor):
        if value.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"{recipe.rule} keeps {key} in {value.dtype}, which cannot be saved; known: "
                f"{', '.join(DTYPE_BYTES)}"
            )
        return Leaf(key, Tensor, StateSpec(value.shape, value.dtype, value.on_host), ahead)
    if ahead is None and all(each == found[0] for each in found):
        return value
    return Leaf(key, type(value), StateSpec((), "float64", on_host=True), ahead)


def _ahead(found: list[Any]) -> int | None:
    """Return by how much the number ``found`` after the steps of a probe is ahead of counting them;
    None if it does not count.
    """
    if not all(
        isinstance(each, (int, float)) and not isinstance(each, bool) and math.isfinite(each)
        for each in found
    ):
        return None
    ahead = found[0] - 1
    return (
        int(ahead)
        if ahead == int(ahead) and found == [step + ahead for step in range(1, STEPS + 1)]
        else None
    )


def _of_shape(small: Kept, sample: tuple[int, ...], shape: tuple[int, ...]) -> Kept:
    """Return the states of ``shape``, from the states of ``sample``."""
    sides = {math.prod(sample): math.prod(shape), **dict(zip(sample, shape, strict=True))}

    def grown(_: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Leaf):
            return leaf
        return replace(
            leaf,
            spec=replace(leaf.spec, shape=tuple(sides.get(side, side) for side in leaf.spec.shape)),
        )

    return Kept(tuple(rebuilt(state, grown) for state in small.states), small.groups, 0)


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers, the same for the same seed."""
    return torch.randn(
        shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
    )


@contextmanager
def aside() -> Iterator[None]:
    """Leave the random numbers of the run as they are, and its default device out of what a class
    makes.
    """
    state, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    finally:
        random.setstate(state)
        numpy.random.set_state(of_numpy)


def said(error: Exception) -> str:
    """``error`` in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
