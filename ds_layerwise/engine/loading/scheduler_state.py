"""Whether a learning rate scheduler can go on from what a checkpoint says of one.

Note: what is compared
    The keys of the state. torch's schedulers take whatever a state has, and go on from the rest of
    their own, so that one of another kind would be restarted without a word; others miss a key when
    half of a load is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler, swa_utils

from ds_layerwise.checkpoint.plain_values import check_kind
from ds_layerwise.errors import LayerWiseError

#: What schedulers of torch have, or have not, by its version and by their options, and load
#: without.
_EITHER_WAY = frozenset(
    ("verbose", "anneal_func", "default_min_lr", "use_beta1", "base_momentums", "max_momentums")
)

#: Private names that no scheduler of torch that has them goes on without; the others come and go
#: with its versions.
_NEEDED = frozenset(("_milestones", "_schedule_phases"))

#: What each of torch's needs, and those that are derived from it.
_OF_ALL = frozenset(("last_epoch", "base_lrs"))

#: What the states of torch's schedulers have beside that.
_OF_TORCH = frozenset(
    (
        "T_max",
        "eta_min",
        "T_0",
        "T_i",
        "T_mult",
        "T_cur",
        "step_size",
        "gamma",
        "milestones",
        "factor",
        "start_factor",
        "end_factor",
        "total_iters",
        "power",
        "lr_lambdas",
        "lmbda",
        "total_steps",
        "total_size",
        "step_ratio",
        "mode",
        "cycle_momentum",
        "max_lrs",
        "patience",
        "cooldown",
        "num_bad_epochs",
    )
)

#: Whose schedulers say at their start all that their states have.
_WELL_KNOWN = (lr_scheduler.__name__, swa_utils.__name__, lr_schedules.__name__)

_INNER = "_schedulers"


def check_scheduler(scheduler: Any, saved: Any) -> list[str]:
    """Refuse the state ``saved`` of a scheduler if it is of another kind than this run's
    ``scheduler``.

    What torch's versions name otherwise is no difference. Of a class of the script, neither is an
    attribute that it takes when something happens, such as the end of a warm-up, and that the state
    has beside all of this one's; nor, if it loads as torch's do, one that the state lacks and that
    keeps its value. Both at once are another name, or class.

    Returns:
        What the state has, this one has not so far, and takes over.

    Raises:
        LayerWiseError: there is none, or it has what this one lacks, or lacks what this one has;
            names that.
        ValueError: something in it is another kind of thing than this one has there; names it.
    """
    if saved is None:
        raise LayerWiseError(
            "the checkpoint holds no state of a learning rate scheduler, and this run has one; "
            "load with load_lr_scheduler_states=False to start the schedule afresh"
        )
    if not hasattr(scheduler, "state_dict"):
        return []
    own = scheduler.state_dict()
    if not isinstance(own, Mapping) or not isinstance(saved, Mapping):
        found = (
            []
            if isinstance(saved, type(own))
            else [f"is a {type(saved).__name__}, not a {type(own).__name__}"]
        )
    else:
        check_kind(own, saved, "the state of the learning rate scheduler")
        found = _differences(scheduler, own, saved, "")
    more = (
        []
        if found or not isinstance(own, Mapping)
        else sorted(filter(_counts, map(str, saved.keys() - own.keys())))
    )
    if found:
        raise LayerWiseError(
            "the checkpoint's learning rate scheduler is another one than this run's "
            f"{type(scheduler).__name__}: its state {'; '.join(found)}; make the scheduler as the "
            "run that was saved did, or load with load_lr_scheduler_states=False to start this "
            "one afresh"
        )
    return more


def _differences(
    scheduler: Any, own: Mapping[Any, Any], saved: Mapping[Any, Any], where: str
) -> list[str]:
    """What keeps ``scheduler``, whose state is ``own``, from going on from ``saved``."""
    known, there = set(map(str, own)), set(map(str, saved))
    unknown, missing = set(filter(_counts, there - known)), set(filter(_counts, known - there))
    if type(scheduler).__module__ not in _WELL_KNOWN and known and not missing:
        unknown &= _OF_TORCH | _OF_ALL
    if _takes_what_there_is(scheduler):
        missing &= _OF_ALL
    found = [
        f"{what} {', '.join(names)}"
        for what, keys in (("has", unknown), ("lacks", missing))
        if (names := sorted(f"{where}{key}" for key in keys))
    ]
    inner, before = getattr(scheduler, _INNER, None), saved.get(_INNER)
    if isinstance(inner, Iterable) and isinstance(before, list):
        inner = list(inner)
        if len(inner) != len(before):
            return [*found, f"has {len(before)} {where}{_INNER}, not {len(inner)}"]
        for index, (each, state) in enumerate(zip(inner, before, strict=True)):
            found += _differences(each, each.state_dict(), state, f"{where}{_INNER}[{index}].")
    return found


def _counts(key: str) -> bool:
    return key in _NEEDED or key == _INNER or not key.startswith("_") and key not in _EITHER_WAY


def _takes_what_there_is(scheduler: Any) -> bool:
    """Whether it is of a class of the script, and lets torch load it."""
    kind = type(scheduler)
    return (
        kind.__module__ not in _WELL_KNOWN
        and getattr(kind, "load_state_dict", None) is lr_scheduler.LRScheduler.load_state_dict
    )
