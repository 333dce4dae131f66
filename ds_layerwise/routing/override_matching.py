"""The facts about parameters that conditions need, the changes that overrides make to each, with
their source, and its norm group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ds_layerwise.config.conditions import Conditions, Facts, NormGroup
from ds_layerwise.config.overrides import Override
from ds_layerwise.errors import RoutingError
from ds_layerwise.routing.module_of import kind_of, modules_of
from ds_layerwise.routing.tensor_marks import is_cut, whole_dims, whole_shape

#: The keys that set the same thing in two ways.
_EXCLUSIVE = ("lr", "lr_scale")


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
        names = (experts or {}).get(name, (name,))
        shape = whole_shape(names, shape)
        modules: list[str] = []
        for kind in dict.fromkeys(kind_of(module) for _, module in holders[param]):
            modules += kind.__name__, f"{kind.__module__}.{kind.__qualname__}"
        facts[name] = [
            Facts(name=called, shape=shape, modules=tuple(modules), param=param)
            for called in dict.fromkeys(names)
        ]
    return facts


@dataclass(frozen=True)
class Changes:
    """The changes to one parameter, by key. Their order does not matter."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    by: Mapping[str, str] = field(default_factory=dict)
    """The override that sets each key, as errors name it."""

    def joined(self, label: str, values: Mapping[str, Any]) -> Changes:
        """Return these changes with ``values``, set by ``label``.

        Raises:
            RoutingError: another source sets a different value, or two keys that exclude each other
                are set.
        """
        for key, value in values.items():
            if self.values.get(key, value) != value:
                raise RoutingError(
                    f"{self.name}: {self.by[key]} sets {key} to {self.values[key]!r} and {label} "
                    f"to {value!r}; narrow one of the two"
                )
        merged = {**self.values, **values}
        by = {**dict.fromkeys(values, label), **self.by}
        if all(key in merged for key in _EXCLUSIVE):
            said = (f"{by[key]} sets {key} to {merged[key]:g}" for key in _EXCLUSIVE)
            raise RoutingError(
                f"{self.name}: {' and '.join(said)}: the first is the learning rate itself, the "
                "second multiplies another; narrow one of the two"
            )
        return Changes(self.name, merged, by)


def matched(params: Iterable[Facts], overrides: Sequence[Override]) -> frozenset[int]:
    """Return the indices of the overrides that match some of ``params``.

    Raises:
        RoutingError: a condition cannot be evaluated.
    """
    params = list(params)
    return frozenset(
        i for i, override in enumerate(overrides) if any(map(override.matches, params))
    )


def overrides_by_name(
    params: Mapping[str, Sequence[Facts]],
    overrides: Sequence[Override],
    *,
    elsewhere: Collection[int] = (),
) -> dict[str, Changes]:
    """Return the changes of overrides to each of ``params``.

    Args:
        params: by name, the facts that conditions need. Experts that different ranks hold under one
            name are several, counted over all ranks. Overrides match these, so that they mean the
            same experts for every number of ranks.
        elsewhere: the indices of overrides that match a parameter on another rank.

    Raises:
        RoutingError: an override that is not optional matches nothing, one contradicts another, a
            condition cannot be evaluated, or only some of the experts under one name match.
    """
    meant: dict[str, list[tuple[Facts, list[int]]]] = {}
    used = set(elsewhere)
    for name, called in params.items():
        meant[name] = []
        for facts in called:
            matching = [i for i, override in enumerate(overrides) if override.matches(facts)]
            meant[name].append((facts, matching))
            used.update(matching)
    for index, override in enumerate(overrides):
        if not override.optional and index not in used:
            told = f" ({override.conditions_told()})" if override.given() else ""
            raise RoutingError(
                f"{override.label(index)}{told} matches no trainable parameter; is "
                'the pattern misspelled? With "optional": true it may match none'
            )
    found = {}
    for name, of_each in meant.items():
        merged = []
        for facts, matching in of_each:
            changes = Changes(facts.name)
            for i in matching:
                changes = changes.joined(overrides[i].label(i), overrides[i].changes())
            merged.append(changes)
        found[name] = _same_for_experts(name, merged)
    return found


def _same_for_experts(name: str, merged: Sequence[Changes]) -> Changes:
    """Return the common changes of ``merged``, for experts that share the name ``name``."""
    first, *others = merged
    for other in others:
        for key in first.values.keys() | other.values.keys():
            if first.values.get(key) != other.values.get(key):
                one, two = (first, other) if key in first.values else (other, first)
                raise RoutingError(
                    f"{one.name}: layerwise.overrides sets {key} to {one.values[key]!r}, and for "
                    f"{two.name} to {two.values.get(key, 'nothing')!r}; the two are experts that "
                    "go by one name, on different ranks, and are trained alike: give both the same"
                )
    return Changes(name, first.values, first.by)


def grouped(
    params: Mapping[str, Sequence[Facts]], groups: Mapping[str, NormGroup]
) -> dict[str, str]:
    """Return the norm group of each of ``params`` that is in one.

    Args:
        params: as in :func:`overrides_by_name`.

    Raises:
        RoutingError: a parameter is in two groups, a condition cannot be evaluated, or only some of
            the experts under one name are in a group.
    """
    found = {}
    for name, called in params.items():
        keys = None
        for facts in called:
            own = [key for key, group in groups.items() if group.hold(facts)]
            if len(own) > 1:
                raise RoutingError(
                    f"{facts.name} is in layerwise.norm_groups.{own[0]} and in "
                    f"layerwise.norm_groups.{own[1]}, and counts in the norm of one; narrow one of "
                    "the two"
                )
            if keys is None:
                keys = own
            if own != keys:
                raise RoutingError(
                    f"{called[0].name} is in layerwise.norm_groups.{(keys + own)[0]}, or "
                    f"{facts.name}, and not both; the two are experts that go by one name, on "
                    "different ranks, and are clipped alike: put both into one group"
                )
        if keys:
            found[name] = keys[0]
    return found


def require_members(groups: Mapping[str, NormGroup], found: Collection[str]) -> None:
    """Refuse a norm group without a parameter, unless it is optional.

    Args:
        found: the groups that have a parameter on any rank.

    Raises:
        RoutingError: a group has none.
    """
    for key, group in groups.items():
        if key not in found and not group.optional:
            raise RoutingError(
                f"layerwise.norm_groups.{key} ({group.conditions_told()}) matches no trainable "
                'parameter; is the pattern misspelled? With "optional": true it may match none'
            )
