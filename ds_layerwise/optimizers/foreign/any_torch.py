"""Foreign optimizer classes as rules: an instance of the class steps for every parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.foreign import any_torch_recipe as recipes
from ds_layerwise.optimizers.foreign import probe, probe_checks
from ds_layerwise.optimizers.foreign.probe import COUNT, Kept, Leaf, set_rate
from ds_layerwise.optimizers.rule import Hyper, OneByOne, State


@dataclass(frozen=True, eq=False)
class AnyTorch(OneByOne):
    """A class of ``torch.optim.Optimizer``, on float32 masters that are shaped as matrices, or on
    1-D pieces.

    State: the states of the class, found by :mod:`.optimizers.foreign.probe`, and ``step``. Every
    parameter has an optimizer of its own for as long as its state exists. It works in the memory of
    the state if the class writes in place; tensors that the class makes anew are copied there.

    ``lr`` and, if the class has one, ``weight_decay`` are those of the group. If it has none,
    weight decay is decoupled: ``W -= lr * weight_decay * W`` before the step.
    """

    recipe: recipes.AnyTorch
    _optimizers: WeakTensorKeyDictionary = field(
        default_factory=WeakTensorKeyDictionary, init=False, repr=False
    )

    @classmethod
    def of(cls, recipe: recipes.AnyTorch) -> AnyTorch:
        """Return the rule that runs ``recipe``.

        Raises:
            ConfigError: as in :func:`.optimizers.foreign.probe_checks.check`.
        """
        probe_checks.check(recipe, lambda: cls(recipe))
        return cls(recipe)

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Let the parameter's own optimizer make a step.

        Raises:
            StepError: the class keeps other states than in its probe.
        """
        step = int(state[COUNT])
        kept = probe.kept_of(self.recipe, tuple(param.shape))
        optimizer: Optimizer | None = self._optimizers.get(  # type: ignore[no-untyped-call]
            state[COUNT]
        )
        if optimizer is None or not step:
            optimizer = self._optimizers[state[COUNT]] = probe.make(self.recipe, param)
        (group,) = optimizer.param_groups
        group.update(hyper.of_client)
        group["params"] = [param]
        set_rate(group, hyper.lr)
        if "weight_decay" in group:
            group["weight_decay"] = hyper.weight_decay
        elif hyper.weight_decay:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        if step:
            for key, leaf in kept.groups.items():
                group[key] = _value(leaf, state, step)
            optimizer.state[param] = probe.rebuilt(
                kept.after(step), lambda _, leaf: _value(leaf, state, step)
            )
        # A class may write to the gradient, which may be read after the step.
        param.grad = grad.clone()
        try:
            optimizer.step()
            state[COUNT] += 1
            self._keep(optimizer.state.get(param, {}), param, kept, state)
        finally:
            # The optimizer outlives the step, but its tensors may be in temporary memory.
            param.grad = None
            group["params"] = []
            optimizer.state.clear()

    def _keep(
        self,
        found: Mapping[Any, Any],
        param: Tensor,
        kept: Kept,
        state: State,
    ) -> None:
        """Copy the tensors that the class has made anew into ``state``.

        Raises:
            StepError: they differ from those of the probe.
        """
        step = int(state[COUNT])
        who = f"of a parameter of {tuple(param.shape)}"
        places = probe.flat(kept.after(step))
        values = probe.flat(found)
        for path, found_one in values.items():
            if isinstance(found_one, Tensor) and not isinstance(places.get(path), Leaf):
                raise StepError(
                    f"{self.recipe.rule} keeps {'.'.join(map(str, path))} {tuple(found_one.shape)} "
                    f"{who} after {step} steps, which it did not in its probe; nothing has a place "
                    "for it: this class cannot be used here"
                )
        for path, leaf in places.items():
            if not isinstance(leaf, Leaf) or leaf.ahead is not None:
                continue
            place = state[leaf.key]
            value = probe.plain(values.get(path))
            if leaf.kind is not Tensor:
                place.fill_(value)
            elif _told(value) != _told(place):
                raise StepError(
                    f"{self.recipe.rule} keeps {leaf.key} {who} as {_told(value)} after {step} "
                    f"steps, and its probe said {_told(place)}: this class cannot be used here"
                )
            elif value.data_ptr() != place.data_ptr():
                place.copy_(value)


def _told(value: Any) -> str:
    if type(value) is Tensor:
        return f"{tuple(value.shape)} in {value.dtype}"
    return repr(value)


def _value(leaf: Any, state: State, step: int) -> Any:
    """Return the value that a class finds in the place of ``leaf`` after ``step`` steps."""
    if not isinstance(leaf, Leaf):
        return leaf
    if leaf.ahead is None:
        value = state[leaf.key]
        return value if leaf.kind is Tensor else leaf.kind(value.item())
    count = step + leaf.ahead
    if leaf.kind is not Tensor:
        return leaf.kind(count)
    return torch.tensor(count, dtype=getattr(torch, leaf.spec.dtype), device="cpu")
