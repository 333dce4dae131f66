"""What parameter groups go on with after a load: what the checkpoint says, or what the config says
otherwise by now.

Note: where a schedule takes its rates from
    torch's go on from what a checkpoint has of them. DeepSpeed's, and one that starts afresh, set
    ``lr`` to what the config of this run says, whatever a group goes on with; where that is another
    one, the ratios of the run before would make rates of it that nobody chose. So there the rates
    are those of the config. Many of torch's multiply on from what stands in a group, so that of one
    that starts afresh everything there stays that it has put in.

Note: what is compared
    A schedule moves ``lr``, and a script may move anything, so that what a group says in a
    checkpoint is not what it was given. A checkpoint has both, and what is compared is what the two
    runs were given. What has not changed goes on as it was when it was saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from deepspeed.runtime import lr_schedules
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR, CosineAnnealingWarmRestarts, SequentialLR

from ds_layerwise.checkpoint.plain_values import check_kind, like, plain
from ds_layerwise.checkpoint.record import Header, RuleRecord
from ds_layerwise.config.sections import OnHyperChange
from ds_layerwise.optimizers.foreign.client_object import ABOUT_GROUPS
from ds_layerwise.optimizers.param_groups import RATIOS, LayerWiseOptimizer

_RATES = ("lr", *RATIOS)

#: What names and routes the parameters of this run's groups.
_OF_THIS_RUN = frozenset((*ABOUT_GROUPS, "use_muon"))

#: What else schedulers of torch keep in a group of the learning rate, and in lists of their own.
_IN_GROUPS, _IN_LISTS = (
    ("lr", "initial_lr", "max_lr", "min_lr"),
    ("base_lrs", "max_lrs", "_last_lr"),
)

#: What those keep in a group that cycle the momentum, and what they move by it.
_OF_MOMENTUM, _CYCLED = ("base_momentum", "max_momentum"), ("momentum", "betas")


def described(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a checkpoint says of ``groups``: builtins, without the parameters.

    Raises:
        LayerWiseError: one says something else; names the group and the key.
    """
    return [
        {
            key: plain(value, f"param_groups[{index}].{key}")
            for key, value in group.items()
            if key != "params"
        }
        for index, group in enumerate(groups)
    ]


def after(
    optimizer: LayerWiseOptimizer, header: Header, otherwise: Container[int], *, wins: OnHyperChange
) -> list[dict[str, Any]]:
    """The groups of :meth:`.LayerWiseOptimizer.groups_now` as :func:`take_over` would leave them,
    rates aside.

    Raises:
        ValueError: ``header`` says something in the place of a number that is none.
    """
    groups: list[dict[str, Any]] = [dict(group) for group in optimizer.groups_now()]
    for index, saved in enumerate(header.param_groups or ()):
        group, built = groups[index], optimizer.built_with[index]
        for what, said in {
            "param_groups": saved,
            **({"configured": header.configured[index]} if header.configured else {}),
        }.items():
            # What another optimizer has under a name may be of another kind.
            check_kind(
                {"lr": group["lr"]}
                if index in otherwise
                else {**built, **optimizer.param_groups[index]},
                said,
                f"{what}[{index}]",
            )
            if said.get("lr") is None:
                raise ValueError(f"{what}[{index}] has no lr")
        if bool(saved.keys() & RATIOS.values()) is bool(built.keys() & RATIOS.values()):
            before = _given(
                saved,
                header.configured[index] if header.configured else None,
                built,
                is_scheduled=False,
            )
            own = {
                key
                for key in built
                if wins == "config" and key in before and before[key] != built[key]
            }
            group.update(
                {
                    key: value
                    for key, value in saved.items()
                    if key in group and key not in own and key not in _RATES
                }
            )
    return groups


def take_over(
    optimizer: LayerWiseOptimizer,
    header: Header,
    *,
    wins: OnHyperChange,
    scheduler: Any,
    goes_on: bool | None,
    otherwise: Mapping[int, str],
) -> list[str]:
    """Let the groups of ``optimizer`` go on from ``header``; returns a line for each thing that has
    changed.

    Args:
        scheduler: the engine's; None if it has none.
        goes_on: whether that goes on from its state in the checkpoint; if not, what it has put into
            the groups of this run stays there; None where the script sees to it.
        otherwise: the groups of an optimizer that was given whose values in the checkpoint are of
            no use to it.
    """
    changes: dict[tuple[str, str, str, bool], list[int]] = {}
    others: list[str] = []
    stays = (
        _OF_THIS_RUN
        | optimizer.fixed_keys
        | (_put_by(scheduler) if goes_on is False else frozenset())
    )
    is_fed = (
        scheduler is not None
        and bool(goes_on)
        and type(scheduler).__module__ != lr_schedules.__name__
    )
    for index, saved in enumerate(header.param_groups or ()):
        group, built = optimizer.param_groups[index], optimizer.built_with[index]
        before = _given(
            saved,
            header.configured[index] if header.configured else None,
            built,
            is_scheduled=scheduler is not None,
        )
        if why := _of_no_use(saved, built, otherwise.get(index), is_told=bool(header.configured)):
            others.append(
                f"param_groups[{index}] was saved by a run {why} go on, and those of the "
                "checkpoint do not"
            )
            if is_fed:
                _set(
                    group,
                    "lr",
                    _moved(float(saved["lr"]), before["lr"], built["lr"], _floor(scheduler)),
                )
                _follow_lr(scheduler, index, before["lr"], built["lr"])
            continue
        for key, value in saved.items():
            if key not in stays:
                _set(group, key, value)
        old, new = optimizer.named(before), optimizer.named(built)
        different = [key for key in new if key in old and old[key] != new[key]]
        sets_lr = scheduler is not None and not is_fed and "lr" in different
        taken = [key for key in different if wins == "config" or sets_lr and key in _RATES]
        for key in different:
            changes.setdefault((key, str(old[key]), str(new[key]), key in taken), []).append(index)
        optimizer.configured[index] = {
            **before,
            **_follow_config(
                group, before, built, taken, stays, _floor(scheduler) if is_fed else 0.0
            ),
        }
        if not float(optimizer.configured[index]["lr"]):
            # What overrides say of a rate is a ratio to it.
            optimizer.configured[index]["lr"] = built["lr"]
        if "lr" in taken and is_fed:
            _follow_lr(scheduler, index, before["lr"], built["lr"])
    return (
        [_line(*change, groups, wins, scheduler) for change, groups in changes.items()]
        + others
        + [
            f"{what} is in the checkpoint as an object that only code could restore; this run's "
            "own goes on"
            for what in header.unreadable
        ]
    )


def _of_no_use(
    saved: Mapping[str, Any], built: Mapping[str, Any], trained_by: str | None, *, is_told: bool
) -> str | None:
    """By whom a group was saved whose values mean nothing to this run, and what it has instead;
    None if they do.
    """
    was_named, is_named = bool(saved.keys() & RATIOS.values()), bool(built.keys() & RATIOS.values())
    if was_named and not is_named:
        return "whose config named its optimizers, and this one was given an optimizer; its values"
    if is_named and not was_named and is_told:
        return "that was given an optimizer; the values of this one's config"
    return trained_by and f"with {trained_by}; the values of this run's optimizer"


def otherwise_trained(
    own: Mapping[str, RuleRecord], saved: Mapping[str, RuleRecord], group_of: Mapping[str, int]
) -> dict[int, str]:
    """By parameter group, what a checkpoint was trained by, if another class than now, or with
    settings with which it keeps other states, which the values in a group have to go with.

    Args:
        own, saved: by parameter, the optimizers of this run and of the checkpoint.
    """
    found: dict[int, str] = {}
    for name, now in own.items():
        if (old := saved.get(name)) and not now.has_states_of(old):
            found.setdefault(
                group_of[name], f"{old.family} (states {', '.join(old.state_keys) or 'none'})"
            )
    return found


def _line(
    key: str,
    old: str,
    new: str,
    is_taken: bool,
    groups: Sequence[int],
    wins: OnHyperChange,
    scheduler: Any,
) -> str:
    if not is_taken:
        outcome = f"{old} goes on, set layerwise.on_hyper_change to 'config' for {new}"
    elif wins == "config":
        outcome = f"{new} goes on, as layerwise.on_hyper_change says"
    else:
        kind = type(scheduler).__name__
        outcome = f"{new} goes on, because {kind} starts from what this run's config says of lr"
    return (
        f"param_groups[{', '.join(map(str, groups))}].{key} was {old} in the run that was saved "
        f"and is {new} in this one's config; {outcome}"
    )


def _given(
    saved: Mapping[str, Any],
    configured: Mapping[str, Any] | None,
    built: Mapping[str, Any],
    *,
    is_scheduled: bool,
) -> Mapping[str, Any]:
    """What the group was given when the run that was saved began, as far as a checkpoint of version
    0.1 tells.
    """
    if configured is not None:
        return configured
    known = {key: saved.get(key, built[key]) for key in built}
    # What a schedule has moved says nothing of where it began, unless torch's have written that
    # down.
    return {**known, "lr": saved.get("initial_lr", (built if is_scheduled else known)["lr"])}


def _follow_config(
    group: dict[str, Any],
    before: Mapping[str, Any],
    built: Mapping[str, Any],
    taken: Sequence[str],
    stays: Set[str],
    floor: float,
) -> dict[str, Any]:
    """Let ``group`` have of ``built`` what ``taken`` names, but not what ``stays``, and return
    that.

    Args:
        floor: see :func:`_floor`.
    """
    given = {key: built[key] for key in taken if key not in _RATES}
    if set(_RATES).intersection(taken):
        given |= {ratio: built[ratio] for ratio in RATIOS.values() if ratio in built}
    for key in given.keys() - stays:
        _set(group, key, given[key])
    if "lr" in taken:
        given["lr"] = built["lr"]
        for key in _IN_GROUPS:
            if key in group and key not in stays:
                _set(
                    group,
                    key,
                    _moved(
                        float(group[key]), before["lr"], built["lr"], floor if key == "lr" else 0.0
                    ),
                )
    return given


def _put_by(scheduler: Any) -> frozenset[str]:
    """The keys of a group that are the scheduler's."""
    if scheduler is None:
        return frozenset()
    cycles = any(getattr(each, "cycle_momentum", False) for each in _all_in(scheduler))
    return frozenset((*_IN_GROUPS, *_OF_MOMENTUM, *(_CYCLED if cycles else ())))


def _all_in(scheduler: Any) -> Iterator[Any]:
    """It, and where it is one of several, those."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _all_in(inner)


def _follow_lr(scheduler: Any, index: int, old: float, new: float) -> None:
    """Move what a torch scheduler keeps of the learning rate of a group."""
    for each in _all_in(scheduler):
        for name in _IN_LISTS:
            rates = getattr(each, name, None)
            if isinstance(rates, list) and index < len(rates):
                # Those of a sequence are the very list of the one at work.
                rates = list(rates)
                rates[index] = _moved(
                    float(rates[index]), old, new, _floor(each) if name == "_last_lr" else 0.0
                )
                setattr(each, name, rates)


def _floor(scheduler: Any) -> float:
    """What the rates of ``scheduler`` come down to, wherever they begin: ``eta_min``, of the one
    that is at work in a sequence."""
    if isinstance(scheduler, SequentialLR):
        return _floor(
            scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
        )
    return (
        float(scheduler.eta_min)
        if isinstance(scheduler, (CosineAnnealingLR, CosineAnnealingWarmRestarts))
        else 0.0
    )


def _moved(value: float, old: float, new: float, floor: float) -> float:
    """``value`` of a schedule from ``old`` down to ``floor`` at the same place of one from ``new``;
    where the first two are equal, 0 for one, so that every place is the same, ``new`` itself."""
    if old in (value, floor):
        return float(new)
    return floor + (value - floor) * (float(new) - floor) / (float(old) - floor)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, Tensor) and not held.dim() and isinstance(value, (int, float)):
        # Schedulers and users hold on to it.
        held.fill_(value)
    else:
        group[key] = like(held, value)
