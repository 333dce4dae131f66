"""The facts about a model's parameters that conditions of overrides need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from ds_layerwise.config.targets.conditions import Conditions, Facts
from ds_layerwise.routing.module_of import kind_of, modules_of
from ds_layerwise.routing.tensor_marks import is_cut, whole_dims


def holders_of(model: nn.Module) -> dict[Tensor, list[tuple[str, nn.Module]]]:
    """Return the modules of each parameter, with their paths; several if it is tied."""
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
    """Return, by name, the facts about ``params`` of ``model`` that the conditions ``asked`` may
    need.

    Args:
        tp_size: the number of ranks that tensor parallelism has cut parameters for. Sizes are those
            of whole parameters, so that a condition means the same parameters for every number.
        experts: by parameter name, the names of the experts that ranks hold under it. Each expert
            has facts of its own.

    Raises:
        RoutingError: a condition needs sizes, and it is unknown along which axis a parameter is
            cut.
    """
    holders = holders_of(model)
    sized = tp_size > 1 and any(conditions.ask_for_sizes for conditions in asked)
    facts = {}
    for name, param in params.items():
        shape = tuple(param.shape)
        if sized and is_cut(param):
            shape = whole_dims(name, param, tp_size)
        facts[name] = [
            Facts(name=called, shape=shape, modules=_classes(holders[param]), param=param)
            for called in (experts or {}).get(name, (name,))
        ]
    return facts


def _classes(holders: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    names: list[str] = []
    for kind in dict.fromkeys(kind_of(module) for _, module in holders):
        names += kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
    return tuple(names)
