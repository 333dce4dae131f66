"""Process groups in which only one optimizer reduces gradients.

Note: why none is shared on a host
    Collectives of a group must begin in the same order on every rank. On a host, timing decides
    when a bucket begins inside a backward pass, and one pass may go through the models of two
    engines, such as those of a generator and its critic. On a device with streams, a bucket begins
    as soon as its gradients are complete, so groups may be shared.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from ds_layerwise.ranks.comm import comm


@dataclass
class _Seat:
    """A group and its user. torch owns the group."""

    group: weakref.ref[Any]
    user: weakref.ref[Any] | None = None

    @property
    def is_taken(self) -> bool:
        return self.group() is None or (self.user is not None and self.user() is not None)


#: By group, the group and its copies, in the same order on all of its ranks.
_seats: weakref.WeakKeyDictionary[Any, list[_Seat]] = weakref.WeakKeyDictionary()


def take(groups: comm.Groups, user: object, device: torch.device) -> comm.Groups:
    """Reserve ``groups``, or copies if they are in use, for the reductions of ``user`` until
    :func:`release`. Return them.

    Every rank of the world must call this at the same point.
    """
    if device.type != "cpu":
        return groups
    mine = {}
    for group in groups.values():
        if comm.size_of(group) > 1:
            original = group or distributed.group.WORLD
            first = [_Seat(weakref.ref(original))]
            mine[tuple(comm.ranks_of(group))] = _seats.setdefault(original, first)
    taken = {}
    for ranks, seats in mine.items():
        taken[ranks] = [seat.is_taken for seat in seats]
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
            seat.user = weakref.ref(user)
            found[key] = seat.group()
    return found


def release(user: object) -> None:
    """Free the groups of ``user``."""
    for seats in _seats.values():
        for seat in seats:
            if seat.user is not None and seat.user() is user:
                seat.user = None
