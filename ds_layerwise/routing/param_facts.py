"""What conditions of overrides and of norm groups ask of the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from ds_layerwise.recipes.targets.conditions import Conditions, Facts
from ds_layerwise.routing.module_of import kind_of, modules_of
from ds_layerwise.routing.tensor_marks import is_cut, whole_dims


def holders_of(model: nn.Module) -> dict[Tensor, list[tuple[str, nn.Module]]]:
    """By parameter, the modules that it belongs to, with their paths; several where it is tied."""
    holders: dict[Tensor, list[tuple[str, nn.Module]]] = {}
    for path, module, own in modules_of(model):
        for param in own:
            holders.setdefault(param, []).append((path, module))
    return holders


def facts_of(
    model: nn.Module,
    params: Mapping[str, Tensor],
    asked: Iterable[Conditions],
    *,
    tp_size: int = 1,
    experts: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, list[Facts]]:
    """By name, what the conditions in ``asked`` may ask of ``params``, parameters of ``model``.

    Args:
        tp_size: how many ranks tensor parallelism has cut parameters for. A condition means the
            same parameters however many there are, so sizes are those of whole ones.
        experts: by name, what the experts are called that go by it on one rank or another; each has
            facts of its own.

    Raises:
        RoutingError: a condition asks for sizes, and a parameter that is cut does not say along
            which axis.
    """
    holders, sized = holders_of(model), any(each.ask_for_sizes for each in asked)
    facts = {}
    for name, param in params.items():
        shape = tuple(param.shape)
        if sized and tp_size > 1 and is_cut(param):
            shape = whole_dims(name, param, tp_size)
        facts[name] = [
            Facts(name=called, shape=shape, modules=_classes(holders[param]), param=param)
            for called in (experts or {}).get(name, (name,))
        ]
    return facts


def _classes(holders: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    kinds = dict.fromkeys(kind_of(module) for _, module in holders)
    return tuple(
        each for kind in kinds for each in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    )
