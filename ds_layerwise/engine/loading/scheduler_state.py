"""The comparison of a learning rate scheduler's state with the one in a checkpoint.

Note: what is compared
    The keys of the two states. torch's schedulers accept any state and keep their own values for
    missing keys, so a state of another kind would silently restart the scheduler. Other schedulers
    fail on a missing key half-way through a load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_layerwise.checkpoint.plain_values import check_kind
from ds_layerwise.errors import LayerWiseError

#: The public names that depend on torch's version or on a scheduler's options, and that are not
#: needed to load. Private names also differ between versions.
_EITHER_WAY = frozenset(
    ("verbose", "anneal_func", "default_min_lr", "use_beta1", "base_momentums", "max_momentums")
)

#: The key of the inner schedulers' states in the state of a torch scheduler.
_INNER = "_schedulers"


def check_scheduler(scheduler: Any, saved: Any) -> list[str]:
    """Refuse the state ``saved`` if it belongs to another kind of scheduler than ``scheduler``.

    A script's scheduler may add an attribute at some event, such as the end of a warm-up. Its state
    then has that attribute in addition to those of this run.

    Returns:
        The names in the state that this run's scheduler does not have so far and will load.

    Raises:
        LayerWiseError: there is no state, or the two have different names; names the difference.
        ValueError: a value in it is of another kind than this run's; names it.
    """
    if saved is None:
        raise LayerWiseError(
            "the checkpoint holds no state of a learning rate scheduler, and this run has one; "
            "load with load_lr_scheduler_states=False to start the schedule afresh"
        )
    if not hasattr(scheduler, "state_dict"):
        return []
    own = scheduler.state_dict()
    if not isinstance(own, Mapping):
        if not isinstance(saved, type(own)):
            raise LayerWiseError(
                "the checkpoint's learning rate scheduler differs from this run's "
                f"{type(scheduler).__name__}: its state is a {type(saved).__name__}, not a "
                f"{type(own).__name__}; use the scheduler of the saved run, or load with "
                "load_lr_scheduler_states=False to start this one afresh"
            )
        return []
    check_kind(own, saved, "the state of the learning rate scheduler")
    known = set(_keys(own))
    there = set(_keys(saved))
    missing = sorted(known - there)
    more = sorted(there - known)
    of_library = type(scheduler).__module__.startswith(("torch.", "deepspeed."))
    if missing or more and (of_library or not known):
        differences = []
        for verb, names in (("has", more), ("lacks", missing)):
            if names:
                differences.append(f"{verb} {', '.join(names)}")
        raise LayerWiseError(
            "the checkpoint's learning rate scheduler differs from this run's "
            f"{type(scheduler).__name__}: its state {'; '.join(differences)}; use the scheduler "
            "of the saved run, or load with load_lr_scheduler_states=False to start this one afresh"
        )
    return more


def _keys(state: Any, where: str = "") -> Iterator[str]:
    """Yield the names in ``state`` that are compared, including those of inner schedulers."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if key == _INNER:
            for index, inner in enumerate(value):
                yield from _keys(inner, f"{where}{key}[{index}].")
        elif not str(key).startswith("_") and key not in _EITHER_WAY:
            yield f"{where}{key}"
