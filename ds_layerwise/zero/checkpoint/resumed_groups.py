"""Parameter groups after a load: from the checkpoint, except where the config has changed since.

Note: where a scheduler takes its rates from
    A scheduler of torch continues from the rates in the checkpoint. A scheduler of DeepSpeed, or
    one that starts afresh, sets ``lr`` from the config of this run, whatever the group had. If that
    ``lr`` is a new one, the ratios of the saved run would turn it into rates that nobody chose; so
    in this case all rates are those of the config. Many schedulers of torch multiply the value in
    the group, so if one starts afresh, everything that it has put into a group stays.

Note: what is compared
    A scheduler moves ``lr``, and a script may move anything, so a group's values in a checkpoint
    are not the values that the group was given. A checkpoint has both. The values that the two runs
    were given are compared. Values that have not changed continue as they were saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime import lr_schedules
from torch import Tensor

from ds_layerwise.checkpoint.plain_values import check_kind, like, plain
from ds_layerwise.checkpoint.record import Header, RuleRecord
from ds_layerwise.config.sections import OnHyperChange
from ds_layerwise.zero.groups.client_object import ABOUT_GROUPS
from ds_layerwise.zero.groups.param_groups import RATIOS, LayerWiseOptimizer

_RATES = ("lr", *RATIOS)

#: The keys that name and route the parameters of this run's groups.
_OF_THIS_RUN = frozenset((*ABOUT_GROUPS, "use_muon"))

#: The keys of a group in which schedulers of torch keep learning rates.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")

#: The keys of a scheduler's state with a list of learning rates, one per group.
_IN_STATES = ("base_lrs", "max_lrs", "_last_lr")

#: The keys of a group that a scheduler uses to cycle the momentum.
_OF_MOMENTUM = ("base_momentum", "max_momentum")

#: The key of the inner schedulers' states in the state of a SequentialLR or ChainedScheduler.
_INNER = "_schedulers"


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


@dataclass(kw_only=True)
class Resumption:
    """The continuation of an optimizer's groups from a checkpoint."""

    optimizer: LayerWiseOptimizer
    header: Header
    wins: OnHyperChange
    otherwise: Mapping[int, str]
    """The groups whose values in the checkpoint are of another optimizer, or of another size of
    its updates, with its name.
    """
    scheduler: Any = None
    goes_on: bool | None = None
    """True if the scheduler continues from its state in the checkpoint. False if its values in this
    run's groups stay. None if the script restores the scheduler.
    """
    follows: bool = field(default=False, init=False)
    """True if the scheduler continues from rates in its state."""
    stays: set[str] = field(default_factory=set, init=False)
    """The keys that keep their values of this run."""
    changes: dict[tuple[str, str, str, str], list[int]] = field(default_factory=dict, init=False)
    """The groups by key, value in the saved run, value in this run, and the reason why this run's
    value is used; empty if it is not.
    """

    def after(self) -> list[dict[str, Any]]:
        """Return the groups of :meth:`.LayerWiseOptimizer.groups_now` as :meth:`take_over` would
        leave them, except for rates.

        Raises:
            ValueError: a value of the checkpoint should be a number and is not.
        """
        groups = [dict(group) for group in self.optimizer.groups_now()]
        for index, saved in enumerate(self._saved):
            group = groups[index]
            built = self.optimizer.built_with[index]
            before = self._before(index)
            # Another optimizer may use the same name for a value of another kind.
            held = {**built, **self.optimizer.param_groups[index]}
            why = self._wins(index)
            if index in self.otherwise and not _has_ratios(built):
                held = {"lr": group["lr"]}
            for what, said in (("param_groups", saved), ("configured", before)):
                check_kind(held, said, f"{what}[{index}]")
                if said.get("lr") is None:
                    raise ValueError(f"{what}[{index}] has no lr")
            if _has_ratios(saved) is not _has_ratios(built):
                continue
            for key in saved.keys() & group.keys() - {*_RATES}:
                changed = key in built and key in before and before[key] != built[key]
                if not (changed and why):
                    group[key] = saved[key]
        return groups

    def take_over(self) -> list[str]:
        """Update the groups, and return a line for each change."""
        scheduler = self.scheduler
        self.stays = {*_OF_THIS_RUN, *self.optimizer.fixed_keys}
        if scheduler is not None and self.goes_on:
            self.follows = type(scheduler).__module__ != lr_schedules.__name__
        elif scheduler is not None and self.goes_on is False:
            self.stays |= {*_IN_GROUPS, *_OF_MOMENTUM}
            if getattr(scheduler, "cycle_momentum", _cycles(_state_of(scheduler))):
                self.stays |= {"momentum", "betas"}
        lines = []
        for index in range(len(self._saved)):
            if why := self._of_no_use(index):
                lines.append(
                    f"param_groups[{index}]: the checkpoint's values are not used, because its run "
                    f"{why} are used"
                )
            else:
                self._take_group(index)
        for what in self.header.unreadable:
            lines.append(
                f"{what} is an object in the checkpoint that only code could restore; this run's "
                "own value is used"
            )
        return [*(self._line(*change) for change in self.changes), *lines]

    @property
    def _saved(self) -> Sequence[Mapping[str, Any]]:
        """The groups of the checkpoint; empty if this package did not write them."""
        return self.header.param_groups or ()

    def _before(self, index: int) -> Mapping[str, Any]:
        """Return the values that the group was given at the start of the saved run."""
        if self.header.configured:
            return self.header.configured[index]
        # Version 0.1 wrote the values that a scheduler had moved. They show the initial rate only
        # if a scheduler of torch stored it.
        built = self.optimizer.built_with[index]
        saved = self._saved[index]
        known = {}
        for key, value in built.items():
            known[key] = saved.get(key, value)
        lr = known["lr"] if self.scheduler is None else built["lr"]
        return {**known, "lr": saved.get("initial_lr", lr)}

    def _of_no_use(self, index: int) -> str:
        """Return the reason why a group's saved values do not apply to this run, and which values
        it has instead; empty if they apply.
        """
        was_named = _has_ratios(self._saved[index])
        is_named = _has_ratios(self.optimizer.built_with[index])
        if was_named and not is_named:
            why = (
                "named its optimizers in the config; the values of the optimizer that was passed "
                "to this one"
            )
        elif is_named and not was_named and self.header.configured:
            why = "was passed an optimizer; the values of this run's config"
        elif index in self.otherwise and not is_named:
            why = f"used {self.otherwise[index]}; the values of this run's optimizer"
        else:
            return ""
        if self.follows:
            _set(self.optimizer.param_groups[index], "lr", self._saved[index]["lr"])
            self._move(index, ("lr",))
        return why

    def _wins(self, index: int) -> str:
        """Return why this run's values of a group are used where they differ; empty if they are
        not.
        """
        if self.wins == "config":
            return "as layerwise.on_hyper_change says"
        if index in self.otherwise:
            return f"because the saved run used {self.otherwise[index]}"
        return ""

    def _take_group(self, index: int) -> None:
        built = self.optimizer.built_with[index]
        before = self._before(index)
        for key, value in self._saved[index].items():
            self._give(index, key, value)
        old = self.optimizer.named(before)
        new = self.optimizer.named(built)
        different = [key for key in new if key in old and old[key] != new[key]]
        sets_lr = self.scheduler is not None and not self.follows and "lr" in different
        configured = dict(before)
        for key in different:
            why = self._wins(index)
            if sets_lr and key in _RATES and not why:
                kind = type(self.scheduler).__name__
                why = f"because {kind} starts from the lr of this run's config"
            self.changes.setdefault((key, str(old[key]), str(new[key]), why), []).append(index)
            if why:
                configured |= self._take(index, key)
        # A rate in an override becomes a ratio to this one, which must not be 0.
        configured["lr"] = configured["lr"] or built["lr"]
        self.optimizer.configured[index] = configured

    def _take(self, index: int, key: str) -> dict[str, Any]:
        """Set ``key`` of a group from this run, and return the values that this sets."""
        built = self.optimizer.built_with[index]
        if key in _RATES:
            given = {}
            for ratio in RATIOS.values():
                if ratio in built:
                    given[ratio] = built[ratio]
        else:
            given = {key: built[key]}
        for name, value in given.items():
            self._give(index, name, value)
        if key == "lr":
            self._move(index, _IN_GROUPS)
            given["lr"] = built["lr"]
        return given

    def _give(self, index: int, key: str, value: Any) -> None:
        if key not in self.stays:
            _set(self.optimizer.param_groups[index], key, value)

    def _move(self, index: int, keys: Iterable[str]) -> None:
        """Rescale the rates under ``keys`` in a group, and in the scheduler's state, as if the
        saved run had started with this run's rate.
        """
        group = self.optimizer.param_groups[index]
        ends = (self._before(index)["lr"], self.optimizer.built_with[index]["lr"])
        state: dict[str, Any] = _state_of(self.scheduler) if self.follows else {}
        for key in keys:
            if key in group and key not in self.stays:
                floor = _floor(state) if key == "lr" else 0.0
                _set(group, key, _moved(float(group[key]), *ends, floor))
        if _move_state(state, index, *ends):
            self.scheduler.load_state_dict(state)

    def _line(self, key: str, old: str, new: str, why: str) -> str:
        outcome = f"{old} is used, set layerwise.on_hyper_change to 'config' for {new}"
        if why:
            outcome = f"{new} is used, {why}"
        groups = ", ".join(map(str, self.changes[key, old, new, why]))
        return (
            f"param_groups[{groups}].{key} was {old} in the saved run and is {new} in this "
            f"run's config; {outcome}"
        )


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


def _has_ratios(values: Mapping[str, Any]) -> bool:
    return not values.keys().isdisjoint(RATIOS.values())


def _state_of(scheduler: Any) -> dict[str, Any]:
    state: object = getattr(scheduler, "state_dict", dict)()
    return state if isinstance(state, dict) else {}


def _inner(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the states of the schedulers inside a scheduler. A script's own scheduler may have
    anything there.
    """
    inner = state.get(_INNER)
    return [each for each in inner if isinstance(each, dict)] if isinstance(inner, list) else []


def _cycles(state: Mapping[str, Any]) -> bool:
    return bool(state.get("cycle_momentum")) or any(map(_cycles, _inner(state)))


def _move_state(state: dict[str, Any], index: int, old: float, new: float) -> bool:
    """Rescale the rates of a group in the state of a torch scheduler. Return True if it has any."""
    moved = False
    for key in _IN_STATES:
        rates = state.get(key)
        if isinstance(rates, list) and index < len(rates):
            floor = _floor(state) if key == "_last_lr" else 0.0
            # Copy the list: the running scheduler holds the same object.
            state[key] = [*rates]
            state[key][index] = _moved(float(rates[index]), old, new, floor)
            moved = True
    for inner in _inner(state):
        moved |= _move_state(inner, index, old, new)
    return moved


def _floor(state: Mapping[str, Any]) -> float:
    """Return the lowest rate of a schedule, whatever its start: ``eta_min``. In a sequence, it is
    that of the active schedule.
    """
    if "_milestones" in state and _inner(state):
        at_work = bisect_right(state["_milestones"], state["last_epoch"])
        return _floor(_inner(state)[at_work])
    # ``eta_min`` of torch's two cosine schedulers. A script's class may use the name for something
    # below which it starts.
    is_cosine = not state.keys().isdisjoint(("T_max", "T_0"))
    return float(state.get("eta_min") or 0.0) if is_cosine else 0.0


def _moved(value: float, old: float, new: float, floor: float) -> float:
    """Map ``value`` of a schedule that falls from ``old`` to ``floor`` to the same relative
    position between ``new`` and ``floor``.

    If that position is not defined, as when ``old`` and ``floor`` are both 0, return ``new``.
    """
    if old in (value, floor):
        return float(new)
    return floor + (value - floor) * (float(new) - floor) / (float(old) - floor)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, Tensor) and not held.dim() and isinstance(value, (int, float)):
        # Fill in place: schedulers and users keep references to the tensor.
        held.fill_(value)
    else:
        group[key] = like(held, value)
