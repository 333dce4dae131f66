"""Ranks that differ find out where, and send little for it; sums of many ranks are made in levels."""

from __future__ import annotations

import itertools
import threading
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from ds_layerwise.errors import LayoutError
from ds_layerwise.plan.forecast.memory import transfer_bytes
from ds_layerwise.plan.layout.layout import Layout, Slot
from ds_layerwise.plan.layout.transport import partial_sums
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.ranks.sync.bucket_transfers import Wire, _add_up_at_once, average
from tests.support.rooms import rooms
from tests.support.transports import bucket_of

pytestmark = rooms("comm", "transport", "bucket_transfers")

MANY = [f"model.layers.{number}.mlp.down_proj.weight (4096, 11008) bfloat16" for number in range(10_000)]


class Ranks:
    """Threads that each are a rank, and what they have gathered."""

    def __init__(self, monkeypatch, num_ranks: int) -> None:
        self.size, self.sent = num_ranks, []
        self._barrier, self._values, self._here = threading.Barrier(num_ranks), [None] * num_ranks, threading.local()
        monkeypatch.setattr(comm, "gather_objects", self._gather)

    def _gather(self, value, *, group):
        self._values[self._here.rank] = value
        self.sent.append(value)
        self._barrier.wait(timeout=20)
        everyone = list(self._values)
        self._barrier.wait(timeout=20)
        return everyone

    def run(self, function):
        """Return what ``function(rank)`` returns or raises on each rank."""
        results = [None] * self.size

        def be(rank):
            self._here.rank = rank
            try:
                results[rank] = function(rank)
            except Exception as e:
                results[rank] = e
        threads = [threading.Thread(target=be, args=(rank, )) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.mark.parametrize(("of_rank_2", "told"), [
    ([*MANY[:7777], "another (1,) float32", *MANY[7778:]], f"rank 0 has {MANY[7777]}, rank 2 has another (1,) float32"),
    (["another", *MANY[1:]], f"rank 0 has {MANY[0]}, rank 2 has another"),
    ([*MANY[:-1], "another"], f"rank 0 has {MANY[-1]}, rank 2 has another"),
    (MANY[:5], f"only rank 0 has {MANY[5]}"), ([*MANY, "one more"], "only rank 2 has one more"),
    ([], f"only rank 0 has {MANY[0]}"), ([*MANY[:5], *MANY[6:]], f"only rank 0 has {MANY[5]}"),
    ([*MANY[:5], "one more", *MANY[5:]], "only rank 2 has one more"),
    ([*MANY[:5], MANY[5] + " (frozen)", *MANY[6:]], f"rank 0 has {MANY[5]}, rank 2 has {MANY[5]} (frozen)"),
    (MANY, "same entries, different placement")])
def test_only_what_differs_is_sent(monkeypatch, of_rank_2, told):
    ranks = Ranks(monkeypatch, 4)
    found = ranks.run(lambda rank: comm.same_on_all_ranks(
        "the model", of_rank_2 if rank == 2 else MANY, group=None, placement="its" if rank == 2 else "ours"))
    assert all(isinstance(each, LayoutError) for each in found)
    assert {str(each) for each in found} == {f"the model differs between ranks: {told}; 3 of 4 ranks agree with rank "
                                           "0, but all must"}
    assert max(len(str(each)) for each in ranks.sent) < 100 and len(ranks.sent) <= 4 * 18


def test_ranks_that_are_alike_send_a_digest(monkeypatch):
    ranks = Ranks(monkeypatch, 3)
    assert ranks.run(lambda rank: comm.same_on_all_ranks("the model", MANY, group=None)) == [None] * 3
    assert ranks.sent == [comm.digest_of(["", *MANY])] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_made_in_the_order_of_rows_however_long_they_are(dtype):
    for size in (1, 2, 3, 16, 17, 18, 33, 64):
        rows = torch.randn(size, 300, generator=torch.Generator().manual_seed(size)).to(dtype)
        expected = torch.zeros(300)
        for row in rows:
            expected += row
        for numel in (1, 3, 7, 31, 64, 129, 300):
            out = torch.full((numel,), torch.nan)
            average(rows[:, :numel].clone(), out, 3.0, torch.empty(0))
            assert torch.equal(out, expected[:numel] / 3.0), (size, numel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_that_a_device_makes_of_some_rows_at_a_time(dtype):
    for size, numel in itertools.product((2, 3, 15, 16, 17, 32, 33, 50, 256, 257, 300), (1, 2, 5, 64, 130)):
        rows = torch.randint(-9, 9, (size, numel), generator=torch.Generator().manual_seed(size)).to(dtype)
        out, expected = torch.full((numel,), torch.nan), rows.float().sum(0)
        _add_up_at_once(rows.clone(), out, spare=torch.full((numel * sum(partial_sums(size)),), torch.nan))
        assert torch.equal(out, expected), (size, numel)


class Group(NamedTuple):
    size: int
    rank: int


@pytest.mark.parametrize("wire", ["bfloat16", "float32"])
@pytest.mark.parametrize("size, per_node, transport, partial", [
    (512, 1, "even", 32 + 2), (512, 8, "cuts", 4), (512, 64, "even", 8 * 4), (4096, 64, "cuts", 64 * 4),
    (16, 1, "even", 0), (17, 1, "cuts", 2), (2, 1, "even", 0), (32, 32, "even", 2)])
def test_sums_of_a_device_take_little_memory(size, per_node, transport, partial, wire, monkeypatch):
    monkeypatch.setattr(comm, "size_of", lambda group: group.size)
    monkeypatch.setattr(comm, "rank_of", lambda group: group.rank)
    monkeypatch.setattr(comm, "all_to_all", lambda *args, **kwargs: SimpleNamespace(wait=lambda: None))
    levels = {"inside": Group(per_node, 0), "across": Group(size // per_node, 0)} if 1 < per_node < size else {}
    slots = tuple(Slot(str(i), 64 * i, 64) for i in range(size))
    bucket = bucket_of(0, "bfloat16", True, 0, (64,) * size, slots, transport=transport)
    turn, meta = Turn(torch.device("meta")), {"device": torch.device("meta")}
    Wire(Group(size, 0), on_host=False, **levels).reduce(
        torch.empty(bucket.numel, dtype=DTYPES[wire], **meta), torch.empty(64, **meta), divide_by=1,
        wire_dtype=DTYPES[wire], turn=turn).wait()
    found = sum(memory.numel() for memory in turn._memory.values())
    one = 64 * DTYPES[wire].itemsize
    sums = 4 * bucket.numel // per_node + one * size if levels else 0
    assert found == sums + one * (size if size > 2 else 1) + 4 * 64 * partial
    if not levels:
        assert found <= transfer_bytes(Layout("balanced", size, 64, (bucket,)), stage=1, stored_as={"bfloat16": wire},
                                       wires=[wire], reduction="ordered")


@pytest.mark.parametrize("rows, kernels", [(2, 1), (16, 1), (17, 3), (64, 2), (512, 3), (2048, 3), (2049, 5)])
def test_the_kernels_of_a_sum_on_a_device_grow_with_the_logarithm_of_its_rows(rows, kernels, monkeypatch):
    made = []
    monkeypatch.setattr(torch, "sum", lambda *args, real=torch.sum, **kwargs: made.append(1) or real(*args, **kwargs))
    summands, out = torch.ones(rows, 3), torch.empty(3)
    _add_up_at_once(summands, out, spare=torch.empty(3 * sum(partial_sums(rows))))
    assert out.tolist() == [rows] * 3 and len(made) == kernels


def test_work_that_does_not_say_when_it_is_over_is_waited_for():
    """A collective like DeepSpeed's over host memory, of a device without a backend of its own."""
    waited = []
    pending = comm.Pending([SimpleNamespace(wait=lambda: waited.append(1))], lambda: waited.append(2))
    assert not pending.advance() and not waited
    pending.wait()
    assert waited == [1, 2]


def test_a_transfer_becomes_what_follows_it():
    """Memory is kept while it is read, and the last transfer begins without being waited for."""
    done = []

    def transfer(number, *following):
        keep = torch.empty(0)
        kept = weakref.ref(keep)
        works = [SimpleNamespace(wait=lambda: done.append((f"waited {number}", kept() is not None)))]

        def finish():
            done.append((f"finished {number}", kept() is not None))
            return transfer(*following) if following else None

        return comm.Pending(works, finish, keep=keep, is_chained=bool(following))

    pending = transfer(1, 2, 3)
    pending.begin_last()
    assert done == [("waited 1", True), ("finished 1", False), ("waited 2", True), ("finished 2", False)]
    for _ in range(2):
        pending.wait()
    assert done[4:] == [("waited 3", True), ("finished 3", False)]
