"""Parameter groups after a load: each holds what the checkpoint says, or what this run's config
says.

Note: the rates of a schedule
    A scheduler of torch that continues from its state has the rates of the saved run in it. Where a
    group holds this run's values, they are rescaled by the ratio of the two ``lr``. One of
    DeepSpeed's, or one that starts afresh, sets ``lr`` from the config of this run. Where that is
    a new one, the group holds this run's values, because the old ratios would make rates that
    nobody chose.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from deepspeed.runtime import lr_schedules
from torch import Tensor

from ds_layerwise.checkpoint.plain_values import check_kind, like, plain
from ds_layerwise.checkpoint.record import Header, RuleRecord
from ds_layerwise.config.sections import HYPER_KEYS, OnHyperChange
from ds_layerwise.errors import FOREIGN_ERRORS
from ds_layerwise.zero.setup.client_groups import ABOUT_GROUPS
from ds_layerwise.zero.setup.param_groups import OF_SCHEDULERS, LayerWiseOptimizer

#: The keys that name and route the parameters of this run's groups.
_OF_THIS_RUN = frozenset((*ABOUT_GROUPS, "use_muon"))

_KEY = "layerwise.on_hyper_change"

#: The attributes of a scheduler with one learning rate per group.
_LISTS = ("base_lrs", "max_lrs", "_last_lr")


def described(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return ``groups`` in the form of a checkpoint: builtins, without the parameters.

    Raises:
        LayerWiseError: a value is not a builtin; names the group and the key.
    """
    found: list[dict[str, Any]] = []
    for index, group in enumerate(groups):
        found.append({})
        for key, value in group.items():
            if key != "params":
                found[index][key] = plain(value, f"param_groups[{index}].{key}")
    return found


class ResumedGroup(NamedTuple):
    """A group as it continues from a checkpoint."""

    values: dict[str, Any]
    """The entries that come from the checkpoint."""
    given: Mapping[str, Any]
    """The values before any scheduler, of the run whose values it holds."""
    line: str
    """The message about what differs; empty if nothing does."""
    factor: float
    """The change of the rates in the scheduler's state."""


def resumed(
    optimizer: LayerWiseOptimizer,
    header: Header,
    wins: OnHyperChange,
    otherwise: Mapping[int, str],
    scheduler: Any = None,
    goes_on: bool | None = None,
) -> list[ResumedGroup]:
    """Return all groups as they continue.

    Args:
        wins: the side whose values a group holds if both differ.
        otherwise: the groups that hold this run's values, because those in the checkpoint are of
            another optimizer, or of another size of its updates, with its name.
        goes_on: True if ``scheduler`` continues from its state in the checkpoint, False if it
            starts afresh, None if there is none, or the script restores it.

    Raises:
        ValueError: a value of the checkpoint is of another kind than this run's.
    """
    stays = {*_OF_THIS_RUN, *optimizer.fixed_keys}
    # The state of DeepSpeed's is a number of steps; the rate of another's is in the saved group.
    is_count = goes_on and _is_deepspeeds(scheduler)
    takes_lr = goes_on is False or is_count
    rates = rates_of(scheduler, is_count)
    groups = []
    pairs = zip(header.param_groups or (), header.configured or (), strict=True)
    for index, (saved, before) in enumerate(pairs):
        built = optimizer.built_with[index]
        group = optimizer.param_groups[index]
        # One that is not there is an error, whatever the group holds.
        lr = float(saved["lr"])
        changes = _changes(optimizer.named(before), optimizer.named(built))
        name = f"param_groups[{index}]"
        if index in otherwise:
            why = f"the saved run used {otherwise[index]}"
        elif changes and wins == "config":
            why = f"{_KEY} is 'config'"
        elif takes_lr and before["lr"] != built["lr"]:
            why = f"{type(scheduler).__name__} starts from its lr"
        else:
            check_kind(group, saved, name)
            unused = set(HYPER_KEYS) - built.keys()
            if goes_on is False:
                unused |= {"lr", *OF_SCHEDULERS, _cycled_key(scheduler, saved, group)}
            values = {key: saved[key] for key in saved.keys() - stays - unused}
            line = f"{name}: {changes}the checkpoint's are used, set {_KEY} to 'config' for these"
            groups.append(ResumedGroup(values, before, line if changes else "", 1.0))
            continue
        values, factor = _scheduled(
            scheduler,
            goes_on,
            rates[index] if is_count else lr,
            saved,
            group,
            before["lr"],
            built["lr"],
        )
        line = f"{name}: {changes}this run's values are used, because {why}"
        groups.append(ResumedGroup(values, built, line, factor))
    return groups


def after_another(
    optimizer: LayerWiseOptimizer,
    header: Header,
    scheduler: Any = None,
    goes_on: bool | None = None,
) -> list[ResumedGroup]:
    """Return all groups as they continue from a checkpoint that another package wrote: with this
    run's values, and the rates and cycled momentum of a scheduler that continues from its state.

    Args:
        scheduler, goes_on: as in :func:`resumed`.
    """
    saved = header.configured or ()
    is_known = len(saved) == len(optimizer.built_with)
    rates = rates_of(scheduler, goes_on)
    # A state may have no rates. Then the scheduler would tell those with which this run starts.
    if is_known and not _is_deepspeeds(scheduler):
        rates = [group["lr"] for group in saved]
    groups = []
    for index, built in enumerate(optimizer.built_with):
        theirs = saved[index] if is_known else {}
        values: dict[str, Any] = {}
        factor = 1.0
        if index < len(rates):
            group = optimizer.param_groups[index]
            values, factor = _scheduled(
                scheduler, goes_on, rates[index], theirs, group, 0, built["lr"]
            )
        before = optimizer.named({"lr": 0.0, **theirs}) if theirs else {}
        if scheduler or values:
            before.pop("lr", None)
        line = f"param_groups[{index}]: {_changes(before, optimizer.named({**built, **values}))}"
        line += "this run's values are used, because the saved run was not one of ds_layerwise"
        if values:
            line += (
                f"; a schedule that goes on has lr {values['lr']:g}, and other rates in proportion"
            )
        groups.append(ResumedGroup(values, built, line, factor))
    return groups


def rates_of(scheduler: Any, goes_on: bool | None) -> Any:
    """Return the rates at which a schedule continues, by group; none if it does not, or does not
    tell.

    Args:
        scheduler, goes_on: as in :func:`resumed`.
    """
    if not goes_on:
        return ()
    if _is_deepspeeds(scheduler):
        # Its state is a number of steps alone.
        return scheduler.get_lr()
    # A class of the script may have no such function, or none that answers before its first step.
    with suppress(*FOREIGN_ERRORS):
        return list(scheduler.get_last_lr())
    return ()


def _scheduled(
    scheduler: Any,
    goes_on: bool | None,
    lr: Any,
    saved: Mapping[str, Any],
    group: Mapping[str, Any],
    was: Any,
    now: Any,
) -> tuple[dict[str, Any], float]:
    """Return what a scheduler, with the rate ``lr`` in the ``saved`` group, has put into ``group``
    if it continues, and the change of the rates in its state.

    Args:
        scheduler, goes_on: as in :func:`resumed`.
        was, now: ``lr`` of the two groups before any scheduler, as far as it is known.
    """
    # One of torch leaves the rate from which it starts in a group, a plateau none. If it is in one
    # of the two runs alone, the script has nothing to restore.
    is_restored = goes_on is None and "initial_lr" in group and "initial_lr" in saved
    if not (goes_on or is_restored):
        return {}, 1.0
    was = saved.get("initial_lr", was)
    factor = (
        float(group.get("initial_lr", now)) / was if was and not _is_deepspeeds(scheduler) else 1.0
    )
    values = {"lr": lr * factor}
    key = _cycled_key(scheduler, saved, group)
    if key in saved:
        values[key] = saved[key]
    if "betas" in values:
        # The second of them stays what it is at start.
        values["betas"] = (saved["betas"][0], *group["betas"][1:])
    return values, factor


def _cycled_key(scheduler: Any, saved: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """Return the key of ``group`` whose momentum ``scheduler`` sets; empty if it sets none."""
    # A cyclic schedule of DeepSpeed's has no key of its own in the ``saved`` group.
    if not getattr(scheduler, "cycle_momentum", "max_momentum" in saved):
        return ""
    return "betas" if "betas" in group else "momentum"


def _is_deepspeeds(scheduler: Any) -> bool:
    return any(cls.__module__ == lr_schedules.__name__ for cls in type(scheduler).__mro__)


def _parts(scheduler: Any) -> Iterator[Any]:
    """Yield the schedulers that have rates of their own in ``scheduler``, which may be composed."""
    parts = getattr(scheduler, "_schedulers", ())
    for part in parts:
        yield from _parts(part)
    if not parts:
        yield scheduler


def _changes(before: Mapping[str, object], built: Mapping[str, object]) -> str:
    """Return what differs between the values that the saved run and this one were given."""
    return "".join(
        f"{key} was {before[key]} and is {new}; "
        for key, new in built.items()
        if before.get(key, new) != new
    )


def take_over(
    groups: Iterable[ResumedGroup], optimizer: LayerWiseOptimizer, scheduler: Any
) -> list[str]:
    """Let ``optimizer``, and the rates of ``scheduler``, continue as ``groups``. Return lines about
    what differs.
    """
    lines = []
    for index, (values, given, line, factor) in enumerate(groups):
        optimizer.configured[index] = {
            **given,
            # A rate in an override becomes a ratio to this lr, which must not be 0.
            "lr": given["lr"] or optimizer.built_with[index]["lr"],
        }
        group = optimizer.param_groups[index]
        for key, value in values.items():
            set_value(group, key, value)
        for part in _parts(scheduler):
            for key in _LISTS:
                rates = getattr(part, key, None)
                # What is not in the state is this run's.
                if factor != 1 and isinstance(rates, list) and key in part.state_dict():
                    rates[index] *= factor
        if line:
            lines.append(line)
    return lines


def set_value(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a group, in the form in which the group has it."""
    held = group.get(key)
    if isinstance(held, Tensor) and not held.dim() and isinstance(value, (int, float)):
        # Fill in place: schedulers and users keep references to the tensor.
        held.fill_(value)
    else:
        group[key] = like(held, value)


def otherwise_trained(
    own: Mapping[str, RuleRecord], saved: Mapping[str, RuleRecord], group_of: Mapping[str, int]
) -> dict[int, str]:
    """Return the groups with a parameter whose optimizer in the checkpoint is another, had settings
    for other states, or scales its updates otherwise, with that optimizer in words. Values of such
    a group mean something else in this run.

    Args:
        own, saved: by parameter, the optimizers of this run and of the checkpoint.
        group_of: the groups of the parameters that count, by their names in a checkpoint.
    """
    found: dict[int, str] = {}
    for name, index in group_of.items():
        if (old := saved.get(name)) and not own[name].has_rates_of(old):
            states = ", ".join(old.state_keys) or "none"
            found.setdefault(index, f"{old.scale or old.family} (states {states})")
    return found
