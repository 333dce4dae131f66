"""Parameters without axes, such as CLIP's ``logit_scale``: in training, in checkpoints and in what reads those."""

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param
from safetensors.torch import load_file
from torch import nn

from ds_layerwise.cli import main
from ds_layerwise.errors import LayerWiseError
from tests.support.checkpoints import assert_equal_states, loaded, on_rank_0, whole_states
from tests.support.cli import run
from tests.support.harness import DistributedTest
from tests.support.reference import Recipe, train, whole_number_loss
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, ds_config, relative_error, start, train_engine

pytestmark = rooms("buffers", "comm")


class Clip(nn.Module):
    """Two towers and a temperature, and a frozen scalar."""

    def __init__(self, fixed=1.5):
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = nn.Linear(8, 6), nn.Linear(12, 6)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))
        self.fixed = nn.Parameter(torch.tensor(fixed), requires_grad=False)
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, place):
        return whole_number_loss(self, place) * self.fixed.mean() / 1.5


class TestScalars(DistributedTest):
    def test_they_train_as_the_oracle(self, stage):
        expected = train(Clip, lambda *place: place, lambda module, place: module(place),
                         Recipe(matrices={"image.weight": (1, 6, 8), "text.weight": (1, 6, 12)},
                                world_size=2, gas=2, clip=5.0, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1), 3)
        for changes in ({"bucket_numel": 1}, {"layerwise": {"alignment": 1}, "overlap": False}):
            module = Clip()
            if dist.get_rank():
                with torch.no_grad():
                    module.logit_scale.fill_(7), module.fixed.fill_(7)
            engine = start(module, ds_config(stage=stage, gas=2, clip=5.0, **changes))
            # Every rank starts from rank 0's.
            assert module.fixed.shape == module.logit_scale.shape == () and module.fixed == 1.5
            train_engine(engine, 3, gas=2)
            for name, value in expected.model_params.items():
                assert relative_error(module.get_parameter(name).detach(), value) < 1e-5, name
            assert_same_on_all_ranks(module)
            engine.destroy()

    def test_checkpoints_keep_them(self, stage, tmp_path):
        config = ds_config(stage=stage, layerwise={"save_universal": True}, bf16={"enabled": True})
        saved = train_engine(start(Clip(), config), 2)
        saved.save_checkpoint(tmp_path, tag="saved")
        # DeepSpeed's converter joins the parts of a parameter along an axis, and knows none without.
        on_rank_0(lambda: main(["to-universal", str(tmp_path / "saved"), str(tmp_path / "converted")]))
        expected = whole_states(saved)
        for tag in ("saved", "saved_universal", "converted"):
            assert run("verify", tmp_path / tag)[0] == 0
            engine = loaded(start(Clip(), config), tmp_path, tag=tag)
            assert_equal_states(whole_states(engine), expected, tag)
            assert engine.module.logit_scale.shape == ()
            assert torch.equal(engine.module.logit_scale, saved.module.logit_scale)
            engine.destroy()
        on_rank_0(lambda: main(["consolidate", str(tmp_path / "saved"), str(tmp_path / "whole.safetensors")]))
        held = load_file(tmp_path / "whole.safetensors")["logit_scale"]
        assert held.shape == () and held == expected["logit_scale", "fp32"]

    def test_a_frozen_one_is_not_taken_for_a_vector(self, tmp_path):
        train_engine(start(Clip(), ds_config()), 1).save_checkpoint(tmp_path / "scalar")
        train_engine(start(Clip(fixed=[1.5, 1.5]), ds_config()), 1).save_checkpoint(tmp_path / "vector")
        for folder, fixed, message in (("scalar", [1.5], r"fixed is \(\) in .*, \(1,\) in the model"),
                                       ("vector", 1.5, r"fixed is \(2,\) in .*, \(\) in the model")):
            with pytest.raises(LayerWiseError, match=message):
                start(Clip(fixed=fixed), ds_config()).load_checkpoint(tmp_path / folder)

    def test_they_are_read_and_set(self):
        engine = start(Clip(), ds_config())
        engine.backward(engine((0, 0, dist.get_rank())))
        scale = engine.module.logit_scale
        assert safe_get_full_grad(scale).shape == safe_get_full_fp32_param(scale).shape == ()
        safe_set_full_fp32_param(scale, torch.tensor(0.25))
        assert scale == 0.25 == safe_get_full_fp32_param(scale)
