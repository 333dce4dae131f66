"""Idle time of the network in reductions, and memory that waits for them, by clocks on streams."""

from typing import NamedTuple

import pytest
import torch
from torch import nn

from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.comm import comm, streams
from ds_layerwise.ranks.owned.buffers import FlatBuffer
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.grad_sync import GradSync
from tests.support.clocks import Clocks
from tests.support.played_ranks import META
from tests.support.rooms import rooms

pytestmark = rooms("grad_sync", "bucket_scheduler", "streams")

#: Buckets of one matrix, of so many elements, on so many ranks.
BUCKETS, ROWS, RANKS = 24, 64, 8
NUMEL = ROWS * ROWS
#: Of the gradient of one bucket.
NBYTES = 2 * NUMEL


class Group(NamedTuple):
    """Ranks, as one of them sees them."""

    size: int
    rank: int


def run(monkeypatch, stage, *, backward, collective, copy, most=None):
    """The clocks after a backward pass, and a stream that waits for it. ``copy`` is of a bucket's gradients."""
    clocks = Clocks(lambda reads: collective, lambda nbytes: copy * nbytes / (2 * NBYTES))
    monkeypatch.setattr(streams, "get_accelerator", lambda: clocks)
    monkeypatch.setattr(streams.SideStream, "keep", lambda self, tensor: clocks.record_stream(tensor, self._stream))
    monkeypatch.setattr(comm, "size_of", lambda group: group.size)
    monkeypatch.setattr(comm, "rank_of", lambda group: group.rank)
    monkeypatch.setattr(comm.dist, "reduce_scatter_tensor",
                        lambda out, sent, *, group, async_op: clocks.collective([sent]))
    # Like an embedding, so that every rank has an equal part of each bucket.
    layout = plan_layout([ParamSpec(str(i), (ROWS, ROWS), "bfloat16", False) for i in range(BUCKETS)], RANKS,
                         bucket_numel=NUMEL)
    assert len(layout.buckets) == BUCKETS and {bucket.transport for bucket in layout.buckets} == {"even"}
    params = {slot.name: nn.Parameter(torch.empty(ROWS, ROWS, dtype=torch.bfloat16, device=META))
              for bucket in layout.buckets for slot in bucket.slots}
    wires = {1: Wire(Group(RANKS, 0), native=True, on_host=False)}
    kwargs = {"wires": wires, "divide_by": 1.0, "sent_as": ["bfloat16"] * BUCKETS}
    computing = clocks.current
    with clocks, torch.no_grad():
        grads = None if stage == 2 else FlatBuffer(layout, META)
        sync = GradSync(params, ReducedGradients(layout, 0, grads, META), grads, **kwargs, max_waiting=most)
        for name, param in params.items():
            computing.now += backward
            param.grad = clocks.watch(torch.empty_like(param))
            sync.accumulate(name, launch=True)
        sync.reduce()
        assert computing.now >= clocks.network.now == clocks.busy[-1][1]
    return clocks


def expected(*, backward, collective, copy, most=None):
    """Return idle time of the network at stage 2 where a bucket is copied when the one before the last has left, and
    bytes of gradients, of which one is there until it has been copied."""
    # A sum of a share of the bucket is copied from 2 bytes an element to 4, and a gradient from 2 to 2.
    out_of_wire = copy * 6 / 4 / RANKS
    now, made, copied, until, begun, over = 0.0, [], [], [], [], [-1.0, -1.0]
    for bucket in range(BUCKETS):
        now += backward
        made.append(now)
        # The memory of the bucket before the last one is free when its sum has been copied out of it.
        free = over[-2] + out_of_wire if bucket > 1 else 0
        copied.append(max(now, free, copied[-1] if copied else 0) + copy)
        begun.append(max(copied[-1], over[-1]))
        over.append(begun[-1] + collective)
        if most is None:
            until.append(copied[-1])
        elif bucket >= most:
            # Computation has waited for it, or is later.
            now = max(now, copied[bucket - most])
            until.append(now)
    until += [over[-1]] * (BUCKETS - len(until))
    idle = over[-1] - begun[0] - BUCKETS * collective
    return idle, NBYTES * max(sum(other <= when < end for other, end in zip(made, until, strict=True))
                              for when in made)


#: Reductions faster than the backward pass, as fast, and slower by two and by four.
SPEEDS = {"fast": 0.5, "as fast": 1.0, "slow": 2.0, "slower": 4.0}


@pytest.mark.parametrize("copy", [0.0, 0.25])
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_slow_network_is_never_idle_and_gradients_pile_up(speed, copy, monkeypatch):
    times = {"backward": 1.0, "collective": SPEEDS[speed], "copy": copy}
    clocks = run(monkeypatch, 2, **times)
    idle, held = expected(**times)
    assert (clocks.idle(), clocks.most_held()) == (pytest.approx(idle), held)
    if speed.startswith("slow"):
        # Copies are beside collectives; about as many gradients pile up as the network is late with.
        late = BUCKETS * (1 - 1 / SPEEDS[speed])
        assert clocks.idle() == 0 and late - 2 <= held / NBYTES <= late + 1
    else:
        assert held <= NBYTES, "more waits than the bucket that is filled"


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("speed", SPEEDS)
def test_a_bound_is_the_most_that_waits(speed, most, monkeypatch):
    times = {"backward": 1.0, "collective": SPEEDS[speed], "copy": 0.25, "most": most}
    clocks = run(monkeypatch, 2, **times)
    idle, held = expected(**times)
    assert clocks.most_held() == held <= (most + 1) * NBYTES and clocks.idle() == pytest.approx(idle)


@pytest.mark.parametrize("speed", SPEEDS)
def test_at_stage_1_no_gradient_waits(speed, monkeypatch):
    clocks = run(monkeypatch, 1, backward=1.0, collective=SPEEDS[speed], copy=0.25)
    assert clocks.most_held() == NBYTES
    # Copies to the buckets are part of the backward pass.
    late = max(0.0, 1.25 - SPEEDS[speed]) * (BUCKETS - 1)
    assert clocks.idle() == pytest.approx(late)
