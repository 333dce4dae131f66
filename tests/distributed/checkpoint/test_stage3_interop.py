"""Between stage 3 of this package and DeepSpeed's own AdamW and Muon, in DeepSpeed's universal format."""

import deepspeed
import pytest
import torch

from ds_layerwise.cli import main
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, on_rank_0, whole_states
from tests.support.harness import DistributedTest, made_once
from tests.support.rooms import rooms
from tests.support.training import BF16, ds_config
from tests.support.universal import (
    MATRICES,
    WithLoss,
    convert,
    start_stock,
    start_with_loss,
    stock_states,
    train_with_loss,
)
from tests.support.versions import needs

pytestmark = rooms("universal", "stage3_files", "exports")


class TestStockIntoOurs(DistributedTest):
    world_size = [2, 3]

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [2], self.save)

    @staticmethod
    def save(folder):
        engine = start_stock(3)
        train_with_loss(engine, 0, 3)
        engine.save_checkpoint(folder, tag="saved")
        convert(folder / "saved", folder / "converted", inject=True)
        states = stock_states(engine)
        on_rank_0(lambda: torch.save(states, folder / "expected.pt"))

    def test_load(self, saved):
        expected = torch.load(saved / "expected.pt")
        engine = start_with_loss(stage=3, layerwise={"on_optimizer_change": "keep_shared"}, **BF16)
        engine.load_checkpoint(saved, tag="converted")
        found = whole_states(engine)
        for (name, key), value in expected.items():
            if name not in MATRICES:
                assert torch.equal(found[name, key], value), (name, key)
            elif key != "exp_avg_sq":
                assert torch.equal(found[name, "momentum_buffer" if key == "exp_avg" else key], value), (name, key)
        assert train_with_loss(engine, 3, 4).isfinite().all()


    def test_a_regular_checkpoint_is_refused(self, saved):
        engine = start_with_loss(stage=3, **BF16)
        for options in ({}, {"load_optimizer_states": False}, {"load_module_only": True}):
            with pytest.raises(LayerWiseError, match="ds_to_universal.*zero_to_fp32.py beside it, and load that"):
                engine.load_checkpoint(saved, tag="saved", **options)


class TestOursIntoStock(DistributedTest):
    world_size = 2

    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [3], self.save)

    @staticmethod
    def save(folder):
        engine = start_with_loss(stage=3, layerwise={"save_universal": True}, **BF16)
        train_with_loss(engine, 0, 3)
        engine.save_checkpoint(folder, tag="saved")
        states = whole_states(engine)
        on_rank_0(lambda: torch.save(states, folder / "expected.pt"))
        on_rank_0(lambda: main(["to-universal", str(folder / "saved"), str(folder / "by_the_tool")]))

    @pytest.mark.parametrize("form", ["by_the_tool", "saved_universal"])
    def test_load(self, form, saved, tmp_path):
        expected = torch.load(saved / "expected.pt")
        stock = start_stock(3, checkpoint={"load_universal": True})
        stock.load_checkpoint(saved, tag=form)
        for (name, key), value in stock_states(stock).items():
            if name not in MATRICES:
                assert torch.equal(value, expected[name, key]), (name, key)
            elif key != "exp_avg_sq":
                of_muon = "momentum_buffer" if key == "exp_avg" else key
                assert torch.equal(value, expected[name, of_muon]), (name, key)
        assert stock.global_steps == 3
        assert {float(state["step"]) for state in stock.optimizer.optimizer.state.values()} == {3}
        stock.save_checkpoint(tmp_path, tag="saved")
        assert train_with_loss(stock, 3, 4).isfinite().all()
        convert(tmp_path / "saved", tmp_path / "converted", inject=True)
        ours = start_with_loss(stage=3, layerwise={"on_optimizer_change": "keep_shared"}, **BF16)
        ours.load_checkpoint(tmp_path, tag="converted")
        assert_equal_states(whole_states(ours), expected)

    @needs("deepspeed>=0.19.8", "its Muon gathers matrices of one size alone at stage 3")
    def test_into_its_muon(self, saved):
        """Whose momentum has no place in the format: it starts from zero, beside exact masters."""
        expected = torch.load(saved / "expected.pt")
        module = WithLoss()
        for name, param in module.named_parameters():
            param.use_muon = name in MATRICES
        config = ds_config(stage=3, clip=1.0, **BF16, checkpoint={"load_universal": True},
                           optimizer={"type": "Muon", "params": {"lr": 0.01, "torch_adam": True}})
        config["zero_optimization"]["reduce_scatter"] = False
        del config["layerwise"]
        stock, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        stock.load_checkpoint(saved, tag="saved_universal")
        for (name, key), value in stock_states(stock).items():
            if key == "fp32" or name not in MATRICES:
                assert torch.equal(value, expected[name, key]), (name, key)
        assert train_with_loss(stock, 3, 4).isfinite().all()
