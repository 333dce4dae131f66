"""Comparison of a learning rate scheduler's state with the one in a checkpoint.

Note: what is compared
    The keys of the two states. torch's schedulers take whatever a state has, and go on from the
    rest of their own, so that one of another kind would be restarted without a word; others miss a
    key when half of a load is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_layerwise.checkpoint.plain_values import check_kind
from ds_layerwise.errors import LayerWiseError

#: Public names that schedulers of torch have, or have not, by its version and by their options, and
#: load without. Private names come and go with its versions, too.
_EITHER_WAY = frozenset(
    ("verbose", "anneal_func", "default_min_lr", "use_beta1", "base_momentums", "max_momentums")
)

#: Key of the states of schedulers within a scheduler of torch.
_INNER = "_schedulers"


def check_scheduler(scheduler: Any, saved: Any) -> list[str]:
    """Refuse the state ``saved`` of a scheduler if it is of another kind than this run's
    ``scheduler``.

    A scheduler of a script may take an attribute when something happens, such as the end of a
    warm-up; then the state has that beside all of this run's.

    Returns:
        Names that the state has, this run's scheduler has not so far, and takes over.

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
    if not isinstance(own, Mapping):
        if not isinstance(saved, type(own)):
            raise LayerWiseError(
                "the checkpoint's learning rate scheduler is another one than this run's "
                f"{type(scheduler).__name__}: its state is a {type(saved).__name__}, not a "
                f"{type(own).__name__}; make the scheduler as the run that was saved did, or load "
                "with load_lr_scheduler_states=False to start this one afresh"
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
            "the checkpoint's learning rate scheduler is another one than this run's "
            f"{type(scheduler).__name__}: its state {'; '.join(differences)}; make the scheduler "
            "as the run that was saved did, or load with load_lr_scheduler_states=False to start "
            "this one afresh"
        )
    return more


def _keys(state: Any, where: str = "") -> Iterator[str]:
    """Yield the names in ``state`` that count, those of schedulers within it, too."""
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if key == _INNER:
            for index, inner in enumerate(value):
                yield from _keys(inner, f"{where}{key}[{index}].")
        elif not str(key).startswith("_") and key not in _EITHER_WAY:
            yield f"{where}{key}"
