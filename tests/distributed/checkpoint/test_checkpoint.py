"""Regular checkpoints through the engine: exact resume, and what DeepSpeed's own tools read in them."""

from importlib.machinery import SourceFileLoader

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

import ds_layerwise
from ds_layerwise.checkpoint import regular
from ds_layerwise.checkpoint.manifest import FILE_NAME
from ds_layerwise.errors import LayerWiseError, StepError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, assert_same_run, loaded, masters, on_rank_0, states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import (
    PRECISIONS,
    Net,
    allow_fp16,
    ds_config,
    start,
    start_adamw,
    train_engine,
    weights,
)
from tests.support.versions import needs

pytestmark = rooms("regular", "record", "checkpointing", "engine_protocol", "step_progress", "param_groups")


def micro_batches(engine, first, last, *, gas):
    """Run micro-batches ``first`` to ``last`` of the whole run; returns their losses."""
    losses = []
    for step, micro in (divmod(i, gas) for i in range(first, last)):
        loss = engine((step, micro, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses)


class TestResume(DistributedTest):
    world_size = [1, 2, 3]

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
    @pytest.mark.parametrize("stage, gas, more", [
        (1, 4, 2), (2, 1, 0),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in [(1, 1, 0), (1, 4, 0), (2, 4, 2)])])
    def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(self, precision, stage, gas, more, tmp_path):
        allow_fp16()
        sections = {} if precision == "fp32" else {precision: {"enabled": True}}
        if precision == "fp16":
            sections["fp16"]["initial_scale_power"] = 4
        config = ds_config(stage=stage, gas=gas, clip=5.0, layerwise={"overlap_param_gather": gas == 4}, scheduler={
            "type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 15}}, **sections)
        saved_at, end, repeated = 10 * gas + more, 20 * gas, 10 * gas
        engine = start(Net(odd=True), config)
        micro_batches(engine, 0, saved_at, gas=gas)
        engine.save_checkpoint(tmp_path)
        expected = micro_batches(engine, saved_at, end, gas=gas)[-(end - repeated - gas):]

        resumed = start(Net(odd=True), config)
        micro_batches(resumed, 400, 400 + gas + more // 2, gas=gas)
        resumed.load_checkpoint(tmp_path)
        assert resumed.global_steps == resumed.optimizer.step_count == 10
        assert torch.equal(micro_batches(resumed, repeated, end, gas=gas)[gas:], expected)
        for each in (engine, resumed):
            each.optimizer.wait_for_params()
        assert_same_run(resumed, engine, of=states)
        assert resumed.get_lr() == engine.get_lr() and resumed.global_steps == engine.global_steps == 20


class TestDeepSpeedsTools(DistributedTest):
    world_size = [1, 2, 3]

    @needs("deepspeed>=0.19.8", "its zero_to_fp32.py leaves out empty parameters")
    def test_zero_to_fp32_gives_the_masters(self, precision, tmp_path):
        for variant in ({}, {"odd": True}, {"tied": True}, {"frozen": True, "odd": True}):
            engine = train_engine(start(Net(**variant), ds_config(**PRECISIONS[precision])), 3)
            engine.save_checkpoint(tmp_path)
            expected = masters(engine)
            script = SourceFileLoader("dropped", str(tmp_path / "zero_to_fp32.py")).load_module()
            found = script.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
            held = engine.module.state_dict(keep_vars=True)
            assert found.keys() == held.keys()
            names = {id(p): name for name, p in engine.module.named_parameters()}
            for name, value in held.items():
                master = expected.get(names[id(value)], value.detach().float())
                assert torch.equal(found[name].float(), master.view(value.shape)), name

    def test_stocks_own_result_lacks_frozen_parameters(self, tmp_path):
        """DeepSpeed's script leaves them out for a checkpoint of its own stage 1, and not for ours."""
        stock = start_adamw(Net(frozen=True))
        train_engine(stock, 1)
        stock.save_checkpoint(tmp_path)
        found = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        assert stock.module.state_dict().keys() - found.keys() == {"tall.weight", "norm.bias"}


class TestRefusedLoads(DistributedTest):
    def saved(self, folder):
        engine = train_engine(start(Net(), ds_config()), 1)
        engine.save_checkpoint(folder, tag="tag")
        dist.barrier()
        return folder / "tag"

    def assert_refused(self, folder, message, **config):
        engine = start(Net(), ds_config(**config))
        before = weights(engine.module).clone()
        with pytest.raises(LayerWiseError, match=message):
            engine.load_checkpoint(folder, tag="tag")
        assert torch.equal(weights(engine.module), before)
        train_engine(engine, 1)

    def test_all_ranks_refuse_what_one_finds_wrong(self, tmp_path, monkeypatch):
        self.saved(tmp_path)
        if dist.get_rank() == 1:
            def broken(path):
                raise LayerWiseError("only rank 1 sees it")
            monkeypatch.setattr(regular, "read", broken)
        self.assert_refused(tmp_path, "only rank 1 sees it")

    def test_no_optimizer_states(self, tmp_path):
        folder = self.saved(tmp_path)
        on_rank_0(lambda: [path.unlink() for path in [*folder.glob("*optim_states.pt"), folder / FILE_NAME]])
        self.assert_refused(tmp_path, "no files named .*load_optimizer_states=False")

    def test_stocks_own_checkpoint(self, tmp_path):
        stock = start_adamw(Net())
        train_engine(stock, 1)
        stock.save_checkpoint(tmp_path, tag="tag")
        self.assert_refused(tmp_path, "was not written by ds_layerwise|cannot be read")


class TestWhatIsLoaded(DistributedTest):
    def test_the_loss_scale_goes_on_from_where_it_was(self, tmp_path):
        allow_fp16()
        config = ds_config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 3})
        engine = start(Net(), config)
        engine.backward(engine((0, 0, dist.get_rank())) * float("inf"))
        engine.step()
        assert engine.optimizer.loss_scale == 8
        engine.save_checkpoint(tmp_path)
        resumed = loaded(start(Net(), config), tmp_path)
        for step in range(5):
            assert resumed.optimizer.loss_scale == engine.optimizer.loss_scale
            train_engine(engine, 1, first=step)
            train_engine(resumed, 1, first=step)
        assert engine.optimizer.loss_scale == 16

    @pytest.mark.parametrize("changed", [False, True])
    def test_a_rank_opens_no_file_that_it_does_not_need(self, changed, tmp_path, monkeypatch):
        engine = start(Net(), ds_config(bucket_numel=600))
        engine.save_checkpoint(tmp_path)
        opened = []
        read = regular.read
        monkeypatch.setattr(regular, "read", lambda path: opened.append(path.name) or read(path))
        start(Net(), ds_config(bucket_numel=10**9 if changed else 600)).load_checkpoint(tmp_path)
        names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
        assert sorted(opened) == (names if changed else [names[dist.get_rank()]])

    def test_the_saved_dict_shares_the_memory_of_what_is_trained(self):
        """A copy of all masters and states would not fit beside them."""
        engine = train_engine(start(Net(), ds_config(bf16={"enabled": True})), 1)
        saved = engine.optimizer.state_dict()
        live = {t.data_ptr() for p in internals.records(engine) for t in (p.master, *p.state.values())}
        held = [*saved["single_partition_of_fp32_groups"],
                *(t for state in saved["base_optimizer_state"]["state"].values() for t in state.values())]
        for tensor in held:
            assert tensor.data_ptr() in live or tensor.untyped_storage().nbytes() <= 4
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes

    def test_masters_come_from_the_weights_where_the_config_says_so(self, tmp_path):
        config = ds_config(bf16={"enabled": True})
        config["zero_optimization"]["load_from_fp32_weights"] = False
        engine = train_engine(start(Net(), config), 2)
        engine.save_checkpoint(tmp_path)
        resumed = loaded(start(Net(), config), tmp_path)
        for name, value in masters(resumed).items():
            assert torch.equal(value, engine.module.get_parameter(name).detach().float()), name

    @pytest.mark.parametrize("alone", [{"load_optimizer_states": False}, {"load_module_only": True}])
    def test_weights_alone_are_those_of_the_model_and_masters_where_the_files_are_universal(self, alone, tmp_path):
        engine = train_engine(start(Net(), ds_config(bf16={"enabled": True}, layerwise={"save_universal": True})), 2)
        engine.save_checkpoint(tmp_path, tag="saved")
        expected = masters(engine)
        other = start(Net(), ds_config())
        for tag, rounded in (("saved", True), ("saved_universal", False)):
            other.load_checkpoint(tmp_path, tag=tag, **alone)
            assert other.global_steps == (0 if "load_module_only" in alone else 2)
            for name, value in masters(other).items():
                wanted = expected[name].bfloat16().float() if rounded else expected[name]
                assert torch.equal(value, wanted), (tag, name)
                assert torch.equal(other.module.get_parameter(name), wanted), (tag, name)

    def test_a_piece_knows_where_in_its_parameter_it_starts(self):
        engine = start(Net(), ds_config(bucket_numel=1))
        starts = engine.optimizer.state_dict()["layerwise"]["param_starts"]
        assert starts == {p.name: p.param_start for p in internals.pieces(engine)}
        assert dist.get_rank() == 0 or any(starts.values())

    def test_nothing_to_load_changes_nothing(self, tmp_path):
        engine = train_engine(start(Net(), ds_config()), 1)
        before = weights(engine.module)
        assert engine.load_checkpoint(tmp_path / "missing") == (None, None)
        assert torch.equal(weights(engine.module), before)

    def test_loading_into_the_module_waits_for_what_is_under_way(self):
        engine = start(Net(), ds_config(layerwise={"overlap_param_gather": True}))
        zeros = {name: torch.zeros_like(value) for name, value in engine.module.state_dict().items()}
        train_engine(engine, 1)
        engine.module.load_state_dict(zeros)
        assert not internals.gathers_under_way(engine)


class TestRefusedOptimizers(DistributedTest):

    def test_other_groups_are_refused(self, tmp_path):
        engine = start(Net(), ds_config())
        engine.save_checkpoint(tmp_path)
        module = Net()
        params = list(module.parameters())
        other, *_ = ds_layerwise.initialize(model=module, config=ds_config(), model_parameters=[
            {"params": params[:3]}, {"params": params[3:]}])
        with pytest.raises(LayerWiseError, match="has 1 parameter groups, this run 2"):
            other.load_checkpoint(tmp_path)

    def test_a_dict_of_states_is_refused_wherever_it_is_given(self):
        """A run that keeps the states of its best step that way gets no others in silence."""
        module = Net()
        client = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
        given = client.state_dict()
        config = ds_config()
        del config["optimizer"]
        of_object, *_ = ds_layerwise.initialize(model=module, optimizer=client, config=config)
        for engine in (start(Net(), ds_config()), of_object):
            train_engine(engine, 2)
            saved = given if engine is of_object else engine.basic_optimizer.state_dict()
            train_engine(engine, 1, first=2)
            before, groups = states(engine), list(engine.optimizer.param_groups)
            for optimizer in (engine.optimizer, engine.optimizer.optimizer, engine.basic_optimizer):
                with pytest.raises(StepError, match=r"engine\.load_checkpoint\(\)"):
                    optimizer.load_state_dict(saved)
                if optimizer is not client:
                    with pytest.raises(StepError, match="load_state_dict_from_file"):
                        optimizer.load_state_dict(saved)
            assert_equal_states(states(engine), before)
            assert all(one is other for one, other in zip(engine.optimizer.param_groups, groups, strict=True))
            train_engine(engine, 1, first=3)
