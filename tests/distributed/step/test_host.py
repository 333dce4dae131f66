"""``offload_optimizer``: masters and states on the host give the same bits as on the device.

On a CPU the two are one memory; what is the host's has storages of its own all the same, every step copies it to
device memory and back, and that memory is overwritten with NaN once it has been copied back.
"""

import re

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)

import ds_layerwise
from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.ranks.owned import host_memory
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, assert_same_run, whole_states
from tests.support.costs import memory_bytes, pieces_on_host
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    MATRICES,
    Net,
    allow_fp16,
    assert_same_on_all_ranks,
    ds_config,
    start,
    train_engine,
    train_engines,
    weights,
)

pytestmark = rooms("host_memory", "owned", "memory")

PRECISIONS = {"fp32": {}, "bf16": BF16,
              "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}}


def config(ratio=None, *, stage=1, precision="bf16", pin_memory=True, **changes):
    """A config that offloads ``ratio``; None is without the section."""
    made = ds_config(stage=stage, clip=5.0, **PRECISIONS[precision], **changes)
    if ratio is not None:
        made["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": ratio, "pin_memory": pin_memory}
    return made


def storages(tensors):
    """Bytes by storage."""
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}


def on_host(engine):
    return storages(internals.host_tensors(engine))


def predicted(engine):
    """This rank's memory by the cost model."""
    optimizer = engine.optimizer
    buffer = internals.grads(engine)
    grads = None if buffer is None else {
        bucket.dtype: str(buffer.tensors[bucket.index].dtype).removeprefix("torch.")
        for bucket in optimizer.layout.buckets}
    return memory_bytes(optimizer.layout, stage=optimizer.settings.stage, stored_as=grads,
                        host_ratio=optimizer.settings.host_ratio)[optimizer.rank]


def assert_weights_are_masters(engine):
    """Every parameter is its master, rounded."""
    masters = whole_states(engine)
    for name, p in engine.module.named_parameters():
        if p.numel():
            assert torch.equal(masters[name, "fp32"].to(p.dtype), p.detach().flatten()), name


@pytest.fixture
def copies(monkeypatch):
    """Bytes of every copy, by its way: {"in": [...], "out": [...]}. Stale device memory is NaN."""
    counted = {"in": [], "out": []}
    transfer = host_memory.transfer

    def counting(into, out_of):
        transfer(into, out_of)
        homes = {t.data_ptr() for memory in MEMORIES for t in memory.tensors}
        assert {into.data_ptr() in homes, out_of.data_ptr() in homes} == {True, False}
        if into.data_ptr() in homes:
            out_of.fill_(float("nan"))
        counted["out" if into.data_ptr() in homes else "in"].append(into.nbytes)

    MEMORIES = []
    init = host_memory.HostMemory.__init__
    monkeypatch.setattr(host_memory.HostMemory, "__init__",
                        lambda self, *args, **kwargs: (init(self, *args, **kwargs), MEMORIES.append(self))[0])
    monkeypatch.setattr(host_memory, "transfer", counting)
    return counted


class TestAgainstNone(DistributedTest):
    world_size = [2, 3]
    thorough_on = (3,)

    def run(self, made, gas, steps=10):
        """An engine after ``steps`` of a config ``made``, and its gradients, norms and scales."""
        engine = start(Net(odd=True), made)
        seen = []
        for step in range(steps):
            train_engine(engine, 1, first=step, gas=gas, check=lambda _, gradients: seen.append(gradients))
            seen.append({"norm": (0, torch.tensor(float(engine.get_global_grad_norm()))),
                         "scale": (0, torch.tensor(engine.optimizer.loss_scale))})
        engine.optimizer.wait_for_params()
        assert_same_on_all_ranks(engine.module)
        return engine, seen

    def compare(self, stage, precision, copies, gas=1):
        plain, expected = self.run(config(stage=stage, precision=precision, gas=gas), gas)
        assert not copies["in"] and not internals.host_tensors(plain)
        for ratio in (0.4, 1):
            layerwise = {"overlap_param_gather": ratio == 0.4}
            engine, seen = self.run(config(ratio, stage=stage, precision=precision, gas=gas, layerwise=layerwise), gas)
            for found, wanted in zip(seen, expected, strict=True):
                assert found.keys() == wanted.keys()
                for name, (first, values) in wanted.items():
                    assert found[name][0] == first
                    torch.testing.assert_close(found[name][1], values, rtol=0, atol=0, equal_nan=True)
            assert_same_run(engine, plain, ratio)
            assert_weights_are_masters(engine)
            steps, sizes = engine.optimizer.step_count, list(on_host(engine).values())
            assert sum(sizes) == predicted(engine).host > 0
            for way in copies.values():
                # Every bucket once a step, and none in a step that is skipped.
                assert sorted(way) == sorted(sizes * steps), ratio
                way.clear()
            engine.destroy()
        return plain

    def test_the_same_bits(self, stage, precision, copies):
        self.compare(stage, precision, copies, gas=stage)

    @pytest.mark.world_size(2)
    def test_the_same_bits_around_overflows(self, copies):
        allow_fp16()
        plain = self.compare(1, "fp16", copies)
        assert 0 < plain.optimizer.step_count < 10


class TestMemory(DistributedTest):
    def test_it_is_where_and_as_much_as_the_table_says(self, stage, precision):
        for ratio in (0.3, 1):
            engine = start(Net(odd=True), config(ratio, stage=stage, precision=precision, bucket_numel=400))
            train_engine(engine, 1)
            optimizer, memory = engine.optimizer, predicted(engine)
            owned = internals.owned(engine)
            host, sizes = on_host(engine), internals.memory_by_kind(engine)
            for tensors in optimizer.offloading.memory().values():
                assert not storages(tensors).keys() & host.keys()
            assert sizes[Kind.hp_params] == memory.masters and sizes[Kind.optim_states] == memory.states
            assert sum(sizes.values()) == memory.total and sum(host.values()) == memory.host > 0
            there = pieces_on_host(optimizer.layout, optimizer.rank, ratio)
            for name, state in owned.states.items():
                tensors = [v for key, v in state.items() if key != "step"]
                tensors += [internals.master(engine, name)] if precision == "bf16" else []
                found = {t.untyped_storage()._cdata in host for t in tensors}
                assert found == {name in there}, name
                assert optimizer.state[engine.module.get_parameter(name)] is state
            with owned.host:
                assert sum(slot.memory.nbytes for slot in owned.host._slots) == memory.staging
            said = optimizer.describe()
            most = max(m.host for m in memory_bytes(optimizer.layout, host_ratio=ratio, stage=stage))
            assert re.search(rf"on the host +│ +{most / 2**20:,.1f} MiB", said), said
            engine.destroy()
        assert re.search(r"on the host +│ +0\.0 MiB", start(Net(), config(0)).optimizer.describe())

    def test_page_locked_only_if_asked(self, monkeypatch):
        pinned = []
        accelerator = host_memory.get_accelerator()

        def pin(self, *size, **options):
            pinned.append(size[0] if torch.is_tensor(size[0]) else torch.empty(*size, **options))
            return pinned[-1]

        for name in ("pin_memory", "pin_empty"):
            monkeypatch.setattr(type(accelerator), name, pin, raising=False)
        for wanted in (True, False):
            engine = start(Net(), config(1, pin_memory=wanted))
            homes = [t.data_ptr() for t in internals.host_tensors(engine)]
            assert homes and [t.data_ptr() for t in pinned] == (homes if wanted else [])
            pinned.clear()

    @pytest.mark.parametrize("known_as", ["pin_empty", "pin_memory"])
    @pytest.mark.world_size(2)
    def test_page_locked_memory_that_one_rank_cannot_have(self, known_as, monkeypatch):
        accelerator, rank = type(host_memory.get_accelerator()), dist.get_rank()

        def refuse(self, *args, **kwargs):
            raise RuntimeError("CUDA error: out of memory")

        if known_as == "pin_memory":  # the oldest release has nothing else, and is not asked for it
            ds_layerwise.register()
            for base in accelerator.__mro__:
                if "pin_empty" in vars(base):
                    monkeypatch.delattr(base, "pin_empty")
        with monkeypatch.context() as patch:
            if rank == 1:
                patch.setattr(accelerator, known_as, refuse, raising=False)
            message = (r"[\d,]+ bytes of page-locked host memory cannot be allocated: CUDA error: out of memory; set "
                       "pin_memory: false .* or raise the limit")
            with pytest.raises(LayerWiseError, match=message if rank == 1 else f"rank 1 failed: .*{message}"):
                start(Net(), config(1, pin_memory=True))
            engine = start(Net(), config(1, pin_memory=False))
        plain = start(Net(), config())
        train_engines((engine, plain), 2)
        assert torch.equal(weights(engine.module), weights(plain.module))

    def test_keys_that_may_stand_beside_it(self):
        plain, old = start(Net(), config()), config()
        old["zero_optimization"]["cpu_offload"] = True
        tuned = config(1, zero_force_ds_cpu_optimizer=True)
        tuned["zero_optimization"]["offload_optimizer"].update(
            nvme_path="/nvme", buffer_count=5, pipeline_read=True, pipeline_write=True, fast_init=True,
            cpuadam_cores_perc=0.5)
        whole, none = config(1), config(0.5)
        del whole["zero_optimization"]["offload_optimizer"]["ratio"]
        none["zero_optimization"]["offload_optimizer"]["device"] = "none"
        assert not on_host(start(Net(), none))
        train_engine(plain, 2)
        for made in (old, tuned, whole):
            engine = start(Net(), made)
            assert sum(on_host(engine).values()) == sum(
                storages(t for state in internals.states(plain).values() for t in state.values() if t.dim()).values()
            ) + sum(4 * piece.numel for piece in internals.pieces(plain))
            train_engine(engine, 2)
            assert_same_run(engine, plain)


class TestCheckpoints(DistributedTest):
    @pytest.mark.parametrize("saving, loading, precision", [(1, None, "bf16"), (None, 0.4, "bf16"), (0.4, 1, "fp32")])
    def test_from_the_host_and_to_it(self, saving, loading, precision, tmp_path, copies):
        stage = 2 if saving else 1
        saved = start(Net(), config(saving, stage=stage, precision=precision, layerwise={"save_universal": True}))
        train_engine(saved, 3)
        saved.save_checkpoint(tmp_path, tag="here")
        states = whole_states(saved)
        train_engine(saved, 3, first=3)
        for tag in ("here", "here_universal"):
            engine = start(Net(), config(loading, stage=stage, precision=precision))
            # The step after the load must not work on what was brought for one before it.
            train_engine(engine, 1, first=8)
            engine.load_checkpoint(tmp_path, tag=tag)
            assert_equal_states(whole_states(engine), states, tag)
            train_engine(engine, 3, first=3)
            assert_same_run(engine, saved, tag)
        # The weights alone: masters on the host follow the model.
        engine.load_checkpoint(tmp_path, tag="here", load_module_only=True)
        engine.optimizer.refresh_fp32_params()
        for name, p in engine.module.named_parameters():
            assert torch.equal(whole_states(engine)[name, "fp32"], p.detach().float().flatten()), name


class TestAccess(DistributedTest):
    @pytest.mark.parametrize("precision, include", [("fp32", None), ("bf16", [Kind.hp_params, Kind.optim_states])])
    def test_states_on_the_host_are_read_set_and_offloaded_besides(self, precision, include, copies):
        engine, plain = (start(Net(), config(ratio, precision=precision)) for ratio in (0.5, None))
        g = torch.Generator().manual_seed(3)
        train_engines((engine, plain), 2)
        for name, p in engine.module.named_parameters():
            twin, key = plain.module.get_parameter(name), "momentum_buffer" if name in MATRICES else "exp_avg"
            assert torch.equal(safe_get_full_fp32_param(p), safe_get_full_fp32_param(twin)), name
            assert torch.equal(safe_get_full_optimizer_state(p, key), safe_get_full_optimizer_state(twin, key)), name
            values = torch.rand(2, *p.shape, generator=g)
            for other in (p, twin):
                safe_set_full_fp32_param(other, values[0])
                safe_set_full_optimizer_state(other, values[1], key)
        self.compare(engine, plain, first=2)
        host = on_host(engine)
        before = internals.memory_by_kind(engine)
        assert before[Kind.optim_states] and (before[Kind.hp_params] or precision == "fp32")
        engine.offload_states(include=include)
        away = list(Kind) if include is None else include
        assert internals.memory_by_kind(engine) == {
            kind: 0 if kind in away else size for kind, size in before.items()}
        assert on_host(engine) == host
        with pytest.raises(StepError, match="are offloaded; call engine.reload_states"):
            engine.optimizer.step()
        engine.reload_states()
        self.compare(engine, plain, first=4)

    def compare(self, engine, plain, first):
        train_engines((engine, plain), 2, first=first)
        assert_same_run(engine, plain)
