"""Scalar optimizers in pieces and at different steps, and those that run by the class of another package.

Formulas are compared in test_every_setting.py.
"""

import pytest
import pytorch_optimizer
import torch

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.registry import GONE, REGISTRY, names
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.elementwise import tried
from tests.support.rooms import rooms

pytestmark = rooms("elementwise", "registry", "recipe")

HYPER = Hyper(lr=0.01, weight_decay=0.1, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)
SCALAR = [(name, settings) for name in names(whole=False) for settings in tried(REGISTRY[name])]


def gradients(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).float() * 3


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100))


def trained(recipe, shape, steps=20):
    rule, value = recipe, start(shape)
    state = rule.init_state(value)
    for step in range(1, steps + 1):
        rule.update_([value], [gradients(shape, step)], [state], HYPER)
    return value


@pytest.mark.parametrize("name, settings", SCALAR)
def test_it_does_not_see_where_a_parameter_is_cut(name, settings):
    cuts = [0, 1, 8, 21, 64, 100, 163, 200]
    rule, whole = REGISTRY[name](**settings), start((200,))
    pieces = [whole[a:b].clone() for a, b in zip(cuts, cuts[1:])]
    state, states = rule.init_state(whole), [rule.init_state(p) for p in pieces]
    for step in range(5):
        grad = gradients((200,), step)
        rule.update_([whole], [grad], [state], HYPER)
        rule.update_(pieces, [grad[a:b] for a, b in zip(cuts, cuts[1:])], states, HYPER)
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name, settings", SCALAR)
def test_parameters_at_different_steps_go_together(name, settings):
    rule = REGISTRY[name](**settings)
    alone, late = start((33,)), start((33,))
    first, second = rule.init_state(alone), rule.init_state(late)
    for step in range(1, 8):
        params, states = ([alone, late], [first, second]) if step > 3 else ([alone], [first])
        rule.update_(params, [gradients((33,), step)] * len(params), states, HYPER)
    assert torch.equal(alone, trained(rule, (33,), steps=7))
    other = start((33,))
    state = rule.init_state(other)
    for step in range(4, 8):
        rule.update_([other], [gradients((33,), step)], [state], HYPER)
    assert torch.equal(late, other)


def config_of(**params):
    return OptimizerConfig.from_section({"type": "LayerWise", "params": params})


#: The classes that have taken the place of rules of this package, with arguments in a config and in Python.
CLASSES = {
    "pytorch_optimizer:LaProp": (pytorch_optimizer.LaProp, {"betas": [0.8, 0.95], "eps": 1e-8}),
    "pytorch_optimizer:AdEMAMix": (pytorch_optimizer.AdEMAMix, {"betas": [0.8, 0.95, 0.999], "t_alpha_beta3": 20}),
    "pytorch_optimizer:SignSGD": (pytorch_optimizer.SignSGD, {"momentum": 0.8}),
    "torch.optim:Adafactor": (torch.optim.Adafactor, {"beta2_decay": -0.5, "d": 1.5}),
}


@pytest.mark.parametrize("path", CLASSES)
def test_the_class_of_an_optimizer_that_was_here_does_what_it_does_alone(path):
    (kind, arguments), whole = CLASSES[path], path == "torch.optim:Adafactor"
    key, shape = ("matrix", (6, 4)) if whole else ("scalar", (33,))
    split = {} if whole else {"split": "element"}
    config = config_of(**{f"{key}_optimizer": path, f"{key}_params": {**arguments, **split}})
    ours = trained(config.matrix if whole else config.scalar, shape)
    param = torch.nn.Parameter(start(shape))
    theirs = kind([param], lr=0.01, weight_decay=0.1, **arguments)
    for step in range(1, 21):
        param.grad = gradients(shape, step)
        theirs.step()
    torch.testing.assert_close(ours, param.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GONE)
def test_the_name_of_an_optimizer_that_was_here_says_which_class_to_name(name):
    key = "matrix" if name == "adafactor" else "scalar"
    way_out = f"'{name}' is no optimizer of this package any more: write '{GONE[name]}'.*into {key}_params"
    assert GONE[name] in CLASSES
    with pytest.raises(ConfigError, match=f"optimizer.params.{key}_optimizer: {way_out}"):
        config_of(**{f"{key}_optimizer": name})
    with pytest.raises(ConfigError, match=way_out):
        LayerWiseConfig.from_section({"overrides": [{"name": "embed.*", "optimizer": name}]})


@pytest.mark.parametrize("params, message", [
    ({"scalar_optimizer": "soap"}, "scalar_optimizer must be one of 'adamw', .*, got 'soap'"),
    ({"use_shape_scaling": True}, "use_shape_scaling is not supported; scalar optimizers get pieces of"),
    ({"alpha": 1.0}, "optimizer.params.alpha is not supported; .*scalar_optimizer 'pytorch_optimizer:AdEMAMix'"),
    ({"eps1": 1e-30}, "optimizer.params.eps1 is not supported; .*matrix_optimizer 'torch.optim:Adafactor'"),
    ({"betas": [0.9, 0.99, 0.999]}, "betas must be two numbers"),
    ({"matrix_optimizer": "soap", "correct_bias": 0}, "correct_bias must be true or false, got 0")])
def test_mistakes(params, message):
    with pytest.raises(ConfigError, match=message):
        config_of(**params)


def test_a_key_that_both_optimizers_have_holds_for_both():
    config = config_of(stochastic_rounding=True)
    assert (config.matrix.stochastic_rounding, config.scalar.stochastic_rounding) == (True, True)


def test_a_switch_of_other_packages_groups_may_be_a_setting_here():
    config = config_of(matrix_optimizer="soap", correct_bias=False)
    with pytest.raises(ConfigError, match="correct_bias is True, and the whole run has False"):
        LayerWiseOptimizer([{"params": [torch.nn.Parameter(torch.zeros(2))], "correct_bias": True}], config)
