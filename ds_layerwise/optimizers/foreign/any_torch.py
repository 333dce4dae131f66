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
from ds_layerwise.optimizers.foreign.any_torch_recipe import COUNT, Kept, Leaf, kept_of, rebuilt
from ds_layerwise.optimizers.rule import Hyper, OneByOne, State


@dataclass(frozen=True, eq=False)
class AnyTorch(OneByOne):
    """A class of ``torch.optim.Optimizer``, on float32 masters that are shaped as matrices, in
    their own shapes, or cut into 1-D pieces.

    State: the states of the class, see :mod:`.optimizers.foreign.any_torch_recipe`, and ``step``.
    Every parameter has an optimizer of its own for as long as its state exists. It works in the
    memory of the state if the class writes in place; tensors that the class makes anew are copied
    there.

    ``lr`` and, if the class has one, ``weight_decay`` are those of the group. If it has none,
    weight decay is decoupled: ``W -= lr * weight_decay * W`` before the step.
    """

    recipe: recipes.AnyTorch
    _optimizers: WeakTensorKeyDictionary = field(
        default_factory=WeakTensorKeyDictionary, init=False, repr=False
    )

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Let the parameter's own optimizer make a step.

        Raises:
            StepError: the class keeps other states than in the step that it was asked for.
        """
        step = int(state[COUNT])
        kept = kept_of(self.recipe, tuple(param.shape))
        optimizer: Optimizer | None = self._optimizers.get(  # type: ignore[no-untyped-call]
            state[COUNT]
        )
        if optimizer is None or not step:
            optimizer = self._optimizers[state[COUNT]] = self.recipe.make(param)
        (group,) = optimizer.param_groups
        group.update(hyper.of_client)
        group["params"] = [param]
        set_rate(group, hyper.lr)
        if "weight_decay" in group:
            group["weight_decay"] = hyper.weight_decay
        elif hyper.weight_decay:
            param.mul_(1 - hyper.lr * hyper.weight_decay)
        if step:
            if kept.ahead is not None:
                group[COUNT] = step + kept.ahead
            optimizer.state[param] = rebuilt(kept.state, lambda _, leaf: _value(leaf, state, step))
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

    def _keep(self, found: Mapping[Any, Any], param: Tensor, kept: Kept, state: State) -> None:
        """Copy the tensors that the class has made anew into ``state``.

        Raises:
            StepError: they differ from those of ``kept``.
        """
        of_step = f"of a parameter of {tuple(param.shape)} after {int(state[COUNT])} steps"
        places = recipes.flat(kept.state)
        values = recipes.flat(found)
        for path, value in values.items():
            if isinstance(value, Tensor) and not isinstance(places.get(path), Leaf):
                raise StepError(
                    f"{self.recipe.rule} keeps {'.'.join(map(str, path))} {tuple(value.shape)} "
                    f"{of_step}, which it did not in its first step; nothing has a place for it: "
                    "this class cannot be used here"
                )
        for path, leaf in places.items():
            if not isinstance(leaf, Leaf) or leaf.ahead is not None:
                continue
            place = state[leaf.key]
            value = recipes.plain_tensor(values.get(path))
            if leaf.kind is not Tensor:
                place.fill_(value)
            elif _told(value) != _told(place):
                raise StepError(
                    f"{self.recipe.rule} keeps {leaf.key} {of_step} as {_told(value)}, and its "
                    f"first step said {_told(place)}: this class cannot be used here"
                )
            elif value.data_ptr() != place.data_ptr():
                place.copy_(value)


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Set ``lr`` of a parameter group in the form of its present rate: a number, or a tensor, which
    its class may require.
    """
    rate = group["lr"]
    group["lr"] = lr
    if isinstance(rate, Tensor):
        group["lr"] = torch.full_like(rate, lr)


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
