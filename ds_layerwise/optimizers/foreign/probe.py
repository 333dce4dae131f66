"""The states that a class of ``torch.optim.Optimizer`` keeps, found by running a few steps.

Note: how a state is found without its memory
    A class makes its state at its first step. So it steps on tensors of the device "meta", which
    have shapes and no memory. If that fails, because the class reads computed values, it steps on a
    small shape whose sides are all different. If a side of a state equals one of them, or the
    product of all, it stands for the same of the real shape; any other side is a constant. Real
    steps raise an error if this was wrong.

Note: numbers
    Classes also keep Python numbers, in a state or in the parameter group. A number that counts
    steps is ``step`` in this package. Another number that changes is a 0-d float64 state of its
    own. 0-d tensors are on the host.
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

from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError
from ds_layerwise.optimizers.base.dtypes import DTYPE_BYTES
from ds_layerwise.optimizers.base.recipe import Shape, StateSpec
from ds_layerwise.optimizers.foreign.any_torch_recipe import AnyTorch
from ds_layerwise.optimizers.foreign.client_recipe import ClientTorch

#: The name of the state that counts steps.
COUNT = "step"

#: The number of steps in a probe. By then all states must exist, and numbers must have shown how
#: they change.
STEPS = 3

#: Up to this number of elements, a probe uses the real shape, with memory.
SMALL = 4096

#: The sides of the sample shape. None is another one, a product of others, or a likely constant in
#: a class.
_SAMPLE = (5, 7, 11, 13, 17, 19)

#: The numbers of a group that this package sets as well.
_OF_ALL_CLASSES = ("lr", "weight_decay")

Path = tuple[str | int, ...]


class UnableError(ConfigError):
    """The class cannot be constructed for the tensors of a probe, or cannot step on them."""


@dataclass(frozen=True)
class Leaf:
    """A tensor, or a number that changes, in the states of a class."""

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

    states: tuple[Any, ...]
    """The state after each of the first steps; later ones are like the last. There is a
    :class:`Leaf` in place of each tensor, or number that changes.
    """
    groups: Mapping[str, Leaf]
    """The numbers of a parameter group that count steps, by key."""
    flops: int

    def after(self, step: int) -> Any:
        """Return the state after ``step`` steps, one or more."""
        return self.states[min(step, len(self.states)) - 1]

    def specs(self) -> dict[str, StateSpec]:
        """Return the specs of all states by their names in this package."""
        specs = {}
        for leaf in flat(self.states).values():
            if isinstance(leaf, Leaf) and leaf.ahead is None:
                specs[leaf.key] = leaf.spec
        return {**specs, COUNT: StateSpec((), on_host=True)}


def class_of(recipe: AnyTorch) -> type[Optimizer]:
    """Return the class of ``recipe``.

    Raises:
        ConfigError: there is none at its path, or it is not a ``torch.optim.Optimizer``.
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
    """Return a new optimizer of ``recipe`` for ``params``.

    Raises:
        ConfigError: the class does not accept the arguments, or it has no ``lr``.
    """
    if isinstance(recipe, ClientTorch):
        with naming(f"{recipe.rule} cannot be made for a parameter"):
            made: Optimizer = recipe.prototype.make(params)
            return made
    of_groups = sorted({"lr", "weight_decay", "params"} & recipe.arguments.keys())
    if of_groups:
        raise ConfigError(
            f"{recipe.rule} is given {', '.join(of_groups)}, which parameter groups have; set "
            "optimizer.params.lr (muon_lr for matrices) and optimizer.params.weight_decay"
        )
    kind: Any = class_of(recipe)
    with naming(f"{recipe.rule} cannot be made with {recipe.arguments or 'no arguments'}"):
        optimizer: Optimizer = kind(list(params), lr=lr, **recipe.arguments)
    if "lr" not in optimizer.param_groups[0]:
        raise ConfigError(
            f"{recipe.rule} keeps no lr in its parameter groups, so that no schedule could move it"
        )
    return optimizer


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Set ``lr`` of a parameter group in the form of its present rate: a number, or a tensor, which
    its class may require.
    """
    rate = group["lr"]
    group["lr"] = lr
    if isinstance(rate, Tensor):
        group["lr"] = torch.full_like(rate, lr)


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Replace an error of foreign code by one that names ``what`` failed.

    Raises:
        UnableError: that code has raised.
    """
    try:
        yield
    except FOREIGN_ERRORS as e:
        text = " ".join(str(e).split())
        raise UnableError(f"{what}: {type(e).__name__}: {text}") from e


def step_of(recipe: AnyTorch, optimizer: Optimizer, shape: Shape) -> None:
    """Make one step of a probe.

    Raises:
        UnableError: the class cannot step.
    """
    with naming(f"{recipe.rule} cannot step on a parameter of {shape}"):
        optimizer.step()


def flat(value: Any) -> dict[Path, Any]:
    """Return every leaf of nested dicts, lists and tuples, by its path."""
    found: dict[Path, Any] = {}
    rebuilt(value, found.__setitem__)
    return found


def rebuilt(value: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """Return the same dicts, lists and tuples, with each leaf replaced by the result of
    ``change``.
    """
    if isinstance(value, Mapping):
        found = {}
        for key, each in value.items():
            found[key] = rebuilt(each, change, (*path, key))
        return found
    if isinstance(value, (list, tuple)):
        items = [rebuilt(each, change, (*path, index)) for index, each in enumerate(value)]
        if isinstance(value, tuple):
            return tuple(items)
        return items
    return change(path, value)


@lru_cache(maxsize=None)
def kept_of(recipe: AnyTorch, shape: Shape) -> Kept:
    """Return the states that the class of ``recipe`` keeps for a parameter of ``shape``.

    Raises:
        ConfigError: it cannot step on it, or keeps something that does not follow from shapes, or
            that is neither a tensor nor a number.
    """
    if math.prod(shape) <= SMALL:
        return _observed(recipe, shape, "cpu", {})
    sample = _SAMPLE[-len(shape) :]
    small = _observed(recipe, sample, "cpu", {})
    found = flat(small.states)
    known = {path[1:]: leaf for path, leaf in found.items() if _is_0d(leaf)}
    try:
        return _observed(recipe, shape, "meta", known)
    except UnableError:
        sides = {math.prod(sample): math.prod(shape), **dict(zip(sample, shape, strict=True))}
        return Kept(rebuilt(small.states, lambda _, leaf: _grown(leaf, sides)), small.groups, 0)


def _is_0d(leaf: Any) -> bool:
    return isinstance(leaf, Leaf) and leaf.kind is Tensor and not leaf.spec.shape


def _grown(leaf: Any, sides: Mapping[int, int]) -> Any:
    if not isinstance(leaf, Leaf):
        return leaf
    shape = tuple(sides.get(side, side) for side in leaf.spec.shape)
    return replace(leaf, spec=replace(leaf.spec, shape=shape))


def _observed(recipe: AnyTorch, shape: Shape, device: str, known: Mapping[Path, Leaf]) -> Kept:
    """Return the states that the class keeps for a parameter on ``device``.

    Args:
        known: the 0-d tensors found by a probe with memory. Only such a probe shows which of them
            count.
    """
    states = []
    groups = []
    with aside(), FlopCounterMode(display=False) as counter:
        param = draw(shape).to(device)
        optimizer = make(recipe, param)
        (group,) = optimizer.param_groups
        for _ in range(STEPS):
            param.grad = torch.randn_like(param)
            step_of(recipe, optimizer, shape)
            states.append(rebuilt(dict(optimizer.state.get(param, {})), _copied))
            numbers = dict(group)
            for key, value in group.items():
                if key in _OF_ALL_CLASSES or not isinstance(value, (int, float)):
                    del numbers[key]
            groups.append(numbers)
    seen = list(map(flat, states))

    def leaf(path: Path, value: Any) -> Any:
        found = _leaf(recipe, path, value, [each.get(path) for each in seen])
        if _is_0d(found):
            return known.get(path, found)
        return found

    counts = {}
    for key, value in groups[-1].items():
        count = _leaf(recipe, (key,), value, [each.get(key) for each in groups])
        if not isinstance(count, Leaf):
            continue
        if count.ahead is None:
            raise ConfigError(
                f"{recipe.rule} computes {key} for all parameters of a group together, and ranks "
                "own some each; it cannot run on parts of a model"
            )
        counts[key] = count
    kept = tuple(rebuilt(state, leaf) for state in states)
    return Kept(kept, counts, counter.get_total_flops() // STEPS)


def plain(value: Any) -> Any:
    """Return the tensor that an ``nn.Parameter`` is, and anything else as it is."""
    return value.detach() if type(value) is torch.nn.Parameter else value


def _copied(_: Path, value: Any) -> Any:
    value = plain(value)
    return value.clone() if type(value) is Tensor else value


def _leaf(recipe: AnyTorch, path: Path, value: Any, seen: list[Any]) -> Any:
    """Return a :class:`Leaf` for ``value``, or the value itself if it never changes.

    Args:
        seen: the values in its place after each step.
    """
    if value is None or isinstance(value, (str, torch.dtype, torch.device)):
        return value
    key = ".".join(map(str, path))
    numbers = list(map(_number, seen))
    first = numbers[0]
    ahead = None
    if isinstance(first, (int, float)) and float(first).is_integer():
        start = int(first)
        if numbers == list(range(start, start + STEPS)):
            ahead = start - 1
    spec = StateSpec((), "float64", on_host=True)
    # A subclass, as for quantised states, would come back from this package's state as a plain
    # tensor.
    if type(value) is Tensor:
        spec = StateSpec(tuple(value.shape), str(value.dtype)[6:], on_host=not value.dim())
        if spec.dtype not in DTYPE_BYTES:
            raise ConfigError(
                f"{recipe.rule} keeps {key} in {spec.dtype}, which cannot be saved; known: "
                f"{', '.join(DTYPE_BYTES)}"
            )
    elif isinstance(value, Tensor):
        raise ConfigError(
            f"{recipe.rule} keeps {key} of a parameter in a tensor of the class "
            f"{type(value).__name__}, which would come back as a plain one; this class cannot be "
            "used here"
        )
    elif not isinstance(value, (int, float)):
        raise ConfigError(
            f"{recipe.rule} keeps {key} of a parameter, which is neither tensor nor number, got "
            f"{type(value).__name__}; it could not be saved"
        )
    elif ahead is None and numbers == [first] * STEPS:
        return value
    if ahead is None and key in (COUNT, "fp32"):
        key = f"own.{key}"
    return Leaf(key, type(value), spec, ahead)


def _number(value: Any) -> Any:
    """Return ``value``, or the number in a tensor; None if it has axes or no memory."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() or value.is_meta:
        return None
    return value.item()


def draw(shape: Shape) -> Tensor:
    """Return random numbers from the generator that :func:`aside` has seeded."""
    return torch.randn(shape, dtype=torch.float32, device="cpu")


@contextmanager
def aside(seed: int = 0) -> Iterator[None]:
    """Draw from ``seed`` inside, without changing the run's random numbers, and ignore its default
    device.
    """
    state, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            # torch.manual_seed would also set the generators of accelerators.
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            numpy.random.seed(seed)
            yield
    finally:
        random.setstate(state)
        numpy.random.set_state(of_numpy)
