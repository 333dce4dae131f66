"""States that an optimizer object had before an engine took it: from what its class keeps to what this package does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.param_groups import Held
from ds_layerwise.optimizers.probe import COUNT, Kept, Leaf, Path, kept_of, walk
from ds_layerwise.recipes.any_torch import AnyTorch


def taken_over(held: Held, before: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Tensor]:
    """By this package's names, the states of the piece ``held``, out of those of its whole parameter ``before``.

    Args:
        group: the parameter group of the object, which may count steps.

    Raises:
        ConfigError: the class would not have made such states, or its counts of steps contradict each other.
    """
    recipe = cast(AnyTorch, held.route.recipe)
    shape = held.route.matrix_shape or (held.piece.numel,)
    kept, found = kept_of(recipe, shape), dict(walk(before))
    step = _steps(held, kept, found, group)
    if not step:
        return {}
    expected = dict(walk(kept.after(step)))
    if strange := found.keys() ^ expected.keys():
        raise _unknown(held, strange)
    first = held.piece.param_start
    taken = {COUNT: torch.tensor(float(step), dtype=torch.float32, device="cpu")}
    for path, leaf in expected.items():
        if not isinstance(leaf, Leaf) or leaf.ahead is not None:
            continue
        value = found[path]
        if leaf.kind is not Tensor:
            value = torch.as_tensor(value, dtype=getattr(torch, leaf.spec.dtype), device="cpu")
        if isinstance(value, Tensor) and not recipe.whole and value.numel() == held.param.numel() and leaf.spec.shape:
            value = value.reshape(-1)[first:first + held.piece.numel]
        if not isinstance(value, Tensor) or math.prod(leaf.spec.shape) != value.numel() or (
                leaf.kind is Tensor and not _becomes(value, getattr(torch, leaf.spec.dtype))):
            raise _unknown(held, {path})
        taken[leaf.key] = value.reshape(leaf.spec.shape)
    return taken


def described(client: Optimizer) -> list[str]:
    """What ``client`` has of each parameter, as text to compare between ranks: shapes, and counts of steps."""
    return [f"of parameter {place} {tuple(param.shape)} in param_groups[{index}] "
            f"{', '.join(_said(*each) for each in walk(client.state.get(param, {}))) or 'no state'}"
            for index, group in enumerate(client.param_groups) for place, param in enumerate(group["params"])]


def _said(path: Path, value: Any) -> str:
    counts = path[-1] == COUNT and isinstance(value, (Tensor, int, float))
    told = f"{float(value):g}" if counts else tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return f"{'.'.join(map(str, path))} {told}"


def _steps(held: Held, kept: Kept, found: Mapping[Any, Any], group: Mapping[str, Any]) -> int:
    """How many steps there were."""
    leaves = {path: leaf for state in kept.states for path, leaf in walk(state)}
    counts = {path: int(found[path]) - leaf.ahead for path, leaf in leaves.items()
              if isinstance(leaf, Leaf) and leaf.ahead is not None and path in found}
    counts.update({(key,): int(group[key]) - leaf.ahead for key, leaf in kept.groups.items()
                   if leaf.ahead is not None and key in group})
    if len(set(counts.values())) > 1:
        told = ", ".join(f"{'.'.join(map(str, path))} {steps}" for path, steps in counts.items())
        raise ConfigError(f"{held.route.name}: the states that {held.route.recipe.rule} was given with count steps "
                          f"differently: {told}; load all of them, or none")
    if counts:
        return max(0, next(iter(counts.values())))
    # Nothing counts, so that all that matters is what it looks like.
    return next((step for step in range(1, len(kept.states) + 1)
                 if dict(walk(kept.after(step))).keys() == found.keys()), len(kept.states))


def _becomes(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``value`` may be kept in ``dtype``: torch, too, loads states in the dtype of a parameter, whatever they
    were in."""
    return value.dtype == dtype or value.is_floating_point() and dtype.is_floating_point


def _unknown(held: Held, paths: Any) -> ConfigError:
    names = ", ".join(sorted(".".join(map(str, path)) for path in paths))
    return ConfigError(f"{held.route.name}: the optimizer was given with states, which differ in {names} from what "
                       f"its class {held.route.recipe.rule} makes; give it without states, or with those of the same "
                       "class and settings")
