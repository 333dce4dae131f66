"""A world that talks over devices, played by gloo under another name: what may use it, and from when on."""

import functools
import importlib
import inspect
import os
import sys
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import distributed
from torch.distributed import distributed_c10d

from ds_layerwise.errors import ConfigError, LayerWiseError, LayoutError
from ds_layerwise.ranks.comm import comm
from tests.support.expected import by_the_oracle
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, relative_error, start, train_engine
from tests.support.versions import needs

pytestmark = rooms("devices", "object_gather", "engine_hooks")

EXAMPLES = Path(__file__).parents[3] / "examples"
#: Of torch.distributed: everything that moves a tensor or an object between ranks.
COLLECTIVES = ("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
               "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
               "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier",
               "recv", "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single",
               "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
               "_all_gather_base", "_reduce_scatter_base")
TIMEOUT = timedelta(seconds=115)
LAZY = "TORCH_GLOO_LAZY_INIT"


def over_gloo(store, rank, size, timeout):
    return distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)


def join(folder):
    """Make the world, of which every group is one of devices unless it is asked to be another."""
    if "DEVICES" not in distributed.Backend._plugins:
        distributed.Backend.register_backend("devices", over_gloo, devices=["cpu"])
    rank, size = (int(os.environ[key]) for key in ("RANK", "WORLD_SIZE"))
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    distributed.init_process_group("devices", store=distributed.FileStore(str(folder), size), rank=rank,
                                   world_size=size, timeout=TIMEOUT)
    deepspeed.init_distributed(dist_backend="devices")


@pytest.fixture
def text(tmp_path):
    """A corpus, written before there are ranks."""
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 40)
    return path


@pytest.fixture
def uses(monkeypatch):
    """Uses of the device, in order: ``set_device N``, and each collective on a group of devices."""
    events = []

    def watched(name, collective):
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def watching(*args, **kwargs):
            group = signature.bind(*args, **kwargs).arguments.get("group")
            if distributed.get_backend(group) == "devices":
                events.append(name)
            return collective(*args, **kwargs)
        return watching

    for name in COLLECTIVES:
        if collective := getattr(distributed, name, None):
            watching = watched(name, collective)
            for module in (distributed, distributed_c10d):
                monkeypatch.setattr(module, name, watching)
    accelerator = type(get_accelerator())
    monkeypatch.setattr(accelerator, "set_device", lambda self, index: events.append(f"set_device {index}"))
    return events


class TestDevices(DistributedTest):
    init_distributed = False

    @pytest.mark.parametrize("config", [{}, {"stage": 2, "bf16": {"enabled": True}},
                                        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}])
    def test_the_device_is_chosen_before_anything_uses_it(self, config, uses, tmp_path):
        join(tmp_path / "store")
        rank = dist.get_rank()
        engine = start(Net(), ds_config(**config))
        assert uses[0] == f"set_device {rank}"
        assert "broadcast" in uses  # of the model: the watch sees what there is to see
        assert not [use for use in uses if "object" in use or use == "all_gather"]
        uses.clear()
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path, tag="saved")
        engine.load_checkpoint(tmp_path, tag="saved")
        assert "all_to_all_single" in uses and not [use for use in uses if "object" in use or use == "all_gather"]
        engine.destroy()

    def test_the_device_is_the_one_that_deepspeed_takes(self, uses, tmp_path):
        join(tmp_path / "store")
        start(Net(), ds_config(), args=Namespace(device_rank=7 - dist.get_rank()))
        chosen = [use for use in uses if use.startswith("set_device")]
        assert chosen == [f"set_device {7 - dist.get_rank()}"] * 2  # the second time by DeepSpeed
        assert uses[0] == chosen[0]

    def test_the_example(self, uses, text, tmp_path, monkeypatch):
        join(tmp_path / "store")
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [
            "train_gpt.py", "--deepspeed_config", str(EXAMPLES.parent / "ds_configs" / "quickstart.json"), "--steps",
            "1", "--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--no-save", "--data",
            str(text), "--out", str(tmp_path / str(os.environ["RANK"]))])
        rank = dist.get_rank()
        importlib.import_module("train_gpt").main()
        assert uses[0] == f"set_device {rank}" and "broadcast" in uses
        assert not distributed.is_initialized()

    def test_training_is_what_it_is_over_gloo(self, tmp_path):
        join(tmp_path / "store")
        engine = train_engine(start(Net(), ds_config()), 2)
        expected = by_the_oracle(Net, 2)
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                assert relative_error(param.detach(), expected.model_params[name]) < 1e-5, name


class TestObjects(DistributedTest):
    world_size = 3
    init_distributed = False

    def test_they_need_nothing_of_the_device(self, uses, tmp_path):
        join(tmp_path / "store")
        rank = dist.get_rank()
        with pytest.raises(LayerWiseError if rank != 1 else ConfigError, match="rank 1 failed|no bytes"):
            with comm.errors_on_all_ranks():
                if rank == 1:
                    raise ConfigError("no bytes left here")
        assert comm.gather_objects({"rank": rank}, group=None) == [{"rank": r} for r in range(3)]
        assert not uses
        dist.all_reduce(torch.ones(1))
        assert uses == ["all_reduce"]

    def test_small_ones_take_one_collective_and_larger_ones_two(self, monkeypatch, tmp_path):
        join(tmp_path / "store")
        rank = dist.get_rank()
        comm.gather_objects(None, group=None)
        calls, gather = [], distributed.all_gather
        monkeypatch.setattr(distributed, "all_gather", lambda *args, **kwargs: calls.append(gather(*args, **kwargs)))
        # Of rank 1 alone, in bytes beside which a pickled text takes some.
        for size, expected in ((0, 1), (450, 1), (513, 2), (100_000, 2)):
            calls.clear()
            found = comm.gather_objects((rank, "x" * size * (rank == 1), None), group=None)
            assert found == [(each, "x" * size * (each == 1), None) for each in range(3)]
            assert len(calls) == expected, size

    @needs("torch>=2.13", "its groups are always in the order of ranks")
    def test_objects_of_some_ranks_come_in_the_order_of_the_group(self, uses, tmp_path):
        join(tmp_path / "store")
        rank = dist.get_rank()
        comm.gather_objects(None, group=None)
        # Ranks that are in different numbers of groups.
        groups = {ranks: distributed.new_group(ranks, sort_ranks=False) for ranks in ((2, 0), (1, 2), (2, 1, 0), (1, ))}
        uses.clear()
        for ranks, group in groups.items():
            if rank in ranks:
                for repeat in range(3):
                    value = rank, "x" * 1000 * rank, repeat
                    assert comm.gather_objects(value, group=group) == [(r, "x" * 1000 * r, repeat) for r in ranks]
        assert not uses
        group = groups[2, 0]
        if rank in (2, 0):
            with pytest.raises(LayoutError, match="it differs between ranks: rank 0 has a2, rank 1 has a0"):
                comm.same_on_all_ranks("it", [f"a{rank}"], group=group)
        with pytest.raises(LayerWiseError if rank else ConfigError, match="rank 0 failed: ConfigError: x|^x$"):
            comm.raise_on_all_ranks(None if rank else ConfigError("x"))

    def test_a_world_that_begins_again(self, tmp_path):
        for life in range(3):
            join(tmp_path / str(life))
            rank = dist.get_rank()
            assert comm.gather_objects((life, rank), group=None) == [(life, r) for r in range(3)]
            over = [group for group in distributed_c10d._world.pg_map if distributed.get_backend(group) == "gloo"]
            assert len(over) == 1 and over[0]._get_backend(torch.device("cpu")).options._timeout == TIMEOUT
            comm.gather_objects(None, group=None)
            assert len(distributed_c10d._world.pg_map) == 2  # one is made, once
            del over
            dist.destroy_process_group()

    def test_a_world_of_gloo_is_taken_as_it_is(self, tmp_path):
        store = distributed.FileStore(str(tmp_path / "store"), 3)
        rank = int(os.environ["RANK"])
        for backend in ("gloo", "cpu:gloo,cuda:gloo"):
            distributed.init_process_group(backend, store=distributed.PrefixStore(backend, store), rank=rank,
                                           world_size=3)
            deepspeed.init_distributed(dist_backend="gloo")
            group = distributed.new_group([0, 2])
            assert comm.gather_objects(rank, group=None) == [0, 1, 2]
            assert rank == 1 or comm.gather_objects(rank, group=group) == [0, 2]
            assert len(distributed_c10d._world.pg_map) == (1 if rank == 1 else 2)
            del group
            dist.destroy_process_group()

    def test_hosts_that_do_not_reach_each_other(self, tmp_path, monkeypatch):
        join(tmp_path / "store")
        dist.barrier()  # or a rank that fails below closes what others still make
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
        with pytest.raises(LayerWiseError, match="cannot reach each other over gloo.*GLOO_SOCKET_IFNAME"):
            comm.gather_objects(1, group=None)


class TestManyHosts(DistributedTest):
    world_size = 6
    init_distributed = False

    @pytest.mark.parametrize("given", [None, "1"])
    def test_a_rank_connects_to_two_others_and_not_to_all(self, given, tmp_path, monkeypatch):
        """A process may have 1,024 open files on most systems, and there are more ranks than that."""
        monkeypatch.delenv(LAZY, raising=False)
        if given:
            monkeypatch.setenv(LAZY, given)
        join(tmp_path / "store")
        dist.barrier()
        before = open_sockets()
        assert comm.gather_objects(dist.get_rank(), group=None) == list(range(6))
        # Two of a ring, and the one that it listens on; five others without.
        assert open_sockets() - before <= 3
        # Groups of the script, and processes that it starts, are as it has them.
        assert os.environ.get(LAZY) == given
        dist.barrier()


def open_sockets():
    links = (path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    return sum(str(link).startswith("socket:") for link in links)
