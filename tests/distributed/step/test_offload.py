"""``engine.offload_states`` and ``reload_states``: what is away takes no memory, and comes back as it was."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import safe_get_full_fp32_param

from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.ranks.owned import host_memory
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, assert_same_run, whole_states
from tests.support.harness import DistributedTest
from tests.support.internals import memory_by_kind as memory
from tests.support.live_memory import bytes_of
from tests.support.rooms import rooms
from tests.support.training import (
    PRECISIONS,
    Net,
    assert_same_on_all_ranks,
    ds_config,
    raises_on_rank_1,
    start,
    train_engine,
    train_engines,
    weights,
)
from tests.support.transports import plan_in_cuts

pytestmark = rooms("host_memory", "offloading")


class TestOffload(DistributedTest):
    world_size = [1, 2]

    def test_away_and_back_changes_nothing(self, stage, precision):
        config = ds_config(stage=stage, clip=5.0, **PRECISIONS[precision])
        engine, plain = (start(Net(odd=True), config) for _ in range(2))
        train_engines((engine, plain), 2)
        before = memory(engine)
        # Between two steps there are no sums of gradients.
        none = {Kind.lp_grads} | ({Kind.hp_params} if precision == "fp32" else set())
        none |= {Kind.contiguous_grad_buffer} if stage == 2 else set()
        assert {kind for kind, size in before.items() if not size} == none
        for step, include in enumerate((None, [Kind.optim_states], [Kind.hp_params, Kind.lp_params],
                                        [Kind.lp_grads, Kind.contiguous_grad_buffer])):
            kinds = list(Kind) if include is None else include
            for _ in range(2):
                engine.offload_states(include=include)
                assert memory(engine) == {kind: 0 if kind in kinds else size for kind, size in before.items()}
                assert weights(engine.module).numel() == 0 or Kind.lp_params not in kinds
                engine.reload_states()
                assert memory(engine) == before
                assert_same_run(engine, plain)
            train_engines((engine, plain), 2, first=2 + 2 * step)
            assert_same_run(engine, plain)
            assert_same_on_all_ranks(engine.module)

    @pytest.mark.world_size(2)
    def test_cuts_are_gradients_and_go_with_them(self, stage, monkeypatch):
        plan_in_cuts(monkeypatch)
        engine, plain = (start(Net(), ds_config(stage=stage, gas=2, bf16={"enabled": True})) for _ in range(2))
        for each in (engine, plain):
            train_engine(each, 1, gas=2)
            each.backward(each((1, 0, dist.get_rank())))
            each.step()
        cuts = sum(bucket.cut_numel for bucket in engine.optimizer.layout.buckets if bucket.transport == "cuts")
        even = bytes_of(internals.owned(engine).reduced.tensors) if stage == 2 else 0
        assert cuts and memory(engine)[Kind.lp_grads] == (4 * cuts + even if stage == 2 else 0)
        engine.offload_states(include=[Kind.lp_grads])
        assert not memory(engine)[Kind.lp_grads]
        engine.reload_states()
        for each in (engine, plain):
            each.backward(each((1, 1, dist.get_rank())))
            each.step()
        assert_equal_states(whole_states(engine), whole_states(plain))

    def test_calls_that_need_offloaded_states_say_so(self):
        engine = train_engine(start(Net(), ds_config(bf16={"enabled": True})), 1)
        engine.offload_states(include=[Kind.hp_params])
        for use in (engine.optimizer.step, engine.optimizer.state_dict,
                    lambda: safe_get_full_fp32_param(engine.module.experts)):
            with pytest.raises(StepError, match=r"hp_params are offloaded; call engine.reload_states\(\) first"):
                use()
        engine.reload_states()
        train_engine(engine, 1, first=1)

    @pytest.mark.parametrize("bucket_numel", [600, 10**9])
    def test_a_backward_pass_while_gradients_are_away_says_so(self, bucket_numel):
        for stage in (1, 2, 3):
            engine, plain = (start(Net(), ds_config(stage=stage, gas=2, bucket_numel=bucket_numel)) for _ in range(2))
            engine.backward(engine((0, 0, dist.get_rank())))
            engine.step()
            engine.offload_states(include=[Kind.lp_grads, Kind.contiguous_grad_buffer])
            with pytest.raises(StepError, match=r"are offloaded; call engine.reload_states\(\) first"):
                engine.backward(engine((0, 1, dist.get_rank())))
            engine.reload_states()
            # As after any exception in a backward pass, the step begins again.
            with pytest.raises(StepError, match=r"call engine.zero_grad\(\) on all ranks, and begin the step again"):
                engine.step()
            engine.zero_grad()
            for each in (engine, plain):
                train_engine(each, 1, gas=2)
            assert_equal_states(whole_states(engine), whole_states(plain))
            engine.destroy()
            plain.destroy()

    def test_saving_and_loading_bring_it_back(self, tmp_path):
        engine, plain = (start(Net(), ds_config(bf16={"enabled": True})) for _ in range(2))
        train_engines((engine, plain), 2)
        engine.offload_states()
        engine.save_checkpoint(tmp_path)
        assert_equal_states(whole_states(engine), whole_states(plain))
        train_engine(engine, 1, first=2)
        engine.offload_states()
        engine.load_checkpoint(tmp_path)
        assert_same_run(engine, plain)
        train_engines((engine, plain), 1, first=2)
        assert_equal_states(whole_states(engine), whole_states(plain))

    @pytest.mark.parametrize("include", [None, [Kind.lp_params], [Kind.hp_params]])
    def test_no_model_is_written_that_has_no_weights(self, include, tmp_path):
        engine = start(Net(), ds_config(bf16={"enabled": True}))
        wanted = {name: value.clone() for name, value in engine.module.state_dict().items()}
        ways = [engine.module.state_dict, engine.module.square.state_dict, engine.module_state_dict,
                lambda: engine.save_16bit_model(str(tmp_path))]
        for _ in range(2):
            engine.offload_states(include=include)
            engine.offload_states(include=include)
            for way in ways if include != [Kind.hp_params] else ():
                with pytest.raises(StepError, match="parameters are offloaded.*call engine.reload_states"):
                    way()
            assert not list(tmp_path.iterdir())
            engine.reload_states()
            found = engine.module.state_dict()
            assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
            assert not engine.module.square._state_dict_pre_hooks
        assert engine.save_16bit_model(str(tmp_path))

    @pytest.mark.world_size(2)
    def test_a_host_without_memory_on_one_rank_leaves_all_where_it_was(self, precision, monkeypatch):
        engine, plain = (start(Net(), ds_config(**PRECISIONS[precision])) for _ in range(2))
        train_engines((engine, plain), 1)
        before, had = memory(engine), []

        def last_one_is_refused(numel, dtype, *, pin_memory):
            if len(had) == 2:
                raise LayerWiseError("no host memory")
            had.append(numel)
            return torch.empty(numel, dtype=dtype)

        with monkeypatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(host_memory, "host_memory", last_one_is_refused)
            with raises_on_rank_1(LayerWiseError, "no host memory"):
                engine.offload_states()
        assert memory(engine) == before and not engine.optimizer.offloading.parking.kinds
        train_engines((engine, plain), 1, first=1)
        assert_same_run(engine, plain)

    @pytest.mark.world_size(2)
    def test_a_device_without_memory_on_one_rank_can_go_on_later(self, monkeypatch):
        engine, plain = (start(Net(), ds_config(bf16={"enabled": True})) for _ in range(2))
        train_engines((engine, plain), 1)
        before, filled, fill = memory(engine), [], host_memory._bytes
        engine.offload_states()

        def second_one_is_refused(storage):
            if len(filled) == 1:
                raise torch.OutOfMemoryError("device full")
            filled.append(storage)
            return fill(storage)

        with monkeypatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(host_memory, "_bytes", second_one_is_refused)
            with pytest.raises(torch.OutOfMemoryError if dist.get_rank() else LayerWiseError, match="device full"):
                engine.reload_states()
        engine.reload_states()
        assert memory(engine) == before
        train_engines((engine, plain), 1, first=1)
        assert_same_run(engine, plain)
