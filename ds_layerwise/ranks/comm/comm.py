"""All collectives on tensors. They go through ``deepspeed.comm``, so that DeepSpeed's comms logger
sees them.

Small objects travel between hosts; see :mod:`.ranks.comm.object_gather`. The choice of the
collectives for a bucket is in :mod:`.ranks.sync.bucket_transfers`.

Sizes are in elements. ``rank`` is within the group.

Note: both directions at a time
    gloo has one connection between two ranks. On it, a receiving rank announces that it is ready
    before the other one sends. In an all-to-all this announcement waits behind the data that the
    rank itself sends. So the later of two ranks sends all of its data first, and the links are idle
    in one direction: over 200 Mbit/s an all-to-all takes 2.0 times as long as the links need with
    two nodes, and 1.5 times with eight. With two groups, one for data to higher ranks and one for
    data to lower ranks, no announcement waits behind data: 1.05 and 1.3 times.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.utils import logger
from torch import Tensor

from ds_layerwise.errors import LayerWiseError, LayoutError
from ds_layerwise.output import announce
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import object_gather

#: A process group: torch's, or None for the whole world.
Group = Any

#: The ranks that hold the same experts, by the ep_size of a bucket; 1 is all ranks.
Groups = Mapping[int, Group]

#: The attribute that marks an error as known to every rank.
AGREED = "_layerwise_agreed"

#: By group, a second group of the same ranks in the same order; see the note on both directions.
_opposite: weakref.WeakKeyDictionary[Group, Group] = weakref.WeakKeyDictionary()


class Pending:
    """A pending collective, and the work that follows it. Wait for it before reading its result.

    Args:
        finish: the work after the transfer: something local, or another collective, which it
            returns.
        keep: memory that the transfer reads, kept alive until it is finished.
        is_chained: True if ``finish`` begins another collective.
    """

    def __init__(
        self,
        works: Sequence[Any] = (),
        finish: Callable[[], Pending | None] | None = None,
        *,
        keep: Tensor | None = None,
        is_chained: bool = False,
    ) -> None:
        self._works = works
        self._finish = finish
        self._keep = keep
        self.is_chained = is_chained

    def advance(self) -> bool:
        """Proceed as far as possible without waiting for another rank. Return True if everything is
        finished.
        """
        # A device without a backend of its own uses a work object of DeepSpeed, which lacks
        # is_completed.
        while all(hasattr(work, "is_completed") and work.is_completed() for work in self._works):
            if not self._go_on():
                return True
        return False

    #: The name under which one Pending may be a transfer of another.
    is_completed = advance

    def wait(self) -> None:
        """Wait for the transfer, then do the work that follows it."""
        while self._go_on():
            pass

    def _go_on(self) -> bool:
        """Wait for the current transfer, do the work that follows it, and tell whether that is
        another transfer.
        """
        for work in self._works:
            work.wait()
        self._works = ()
        self._keep = None
        # Run it before it is forgotten: it may run out of memory, and a second wait must run it
        # again.
        following = self._finish and self._finish()
        now = following or Pending()
        self._works = now._works
        self._finish = now._finish
        self._keep = now._keep
        self.is_chained = now.is_chained
        return following is not None

    def begin_last(self) -> None:
        """Wait until the last of its collectives has begun."""
        while self.is_chained:
            self._go_on()

    def then(self, more: Callable[[], object]) -> Pending:
        """Return this collective, with the local work ``more`` added at its end."""
        finish = self._finish

        def finish_and_more() -> Pending | None:
            following = finish and finish()
            if following:
                return following.then(more)
            more()
            return None

        self._finish = finish_and_more
        return self


def rank_of(group: Group) -> int:
    """Return this process's rank within ``group``."""
    return int(dist.get_rank(group=group))


def size_of(group: Group) -> int:
    """Return the number of ranks of ``group``."""
    return int(dist.get_world_size(group=group))


def take_over_timeout(group: Group) -> None:
    """Give collectives of ``group`` the timeout of the world group, as the user has set it.

    DeepSpeed makes its groups without a timeout. If a rank stopped, the others would wait for
    torch's default.
    """
    world: Group = torch.distributed.group.WORLD
    if group is None or group is world:
        return
    for device in group._device_types:
        own = group._get_backend(device)
        # Not every backend has a timeout or reports it.
        timeout = object_gather.timeout_of(world, [device])
        if timeout is not None and hasattr(own, "_set_default_timeout"):
            own._set_default_timeout(timeout)


def send_both_ways(group: Group, opposite: Group) -> None:
    """Use ``opposite`` for the data that :func:`all_to_all` sends to lower ranks of ``group``. It
    has the same ranks and other connections.

    Every rank of ``group`` must call this at the same point.
    """
    _opposite[group or torch.distributed.group.WORLD] = opposite


def opposite_of(group: Group) -> Group:
    """Return the opposite group set by :func:`send_both_ways`, or None."""
    group = group or torch.distributed.group.WORLD
    return group and _opposite.get(group)


def all_to_all(
    out: Tensor,
    sent: Tensor,
    *,
    group: Group,
    received: list[int] | None = None,
    sent_to: list[int] | None = None,
) -> Any:
    """Begin to send parts of 1-D ``sent`` to the ranks of ``group``, and to receive their parts
    into 1-D ``out``.

    Args:
        received, sent_to: the number of elements from and to each rank; equal parts if None.
    """
    opposite = opposite_of(group)
    if opposite is None:
        return _all_to_all(out, sent, received, sent_to, group)
    size = size_of(group)
    rank = rank_of(group)
    received = received or [out.numel() // size] * size
    sent_to = sent_to or [sent.numel() // size] * size
    from_lower = sum(received[: rank + 1])
    to_lower = sum(sent_to[:rank])
    none = [0] * size
    upwards = _all_to_all(
        out[:from_lower],
        sent[to_lower:],
        received[: rank + 1] + none[rank + 1 :],
        none[:rank] + sent_to[rank:],
        group,
    )
    downwards = _all_to_all(
        out[from_lower:],
        sent[:to_lower],
        none[: rank + 1] + received[rank + 1 :],
        sent_to[:rank] + none[rank:],
        opposite,
    )
    return Pending([upwards, downwards])


def _all_to_all(
    out: Tensor,
    sent: Tensor,
    received: list[int] | None,
    sent_to: list[int] | None,
    group: Group,
) -> Any:
    return dist.all_to_all_single(
        out,
        sent,
        output_split_sizes=received,
        input_split_sizes=sent_to,
        group=group,
        async_op=True,
    )


def reduce_scatter(out: Tensor, sent: Tensor, *, group: Group) -> Any:
    """Begin to sum 1-D ``sent`` over ``group`` with the backend's reduce-scatter. ``out`` is this
    rank's part of as many equal parts as there are ranks.

    ``out`` may be that part of ``sent``.
    """
    return dist.reduce_scatter_tensor(out, sent, group=group, async_op=True)


def all_gather(out: Tensor, own: Tensor, *, group: Group) -> Any:
    """Begin to gather equal parts of all ranks into 1-D ``out``. ``own`` may be this rank's part of
    it.
    """
    return dist.all_gather_into_tensor(out, own, group=group, async_op=True)


def broadcast(value: Tensor, *, out_of: int, group: Group) -> Any:
    """Begin to broadcast ``value`` from rank ``out_of`` of ``group``."""
    return dist.broadcast(value, ranks_of(group)[out_of], group=group, async_op=True)


#: Sends a tensor to the rank ``dst`` of the world, which receives it from ``src``; both wait.
send = dist.send
receive = dist.recv


def ranks_of(group: Group) -> list[int]:
    """Return the world ranks of the members of ``group``, in its order."""
    return torch.distributed.get_process_group_ranks(group)


def sum_over_ranks(value: Tensor, *, group: Group) -> Tensor:
    """Return the sum of ``value`` over ``group``, the same on every rank. ``value`` is
    overwritten.
    """
    if size_of(group) > 1:
        dist.all_reduce(value, group=group)
    return value


def max_over_ranks(value: Tensor, *, group: Group) -> Tensor:
    """Return the element-wise maximum of ``value`` over ``group``. ``value`` must have no NaN and
    is overwritten.
    """
    if size_of(group) > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value


class Peers:
    """The ranks with the other parts of this rank's matrices, for updates of parts; see
    :mod:`.orthogonalize.tensor_shards`.

    Args:
        group: tensor-parallel ranks, in the order of the parts.
        lengths: the lengths of the cut axis of all parts; empty if they are equal.
    """

    def __init__(self, group: Group, lengths: Sequence[int] = ()) -> None:
        self._group = group
        self.size = size_of(group)
        self.rank = rank_of(group)
        self.lengths = lengths

    def with_lengths(self, lengths: Sequence[int]) -> Peers:
        """Return these ranks with parts of ``lengths``."""
        return Peers(self._group, lengths)

    def gather(self, value: Tensor) -> Tensor:
        """Return the contiguous ``value`` of all ranks, stacked along a new first axis."""
        everyone = value.new_empty((self.size, *value.shape))
        dist.all_gather_into_tensor(everyone.view(-1), value.view(-1), group=self._group)
        return everyone

    def sum_(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over all ranks. ``value`` is overwritten with it."""
        return sum_over_ranks(value, group=self._group)

    def exchange(self, value: Tensor, sent_to: list[int], received: list[int]) -> Tensor:
        """Send 1-D ``value`` in parts of ``sent_to`` elements, by rank. Return the parts of all
        ranks, of ``received`` elements.
        """
        out = value.new_empty(sum(received))
        all_to_all(out, value, group=self._group, received=received, sent_to=sent_to).wait()
        return out


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise on every rank if any rank has an error: its own error if it has one, else one that
    names the failed rank.

    Every rank must call this at the same point. Without it the other ranks would wait in the next
    collective.

    Raises:
        LayerWiseError: another rank failed or did not get here, and this one has no error of its
            own.
    """
    message = None if error is None else f"{type(error).__name__}: {error}"
    try:
        messages = gather_objects(message, group=None)
    except LayerWiseError as missed:
        raise error or missed
    if error is not None:
        setattr(error, AGREED, True)
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise LayerWiseError(f"rank {rank} failed: {message}")


def report(line: str) -> None:
    """Print ``line`` on rank 0 of the world. DeepSpeed's logger shows only warnings by default."""
    if rank_of(None) == 0:
        announce(f"ds_layerwise: {line}")


def warn(message: str) -> None:
    """Log a warning on rank 0 of the world."""
    if rank_of(None) == 0:
        logger.warning(f"ds_layerwise: {message}")


#: :func:`report` and :func:`warn`, once per process.
report_once = cache(report)
warn_once = cache(warn)


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Raise on every rank if any rank leaves the block with an error; see
    :func:`raise_on_all_ranks`.

    Every rank must enter it. A collective inside must be one that a failed rank also takes part in.
    Anything other than an Exception, such as Ctrl-C, leaves the block at once.
    """
    with (attempt := Attempt()):
        yield
    raise_on_all_ranks(attempt.error)


def errors_on_all_ranks_if_started() -> AbstractContextManager[None]:
    """Do what :func:`errors_on_all_ranks` does, and nothing without a process group: DeepSpeed can
    also run without one.
    """
    if dist.is_initialized():
        return errors_on_all_ranks()
    return nullcontext()


#: Returns a value of every rank, in rank order. It is pickled, so keep it small.
gather_objects = object_gather.gather


def digest_of(items: Sequence[str]) -> str:
    """Return a short hash of ``items``, the same in every process."""
    return hashlib.sha256("\n".join(items).encode()).hexdigest()[:12]


def disagreement(everyone: Sequence[Mapping[Any, object]]) -> tuple[Any, int, int] | None:
    """Return the first key for which two ranks have different values, and the numbers of these
    ranks; None if all agree.
    """
    first: dict[Any, int] = {}
    for rank, own in enumerate(everyone):
        for key, value in own.items():
            earlier = first.setdefault(key, rank)
            if everyone[earlier][key] != value:
                return key, earlier, rank
    return None


def same_on_all_ranks(
    what: str, items: Sequence[str], *, group: Group, placement: str = ""
) -> None:
    """Raise on every rank unless ``items`` and ``placement`` are the same everywhere.

    Args:
        what: the name in the error, such as "the model".
        items: each is a name, a space and a description; the error shows the first one that
            differs.
        placement: a digest of what the items do not show.

    Raises:
        LayoutError: something differs.
    """
    digests = gather_objects(digest_of([placement, *items]), group=group)
    like_first = digests.count(digests[0])
    if like_first < len(digests):
        other = next(rank for rank, own in enumerate(digests) if own != digests[0])
        raise LayoutError(
            f"{what} differs between ranks: {_first_difference(items, other, group)}; {like_first} "
            f"of {len(digests)} ranks agree with rank 0, but all must"
        )


def _first_difference(items: Sequence[str], other: int, group: Group) -> str:
    """Describe where ``items`` of rank 0 and of rank ``other`` differ. Every rank of the group must
    call this.

    It uses a binary search on digests: there may be as many items as parameters in a model, and
    thousands of ranks.
    """

    def of_both(value: Any) -> tuple[Any, Any]:
        everyone = gather_objects(value, group=group)
        return everyone[0], everyone[other]

    same = 0
    different = max(of_both(len(items))) + 1
    while different - same > 1:
        middle = (same + different) // 2
        first, second = of_both((digest_of(items[:middle]), len(items[:middle])))
        if first == second:
            same = middle
        else:
            different = middle
    first, second = of_both(items[same] if same < len(items) else None)
    if first == second:
        return "same entries, different placement"
    if first is None:
        return f"only rank {other} has {second}"
    if second is None:
        return f"only rank 0 has {first}"
    # If one of them lacks an item, all later items are shifted, and items at the same position have
    # different names.
    names = {item.partition(" ")[0] for item in items}
    lacks = []
    for item in (first, second):
        lacks.append(item.partition(" ")[0] not in names)
    (_, lacks_second), (lacks_first, _) = of_both(lacks)
    if lacks_first and not lacks_second:
        return f"only rank 0 has {first}"
    if lacks_second and not lacks_first:
        return f"only rank {other} has {second}"
    return f"rank 0 has {first}, rank {other} has {second}"
