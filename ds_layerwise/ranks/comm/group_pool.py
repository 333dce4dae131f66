"""Process groups in which only one optimizer reduces gradients.

Note: why none is shared on a host
    Collectives of a group must begin in the same order on every rank. On a host, timing decides
    when a bucket begins inside a backward pass, and one pass may go through the models of two
    engines, such as those of a generator and its critic. On a device with streams, a bucket begins
    as soon as its gradients are complete, so groups may be shared. DeepSpeed's fetches of stage 3
    begin in another order everywhere, where some rank has no gradient of a parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed

from ds_layerwise.ranks.comm import comm


@dataclass
class _Seat:
    """A group and its users. torch owns the group."""

    group: weakref.ref[Any]
    users: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


#: By group, the group and its copies, in the same order on all of its ranks.
_seats: weakref.WeakKeyDictionary[Any, list[_Seat]] = weakref.WeakKeyDictionary()


def take(
    groups: comm.Groups,
    user: object,
    device: torch.device,
    others: Mapping[Any, object],
) -> comm.Groups:
    """Reserve ``groups``, or copies if they are in use, for the reductions of ``user`` until
    :func:`release`. Return them.

    Every rank of the world must call this at the same point.

    Args:
        others: users of a group in another way, by group, as long as they exist.
    """
    if device.type != "cpu" and not others:
        return groups
    mine = _known(groups, others)
    taken = {}
    for ranks, seats in mine.items():
        taken[ranks] = [seat.group() is None or len(seat.users) > 0 for seat in seats]
    if any(comm.gather_objects(any(map(any, taken.values())), group=None)):
        # One rank may still hold an engine that another rank has dropped.
        for other in comm.gather_objects(taken, group=None):
            for ranks, flags in other.items():
                own = taken.get(ranks, flags)
                taken[ranks] = [max(pair) for pair in zip(own, flags, strict=True)]
        for ranks in sorted(taken):
            if all(taken[ranks]):
                taken[ranks].append(False)
                copy = distributed.new_group(list(ranks))
                if ranks in mine:
                    comm.take_over_timeout(copy)
                    mine[ranks].append(_Seat(weakref.ref(copy)))
    found = dict(groups)
    for key, group in groups.items():
        ranks = tuple(comm.ranks_of(group))
        if ranks in mine:
            seat = mine[ranks][taken[ranks].index(False)]
            seat.users.add(user)
            found[key] = seat.group()
    return found


def _known(groups: comm.Groups, others: Mapping[Any, object]) -> dict[tuple[int, ...], list[_Seat]]:
    """Return those of ``groups`` that need a seat, with their copies, by ranks."""
    mine = {}
    for group in groups.values():
        if comm.size_of(group) > 1:
            original = group or distributed.group.WORLD
            seats = _seats.setdefault(original, [_Seat(weakref.ref(original))])
            if original in others:
                seats[0].users.add(others[original])
            mine[tuple(comm.ranks_of(group))] = seats
    return mine


def release(user: object) -> None:
    """Free the groups of ``user``."""
    for seats in _seats.values():
        for seat in seats:
            seat.users.discard(user)
