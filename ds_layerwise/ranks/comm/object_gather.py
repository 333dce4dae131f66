"""The exchange of small objects between ranks over the hosts' network. It needs no device, not even
a chosen one.

Note: why not over the existing group
    NCCL sends data of the current device. Before a process has chosen its device, all processes of
    a node use the first one, and fail or hang. Afterwards, the objects would queue behind all work
    of the device, and a rank out of device memory could not report it. So objects travel over gloo:
    over the group itself if it uses gloo or a similar backend, else over one group of all ranks.
    That group is made at the first use, has the timeout of the default group, and ends with it.
"""

from __future__ import annotations

import os
import pickle
import struct
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from ds_layerwise.errors import LayerWiseError

#: The backends of torch's own groups on a CPU; "fake" answers at once.
_ON_THE_HOST = ("gloo", "mpi", "fake")

#: The group of all ranks over gloo, by default group. torch owns both, and drops both in
#: ``destroy_process_group``.
_made: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def gather(value: Any, *, group: Any) -> list[Any]:
    """Return ``value`` of every rank of ``group``, in its order; None stands for all ranks. It is
    pickled, so keep it small.

    All ranks must take part in the first use in a process group, whatever ``group`` is.

    Raises:
        LayerWiseError: the hosts cannot reach each other over gloo, or some rank does not get to
            this point.
    """
    try:
        return _gathered(value, group or distributed.group.WORLD)
    except RuntimeError as error:
        raise LayerWiseError(
            "all ranks must agree here, but another rank has ended, is at another point of the "
            "script, or did not arrive within the timeout of init_distributed: if no rank has "
            "printed an error, and none is just slow, call save_checkpoint(), load_checkpoint() "
            "and step() on every rank, not only on rank 0"
        ) from error


def _gathered(value: Any, group: Any) -> list[Any]:
    world: Any = distributed.group.WORLD
    ranks = distributed.get_process_group_ranks(group)
    if len(ranks) == 1:
        return [value]
    if _talks_on_the_host(group):
        return _of_all(value, group)
    hosts = _hosts(world)
    if len(ranks) == distributed.get_world_size(world):
        values = _of_all(value, hosts)
        return [values[rank] for rank in ranks]
    return _of_some(value, ranks, hosts)


def timeout_of(group: Any, devices: Iterable[Any]) -> timedelta | None:
    """Return the timeout of collectives of ``group`` on one of ``devices``; None if no backend
    reports it.
    """
    for device in devices:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return None


def _talks_on_the_host(group: Any) -> bool:
    """Tell whether the group sends CPU tensors directly, which torch's object collectives
    prefer.
    """
    by_device = dict(entry.split(":") for entry in distributed.get_backend_config(group).split(","))
    return by_device.get("cpu") in _ON_THE_HOST


def _hosts(world: Any) -> Any:
    if _talks_on_the_host(world):
        return world
    hosts = _made[world]() if world in _made else None
    if hosts is None:
        # The gather is a ring: each rank needs connections to two others, not to all.
        is_ours = "TORCH_GLOO_LAZY_INIT" not in os.environ
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        try:
            # Until the first object travels, the ranks share only the store, which knows the
            # timeout.
            hosts = distributed.new_group(
                backend="gloo",
                timeout=timeout_of(world, world._device_types),
                group_desc="ds_layerwise",
            )
            _of_all(None, hosts)
        except RuntimeError as error:
            raise LayerWiseError(
                "the hosts cannot reach each other over gloo, which ranks use to agree; set "
                "GLOO_SOCKET_IFNAME to the network interface (like NCCL_SOCKET_IFNAME for NCCL), "
                "and make `ulimit -n` larger than the number of ranks: "
                f"{error}"
            ) from error
        finally:
            if is_ours:
                del os.environ["TORCH_GLOO_LAZY_INIT"]
        _made[world] = weakref.ref(hosts)
    return hosts


def _of_all(value: Any, group: Any, room: int = 512) -> list[Any]:
    """Gather in one collective if no pickled value has more than ``room`` bytes, else in two."""
    pickled = pickle.dumps(value)
    row = f"q{room}s"
    own = torch.frombuffer(bytearray(struct.pack(row, len(pickled), pickled)), dtype=torch.uint8)
    everyone = own.new_empty(distributed.get_world_size(group), len(own))
    # Not the function of deepspeed.comm, whose logger would count it among those of a step.
    distributed.all_gather(list(everyone), own, group=group)
    sizes, texts = zip(*(struct.unpack(row, each) for each in everyone.numpy()), strict=True)
    if max(sizes) > room:
        return _of_all(value, group, max(sizes))
    return list(map(pickle.loads, texts))


def _of_some(value: Any, ranks: list[int], hosts: Any) -> list[Any]:
    """Gather from ``ranks`` of ``hosts``, through the first of them. The other ranks of ``hosts``
    do not take part.

    A gloo group for each set of ranks would not work: its name counts the groups that a rank is
    already in, and that may differ between ranks.
    """
    first = ranks[0]
    through: dict[str, Any] = {"group": hosts, "device": torch.device("cpu")}
    if distributed.get_rank() != first:
        everyone: list[Any] = [None] * len(ranks)
        distributed.send_object_list([value], dst=first, **through)
        distributed.recv_object_list(everyone, src=first, **through)
        return everyone
    everyone = [value]
    for other in ranks[1:]:
        received = [None]
        distributed.recv_object_list(received, src=other, **through)
        everyone += received
    for other in ranks[1:]:
        distributed.send_object_list(everyone, dst=other, **through)
    return everyone
