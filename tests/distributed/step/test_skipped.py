"""Steps that are skipped one after the other: which gradient is to blame, and when there is no sense in going on."""

import math

import deepspeed.comm as dist
import pytest
from deepspeed.utils import logger

from ds_layerwise.errors import StepError
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, allow_fp16, ds_config, start

pytestmark = rooms("skipped_steps", "loss_scaling")


class Sick(Net):
    """The gradients of some parameters, of which one comes first in the model, are not finite while ``bad``."""

    def __init__(self, what=math.nan, ranks=(1, )):
        super().__init__()
        self.bad, self.what, self.ranks = False, what, ranks

    def forward(self, place):
        loss = super().forward(place)
        if self.bad and dist.get_rank() in self.ranks:
            for name in ("norm.weight", "tall.weight", "head.weight"):
                loss = loss + self.get_parameter(name).flatten()[5].float() * self.what
        return loss


def train(engine, steps, *, bad):
    for step in range(steps):
        engine.module.bad = bad
        engine.backward(engine((step, 0, dist.get_rank())))
        engine.step()


class TestSkipped(DistributedTest):
    def blame(self, engine, made="backward passes left gradients that are not finite on rank 1"):
        """The words of an error about the first of them: its owner, and the ranks that made it."""
        owner = next(rank for rank in range(2) if any(
            piece.name == "tall.weight" for piece in engine.optimizer.layout.pieces(rank)))
        return f"the gradient of tall.weight is not finite, found by rank {owner}, which owns it; {made}"

    @pytest.mark.parametrize("stage, sections", [(1, {}), (2, {"bf16": {"enabled": True, "check_grad_overflow": True}}),
                                                 (1, {"fp16": {"enabled": True, "loss_scale": 8}})])
    def test_so_many_in_a_row_are_an_error_that_names_the_first(self, stage, sections):
        allow_fp16()
        engine = start(Sick(), ds_config(stage=stage, layerwise={"max_skipped_steps": 4}, **sections))
        for healthy in range(2):
            train(engine, 3, bad=True)
            assert engine.skipped_steps == 3 * (healthy + 1)
            train(engine, 1, bad=False)
        train(engine, 3, bad=True)
        with pytest.raises(StepError) as error:
            train(engine, 1, bad=True)
        assert str(error.value) == (
            f"step 3 was skipped 4 consecutive times: {self.blame(engine)}; look for the cause, or allow more "
            "(layerwise.max_skipped_steps)")

    @pytest.mark.parametrize("way", ["load", "weights alone", "one file"])
    def test_a_load_counts_anew(self, way, tmp_path):
        """After a rollback as many may be skipped as before; a load that fails changes nothing."""
        engine = start(Sick(), ds_config(layerwise={"max_skipped_steps": 3}))
        train(engine, 1, bad=False)
        engine.save_checkpoint(tmp_path, tag="tag")
        engine.optimizer.save_state_dict_to_file(tmp_path / "states")
        train(engine, 2, bad=True)
        if way == "one file":
            engine.optimizer.load_state_dict_from_file(tmp_path / "states")
        else:
            engine.load_checkpoint(tmp_path, tag="tag", load_module_only=way == "weights alone")
        train(engine, 2, bad=True)
        with pytest.raises(ZeroDivisionError):
            engine.load_checkpoint(tmp_path, tag="tag", custom_load_fn=lambda src, dst: 1 / 0)
        with pytest.raises(StepError, match=f"step 2 was skipped 3 consecutive times: {self.blame(engine)}"):
            train(engine, 1, bad=True)

    @pytest.mark.parametrize("what, ranks, made", [
        (math.inf, (0, 1), "backward passes left gradients that are not finite on ranks 0, 1"),
        (3e38, (0, 1), "backward passes left finite gradients on every rank")])
    def test_the_ranks_that_made_it_are_named(self, stage, what, ranks, made):
        engine = start(Sick(what, ranks), ds_config(stage=stage, gradient_accumulation_steps=2,
                                                    layerwise={"max_skipped_steps": 2}))
        train(engine, 2, bad=True)
        with pytest.raises(StepError) as error:
            train(engine, 2, bad=True)
        assert str(error.value).endswith(f"{self.blame(engine, made)}; look for the cause, or allow more "
                                         "(layerwise.max_skipped_steps)")

    def test_the_first_of_them_is_not_looked_for(self):
        engine = start(Sick(), ds_config(layerwise={"max_skipped_steps": 1}))
        for healthy in range(2):
            train(engine, 1, bad=False)
        with pytest.raises(StepError, match="found by rank [01], which owns it; look for the cause"):
            train(engine, 1, bad=True)

    def test_finite_gradients_are_called_too_large(self):
        engine = start(Sick(1e30), ds_config(layerwise={"max_skipped_steps": 1}))
        with pytest.raises(StepError, match="all gradients are finite, but float32 does not hold their norm, or its"):
            train(engine, 1, bad=True)

    def test_it_warns_before_and_for_ever_where_there_is_no_end(self, monkeypatch):
        engine, warned = start(Sick(), ds_config(layerwise={"max_skipped_steps": None})), []
        monkeypatch.setattr(logger, "warning", warned.append)
        train(engine, 119, bad=True)
        assert warned == [
            f"ds_layerwise: step 1 was skipped {count} consecutive times: {self.blame(engine)}"
            for count in (10, 20, 40, 80)] * (dist.get_rank() == 0)

    def test_a_loss_scale_that_comes_down_is_no_sickness(self):
        """The way from 2**32 to its minimum takes more steps than may be skipped; there it ends, and says why."""
        allow_fp16()
        fp16 = {"enabled": True, "initial_scale_power": 32, "hysteresis": 2, "min_loss_scale": 1}
        engine = start(Sick(), ds_config(fp16=fp16, layerwise={"max_skipped_steps": 2}))
        train(engine, 33, bad=True)
        assert engine.optimizer.loss_scale == 1 and engine.skipped_steps == 33
        with pytest.raises(StepError) as error:
            train(engine, 1, bad=True)
        assert str(error.value) == (
            f"step 1 cannot be skipped once more, loss scale already at minimum (1): {self.blame(engine)}")
