"""Between this package and others: DeepSpeed's own AdamW under every ZeRO stage, and weights of a dense model."""

import contextlib
import io

import deepspeed.comm as dist
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import ds_layerwise
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, masters, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import BF16, PRECISIONS, Net, assert_same_on_all_ranks, ds_config, start, train_engine
from tests.support.universal import (
    MATRICES,
    WithLoss,
    convert,
    start_stock,
    start_with_loss,
    stock_states,
    train_with_loss,
    write_dense,
)
from tests.support.versions import needs

pytestmark = rooms("universal", "regular", "reshard")



def names_in(states):
    """The names of the parameters that ``states`` are of."""
    return {name for name, _ in states}


class TestStockIntoOurs(DistributedTest):
    """Saved by two ranks of DeepSpeed's AdamW, converted by DeepSpeed, loaded by any number of ranks of ours."""

    @pytest.fixture
    def stages(self, class_tmpdir):
        """A folder with checkpoints of the stages 1, 2 and 3, in folders that are called so."""
        for stage in (1, 2, 3):
            made_once(class_tmpdir / str(stage), [2], self.save, stage=stage)
        return class_tmpdir

    def save(self, folder, stage):
        engine = start_stock(stage)
        train_with_loss(engine, 0, 3)
        engine.module.seen.fill_(2**24 + stage)
        engine.save_checkpoint(folder, tag="saved")
        convert(folder / "saved", folder / "converted", inject=True)
        states = stock_states(engine)
        if dist.get_rank() == 0:
            torch.save(states, folder / "expected.pt")
        dist.barrier()

    @pytest.mark.world_size([1, 2, 3])
    @pytest.mark.parametrize("policy", ["reset", "keep_shared"])
    def test_load(self, policy, stages):
        engine = start_with_loss(layerwise={"on_optimizer_change": policy}, **BF16)
        train_with_loss(engine, 20, 21)
        for stage in (1, 2, 3):
            expected = torch.load(stages / str(stage) / "expected.pt")
            assert names_in(expected) == {name for name, _ in engine.module.named_parameters()} > MATRICES
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                engine.load_checkpoint(stages / str(stage), tag="converted")
            self.check(engine, expected, policy, printed.getvalue())
            assert (engine.global_steps, engine.optimizer.step_count) == (3, 3)
            assert engine.module.seen == 2**24 + stage
            for name, value in masters(engine).items():
                assert torch.equal(engine.module.get_parameter(name), value.bfloat16()), name
            assert_same_on_all_ranks(engine.module)
            assert train_with_loss(engine, 3, 4).isfinite().all()
            assert whole_states(engine)["inner.norm.weight", "step"] == 4

    def check(self, engine, expected, policy, printed):
        found = whole_states(engine)
        for name in names_in(expected):
            assert torch.equal(found[name, "fp32"], expected[name, "fp32"]), name
            if name not in MATRICES:
                assert found[name, "step"] == 3
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(found[name, key], expected[name, key]), (name, key)
                continue
            average = expected[name, "exp_avg"]
            assert average.any()
            kept = average if policy == "keep_shared" else torch.zeros_like(average)
            assert torch.equal(found[name, "momentum_buffer"], kept), name
        why = "adam before, muon now" + "; momentum_buffer goes on from exp_avg" * (policy == "keep_shared")
        assert engine.optimizer.fresh_states == dict.fromkeys(MATRICES, why)
        report = [line for line in printed.splitlines() if line.startswith("ds_layerwise:")]
        if dist.get_rank() == 0:
            counts = f"{len(MATRICES)} of {len(names_in(expected))} parameters have other"
            assert len(report) == 2 and counts in report[1]
            assert "weight_decay was" in report[0] and "lr was 0.01 and is 0.003" in report[0]
            assert report[0].endswith("this run's values are used, because the saved run was not one of ds_layerwise")
            assert report[1].endswith(f": {len(MATRICES)} x {why}; the other parameters go on with theirs")
        else:
            assert not report

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("kind, stage", [("WarmupLR", 2), ("WarmupCosineLR", 3), ("LambdaLR", 1)])
    def test_the_schedule_goes_on_in_the_first_step(self, kind, stage, tmp_path):
        """AdamW for everything, which has stock's arithmetic, so that stock's own steps are the oracle."""
        section = {"type": kind, "params": {"warmup_num_steps": 10, "warmup_type": "linear"}}
        section["params"] |= {"warmup_max_lr": 0.01} if kind == "WarmupLR" else {"total_num_steps": 40}
        sections = {} if kind == "LambdaLR" else {"scheduler": section}
        params = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "matrix_optimizer": "adamw"}

        def started(optimizer, stage):
            module = WithLoss()
            config = {**ds_config(clip=1.0, **sections), "optimizer": optimizer, "zero_optimization": {"stage": stage}}
            if optimizer["type"] == "AdamW":
                del config["layerwise"]
            make = None if sections else lambda it: LambdaLR(it, lambda step: (step + 1) / 10)
            engine, *_ = ds_layerwise.initialize(
                model=module, model_parameters=module.parameters(), config=config, lr_scheduler=make)
            return engine

        def stock(it):
            return started({"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}, it)

        engine = stock(stage)
        train_with_loss(engine, 0, 3)
        engine.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        lr = engine.get_lr()
        expected = train_with_loss(engine, 3, 6)
        own = started({"type": "LayerWise", "params": params}, 2)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            own.load_checkpoint(tmp_path, tag="converted")
        assert own.get_lr() == pytest.approx(lr) and 0 < lr[0] < 0.01
        if dist.get_rank() == 0:
            assert f"; a schedule that goes on has lr {lr[0]:g}, and other rates in proportion" in printed.getvalue()
        torch.testing.assert_close(train_with_loss(own, 3, 6), expected, rtol=1e-5, atol=0)

    @pytest.mark.world_size([1, 3])
    def test_refused_unless_the_config_allows_it(self, stages):
        engine = start_with_loss(**BF16)
        train_with_loss(engine, 20, 21)
        before = whole_states(engine)
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        names = "|".join(sorted(MATRICES))
        for stage in (1, 2, 3):
            with pytest.raises(LayerWiseError, match=rf"({names}) was updated by adam .*layerwise.on_optimizer_change"):
                engine.load_checkpoint(stages / str(stage), tag="converted")
        assert_equal_states(whole_states(engine), before)
        assert_equal_states(engine.module.state_dict(), weights)
        assert (engine.global_steps, engine.optimizer.step_count) == (1, 1)


class TestOursIntoStock(DistributedTest):
    """And from there back again."""

    @pytest.fixture
    def run_of_3(self, class_tmpdir):
        return made_once(class_tmpdir / "run", [3], self.save)

    def save(self, folder):
        engine = start_with_loss(layerwise={"save_universal": True}, **BF16)
        train_with_loss(engine, 0, 3)
        engine.save_checkpoint(folder, tag="saved")
        convert(folder / "saved", folder / "converted")
        states = whole_states(engine)
        if dist.get_rank() == 0:
            torch.save(states, folder / "expected.pt")

    @needs("deepspeed>=0.19.8", "its load of a universal folder puts the last state in the place of the masters")
    @pytest.mark.world_size([1, 2])
    @pytest.mark.parametrize("form", ["converted", "saved_universal"])
    def test_load(self, form, stage, run_of_3, tmp_path):
        expected = torch.load(run_of_3 / "expected.pt")
        stock = start_stock(stage, checkpoint={"load_universal": True})
        stock.load_checkpoint(run_of_3, tag=form)
        self.check(stock, expected)
        assert {float(state["step"]) for state in stock.optimizer.optimizer.state.values()} == {3}
        assert stock.global_steps == 3
        stock.save_checkpoint(tmp_path, tag="saved")
        assert train_with_loss(stock, 3, 4).isfinite().all()
        assert not torch.equal(stock_states(stock)["inner.norm.weight", "fp32"], expected["inner.norm.weight", "fp32"])

        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        ours = start_with_loss(layerwise={"on_optimizer_change": "keep_shared"}, **BF16)
        ours.load_checkpoint(tmp_path, tag="converted")
        assert_equal_states(whole_states(ours), expected)

    @staticmethod
    def check(stock, expected):
        found = stock_states(stock)
        assert names_in(found) == names_in(expected)
        for name in names_in(found):
            travelled = {key: value for (of, key), value in expected.items() if of == name and key != "step"}
            if name in MATRICES:
                travelled["exp_avg"] = travelled.pop("momentum_buffer")
                travelled["exp_avg_sq"] = torch.zeros_like(travelled["fp32"])
            for key, value in travelled.items():
                assert torch.equal(found[name, key], value), (name, key)
            param = stock.module.get_parameter(name)
            assert torch.equal(param.flatten(), travelled["fp32"].bfloat16()), name

    @pytest.mark.world_size(2)
    def test_stage_3_reads_what_this_package_wrote(self, run_of_3):
        stock = start_stock(3, checkpoint={"load_universal": True})
        stock.load_checkpoint(run_of_3, tag="saved_universal")
        self.check(stock, torch.load(run_of_3 / "expected.pt"))

    @pytest.mark.world_size(2)
    def test_stage_3_reads_only_its_own_of_the_converters_files(self, run_of_3, tmp_path):
        own = start_stock(1)
        train_with_loss(own, 0, 1)
        own.save_checkpoint(tmp_path, tag="saved")
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        stock = start_stock(3, checkpoint={"load_universal": True})
        # It looks for files of the model that have names of stage 3, and for stage 1's own checkpoint it fails alike.
        for folder in (tmp_path, run_of_3):
            with pytest.raises(AssertionError):
                stock.load_checkpoint(folder, tag="converted")


class TestDenseIntoOurs(DistributedTest):
    world_size = [1, 2]

    def written(self, folder):
        """A checkpoint of weights alone, and these."""
        torch.manual_seed(3)
        weights = {name: torch.randn(value.shape) for name, value in Net(tied=True).state_dict().items()}
        if dist.get_rank() == 0:
            write_dense(folder / "dense", {name: value for name, value in weights.items() if name != "head.weight"})
        dist.barrier()
        weights["head.weight"] = weights["embed.weight"]
        return weights

    def test_weights_exact_and_every_state_fresh(self, precision, tmp_path):
        weights = self.written(tmp_path)
        engine = start(Net(tied=True), ds_config(**PRECISIONS[precision]))
        fresh = {key: value for key, value in whole_states(engine).items() if key[1] != "fp32"}
        train_engine(engine, 2)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            engine.load_checkpoint(tmp_path, tag="dense")
        found = whole_states(engine)
        names = names_in(found)
        assert_equal_states(found, fresh | {(name, "fp32"): weights[name].flatten() for name in names})
        for name, value in engine.module.state_dict().items():
            assert torch.equal(value, weights[name].to(value.dtype)), name
        assert engine.optimizer.fresh_states == dict.fromkeys(names, "no state in the checkpoint")
        if dist.get_rank() == 0:
            assert f"{len(names)} of {len(names)} parameters have other optimizer states than in" in printed.getvalue()
            assert f": {len(names)} x no state in the checkpoint" in printed.getvalue()
        assert engine.optimizer.step_count == engine.global_steps == 0
        train_engine(engine, 1)

    def test_refused_where_states_are_required(self, tmp_path):
        self.written(tmp_path)
        engine = train_engine(start(Net(tied=True), ds_config(layerwise={"on_missing_state": "error"})), 2)
        before = whole_states(engine)
        with pytest.raises(LayerWiseError, match=r"no state of \S+; set layerwise\.on_missing_state to 'fresh'"):
            engine.load_checkpoint(tmp_path, tag="dense")
        assert_equal_states(whole_states(engine), before)
        assert engine.global_steps == engine.optimizer.step_count == 2

    def test_a_missing_model_file_is_named(self, tmp_path):
        self.written(tmp_path)
        if dist.get_rank() == 0:
            (tmp_path / "dense" / "mp_rank_00_model_states.pt").unlink()
        dist.barrier()
        engine = start(Net(tied=True), ds_config())
        with pytest.raises(LayerWiseError, match="dense has no mp_rank_00_model_states.pt"):
            engine.load_checkpoint(tmp_path, tag="dense")
        train_engine(engine, 1)
