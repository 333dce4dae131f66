"""Corners of configs, plans and routes that a rewrite has lost once: what is refused first, and odd shapes."""

import sys

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_layerwise.config.conditions import Facts
from ds_layerwise.config.ds_config import with_plain_numbers
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.rules.muon_family import Muon, Orthogonalized
from ds_layerwise.optimizers.rules.soap import Soap
from ds_layerwise.orthogonalize.tensor_shards import whole_shape
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.forecast.report import plan_table
from ds_layerwise.routing.module_of import weights_of
from ds_layerwise.routing.override_matching import overrides_by_name
from ds_layerwise.routing.routes import Route
from ds_layerwise.tools.dry_run import build_model, hidden_size_of
from tests.support.model_specs import forecast
from tests.support.rooms import rooms

pytestmark = rooms("conditions", "ds_config", "kronecker", "dry_run", "module_of",
                   "muon_family", "override_matching", "overrides", "report", "routes")


def entries(*given):
    return LayerWiseConfig.from_section({"overrides": list(given)}).overrides


def test_a_key_that_no_override_has_is_refused_before_values():
    """Whoever misspells a name is told so, whatever else is wrong."""
    with pytest.raises(ConfigError, match=r"overrides\[0\] has .*momentun|momentun"):
        entries({"name": "*", "momentum": 7, "momentun": 0.5})
    with pytest.raises(ConfigError, match="momentum must be"):
        entries({"name": "*", "momentum": 7})


def test_an_override_that_matches_nothing_is_told_before_two_that_contradict_each_other():
    known = {"w": [Facts(name="w", shape=(4, 4))]}
    both = ({"name": "w", "lr": 1}, {"name": "*", "lr": 2})
    with pytest.raises(RoutingError, match=r"overrides\[2\].* matches no trainable parameter"):
        overrides_by_name(known, entries(*both, {"name": "misspelled", "lr": 1}))
    with pytest.raises(RoutingError, match="sets lr to"):
        overrides_by_name(known, entries(*both))


def test_the_shape_of_a_whole_whose_axis_the_part_does_not_have():
    """A bias is cut along an axis that only its matrix has."""
    assert whole_shape((6,), -2, 3) == (6,) and whole_shape((), -1, 2) == () and whole_shape((6,), -1, 3) == (18,)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_factors_of_what_is_no_matrix_are_an_error_of_values(shape):
    with pytest.raises(ValueError):
        Soap().sides(shape)
    assert Soap().sides((3, 4, 6)) == {"L": 4, "R": 6}


def test_a_recipe_of_the_family_need_not_say_more_of_its_scale():
    assert Orthogonalized.scale_summary(Muon()) == ""
    assert "momentum" in Orthogonalized().summary(str)


SHAPES = {"up": (16, 8), "down": (8, 16), "bias": (8,)}


def run_of(**changes):
    return RunConfig.from_ds_config({"zero_optimization": {"stage": 1, "reduce_bucket_size": 128}, **changes,
                                     "optimizer": {"type": "LayerWiseMuon", "params": {}}})


def planned(run, **of_bias):
    matrix, scalar = run.optimizer.recipes
    routes = {name: Route(name=name, recipe=matrix if len(shape) == 2 else scalar, reason="shape", group=0,
                          matrix_shape=shape if len(shape) == 2 else None, **({} if len(shape) == 2 else of_bias))
              for name, shape in SHAPES.items()}
    return routes, specs_of(((name, shape, "float32") for name, shape in SHAPES.items()), routes)


def test_a_table_takes_betas_as_lists():
    """Values in groups are as ``load_state_dict`` of a script, and JSON, leave them."""
    run = run_of()
    routes, specs = planned(run)
    group = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "betas": [0.5, 0.75], "eps": 1e-8, "matrix_lr_ratio": 1,
             "scalar_lr_ratio": 1}
    told = plan_table(routes, specs, [forecast(specs, routes, run, 2)], run.optimizer, groups=[group])
    assert "betas [0.5, 0.75]" in " ".join(told.split())


class Computed(nn.Module):
    """A layer of an older tool whose weight costs something to look at, and may be of ``weight_v``."""

    def __init__(self, direction):
        super().__init__()
        vars(self)["weight"] = torch.ones(4, 3)
        self.register_parameter("weight_orig", None)
        self.register_parameter("weight_v", direction)

    @property
    def weight(self):
        raise RuntimeError("computed")


def test_the_weight_of_an_older_tool_is_what_it_is_computed_from_and_is_not_computed():
    direction = nn.Parameter(torch.zeros(4, 3))
    found, = weights_of(Computed(direction))
    assert found is direction


def test_a_config_without_foreign_numbers_stays_the_scripts_own():
    own = {"optimizer": {"params": {"betas": [0.9, 0.95]}}, "steps": (1, 2.0)}
    assert with_plain_numbers(own) is own
    other = {"optimizer": {"params": {"lr": np.float32(0.5)}}, "kept": [1]}
    plain = with_plain_numbers(other)
    assert plain == other and type(plain["optimizer"]["params"]["lr"]) is float and plain["kept"] is other["kept"]


def test_a_model_is_built_where_the_hub_keeps_no_errors(tmp_path, monkeypatch):
    """The module is looked at for an error that is there alone."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=16)
    config.save_pretrained(tmp_path)
    LlamaForCausalLM(config)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", None)
    assert hidden_size_of(build_model(str(tmp_path))) == 8
