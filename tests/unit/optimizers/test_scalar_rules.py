"""Scalar optimizers and Adafactor against torch and pytorch_optimizer, in pieces, and at different steps.

Formulas are compared in ``recipes/test_every_setting.py``.
"""

import math
from dataclasses import replace

import pytest
import pytorch_optimizer
import torch

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.recipe import Recipe
from ds_layerwise.optimizers.recipe_registry import REGISTRY
from ds_layerwise.optimizers.recipes import adafactor_recipe as sizes
from ds_layerwise.optimizers.recipes.adafactor_recipe import Adafactor
from ds_layerwise.optimizers.rule import Hyper
from ds_layerwise.optimizers.rule_registry import rule_of
from ds_layerwise.zero.groups.param_groups import LayerWiseOptimizer
from tests.support.rooms import rooms

pytestmark = rooms("elementwise", "elementwise_recipes", "adafactor", "adafactor_recipe", "recipe_registry",
                   "rule_registry", "recipe")

HYPER = Hyper(lr=0.01, weight_decay=0.1, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)
STEPS = 20

#: By optimizer, the settings that it is tried at; every field of its recipe is in one of them.
TRIED = {
    "adamw": [{}], "adam": [{}], "lion": [{}], "sgd": [{}],
    "signum": [{}, {"nesterov": True}, {"nesterov": True, "correct_bias": False}],
    "laprop": [{}, {"correct_bias": False}],
    "ademamix": [{}, {"alpha": 2.0, "beta3": 0.99}, {"alpha_warmup_steps": 30}, {"beta3_warmup_steps": 30},
                 {"alpha_warmup_steps": 12, "beta3_warmup_steps": 5, "beta3": 0.9}],
    "adafactor": [{}, {"beta2_decay": -0.3}, {"eps1": 12.0}, {"eps2": 3.0}, {"clip_threshold": 1.01}],
}
CASES = [(name, settings) for name, tried in TRIED.items() for settings in tried]


def gradients(shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64).float() * 3


def start(shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100))


def trained(name, settings, shape, hyper=HYPER, steps=STEPS):
    rule = rule_of(REGISTRY[name].recipe(**settings))
    value = start(shape)
    state = rule.init_state(value)
    for step in range(1, steps + 1):
        rule.update_([value], [gradients(shape, step)], [state], hyper)
    return value


def test_every_setting_is_tried():
    for name, entry in REGISTRY.items():
        if not entry.recipe.whole or name in TRIED:
            # A rule does not see in what its states are kept.
            fields = set(entry.recipe.keys()) - set(Recipe.keys()) - {"stochastic_rounding"} - set(
                getattr(entry.recipe, "kept_by", {}).values())
            assert set().union(*TRIED.get(name, [{None}])) == fields, f"add what {name!r} is tried at to TRIED"
            for field in fields:
                default = entry.recipe.model_fields[field].default
                assert any(settings.get(field, default) != default for settings in TRIED[name]), (name, field)


def theirs_trained(make, shape):
    param = torch.nn.Parameter(start(shape))
    optimizer = make([param])
    for step in range(1, STEPS + 1):
        param.grad = gradients(shape, step)
        optimizer.step()
    return param.detach()


def ademamix(**settings):
    return lambda params: pytorch_optimizer.AdEMAMix(
        params, lr=0.01, betas=(0.8, 0.95, settings.pop("beta3", 0.9999)), eps=1e-8, weight_decay=0.1,
        weight_decouple=True, **settings)


@pytest.mark.parametrize("name, settings, shape, hyper, theirs", [
    ("signum", {}, (33,), HYPER, lambda p: pytorch_optimizer.SignSGD(p, lr=0.01, momentum=0.9, weight_decay=0.1)),
    ("laprop", {}, (33,), replace(HYPER, weight_decay=0.0),
     lambda p: pytorch_optimizer.LaProp(p, lr=0.01, betas=(0.8, 0.95), eps=1e-8)),
    ("ademamix", {}, (33,), HYPER, ademamix()),
    ("ademamix", {"alpha": 3.0, "beta3": 0.999, "alpha_warmup_steps": 20, "beta3_warmup_steps": 20}, (33,), HYPER,
     ademamix(alpha=3.0, beta3=0.999, t_alpha_beta3=20)),
    ("adafactor", {}, (6, 4), HYPER, lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1)),
    ("adafactor", {}, (40, 300), replace(HYPER, lr=0.5), lambda p: torch.optim.Adafactor(p, lr=0.5, weight_decay=0.1)),
    ("adafactor", {"beta2_decay": -0.5, "eps1": 0.1, "eps2": 2.0, "clip_threshold": 1.5}, (4, 6), HYPER,
     lambda p: torch.optim.Adafactor(p, lr=0.01, weight_decay=0.1, beta2_decay=-0.5, eps=(0.1, 2.0), d=1.5)),
])
def test_other_packages_agree(name, settings, shape, hyper, theirs):
    ours = trained(name, settings, shape, hyper)
    torch.testing.assert_close(ours, theirs_trained(theirs, shape), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", [name for name, entry in REGISTRY.items() if not entry.recipe.whole])
def test_it_does_not_see_where_a_parameter_is_cut(name):
    cuts = [0, 1, 8, 21, 64, 100, 163, 200]
    for settings in TRIED[name]:
        rule = rule_of(REGISTRY[name].recipe(**settings))
        whole = start((200,))
        pieces = [whole[a:b].clone() for a, b in zip(cuts, cuts[1:])]
        state, states = rule.init_state(whole), [rule.init_state(p) for p in pieces]
        for step in range(5):
            grad = gradients((200,), step)
            rule.update_([whole], [grad], [state], HYPER)
            rule.update_(pieces, [grad[a:b] for a, b in zip(cuts, cuts[1:])], states, HYPER)
        assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name, settings", CASES)
def test_parameters_at_different_steps_go_together(name, settings):
    shape = (6, 4) if REGISTRY[name].recipe.whole else (33,)
    rule = rule_of(REGISTRY[name].recipe(**settings))
    alone, late = start(shape), start(shape)
    first, second = rule.init_state(alone), rule.init_state(late)
    for step in range(1, 8):
        params, states = ([alone, late], [first, second]) if step > 3 else ([alone], [first])
        rule.update_(params, [gradients(shape, step)] * len(params), states, HYPER)
    assert torch.equal(alone, trained(name, settings, shape, steps=7))
    other = start(shape)
    state = rule.init_state(other)
    for step in range(4, 8):
        rule.update_([other], [gradients(shape, step)], [state], HYPER)
    assert torch.equal(late, other)


def test_the_slow_average_is_warmed_up_from_a_beta_of_zero():
    rule = rule_of(REGISTRY["ademamix"].recipe(beta3=0.999, beta3_warmup_steps=10))
    found = [rule.scheduled(step, 0.0)[1] for step in (1, 5, 10, 99)]
    assert found == pytest.approx([0.999**10, 0.999**2, 0.999, 0.999])


def test_adafactors_mean_of_second_moments_has_a_least_value():
    # Means of 0.25 count as 0.3, and a root of 0.46 stays what it is.
    rule, value = rule_of(Adafactor(eps1=0.3, clip_threshold=100.0)), torch.ones(2, 3)
    rule.update_([value], [torch.full((2, 3), 0.5)], [rule.init_state(value)], replace(HYPER, weight_decay=0.0))
    torch.testing.assert_close(value, torch.full((2, 3), 1 - 0.01 * 0.5 / math.sqrt(0.25 * 0.25 / 0.3)))


@pytest.mark.parametrize("eps1", [1e-30, 1e-44])
def test_rows_without_gradients_stay_where_they_are_under_adafactor(eps1):
    rule, hyper = rule_of(Adafactor(eps1=eps1)), Hyper(lr=0.1, weight_decay=0.0, momentum=0.0, betas=(0, 0), eps=0.0)
    grad = torch.ones(4, 6)
    grad[0] = grad[:, 0] = 0
    param = torch.ones(4, 6)
    state = rule.init_state(param)
    for _ in range(3):
        rule.update_([param], [grad], [state], hyper)
    assert torch.equal(param == 1, grad == 0) and torch.isfinite(param).all()
    param = torch.ones(4, 6)
    rule.update_([param], [torch.zeros(4, 6)], [rule.init_state(param)], hyper)
    assert torch.equal(param, torch.ones(4, 6))


def test_adafactor_takes_each_matrix_of_a_stack_for_itself():
    rule, stack = rule_of(Adafactor()), start((3, 6, 4))
    stack[1] *= 50
    state, alone = rule.init_state(stack), [each.clone() for each in stack]
    states = [rule.init_state(each) for each in alone]
    for step in range(3):
        grad = gradients((3, 6, 4), step)
        rule.update_([stack], [grad], [state], HYPER)
        rule.update_(alone, list(grad), states, HYPER)
    torch.testing.assert_close(stack, torch.stack(alone), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("settings", [{}, {"weight_decay_method": "l2"}, {"cautious_weight_decay": True}], ids=str)
def test_a_stack_in_batches_has_the_bits_of_one_that_is_not_cut(settings, monkeypatch):
    def after_three_steps(at_once):
        monkeypatch.setattr(sizes, "MAX_BATCH_NUMEL", at_once * 20 * 130)
        rule, stack = rule_of(Adafactor(**settings)), start((5, 20, 130))
        # Neither their sizes nor their gradients are alike, so that whatever spanned the stack would show.
        stack[1] *= 50
        state = rule.init_state(stack)
        for step in range(3):
            rule.update_([stack], [gradients((5, 20, 130), step) * torch.logspace(-3, 3, 5).view(5, 1, 1)], [state],
                         replace(HYPER, lr=0.5))
        return stack, state

    whole, kept = after_three_steps(5)
    for at_once in (0, 1, 2, 3):
        stack, state = after_three_steps(at_once)
        assert torch.equal(stack, whole) and float(state["step"]) == 3
        assert all(torch.equal(value, kept[key]) for key, value in state.items())


class TestWhatUsersWrite:
    def test_an_optimizer_of_whole_matrices_is_no_scalar_one(self):
        with pytest.raises(ConfigError, match="scalar_optimizer must be one of 'adamw', .*, got 'adafactor'"):
            OptimizerConfig.from_section({"params": {"scalar_optimizer": "adafactor"}})
        config = OptimizerConfig.from_section({"type": "LayerWise", "params": {
            "matrix_optimizer": "adafactor", "beta2_decay": -0.5}})
        assert config.matrix == Adafactor(beta2_decay=-0.5)

    def test_adafactor_refuses_tensor_shards(self):
        assert Adafactor().refusal((6, 4)) is None
        refusal = Adafactor().refusal((6, 4), cut_axis=-1)
        assert "is cut by tensor parallelism, and adafactor needs whole matrices" in refusal

    @pytest.mark.parametrize("scalar, key, value, message", [
        ("signum", "use_shape_scaling", True, "use_shape_scaling is not supported; scalar optimizers get pieces of"),
        ("adamw", "alpha", 1.0, "optimizer.params.alpha belongs to ademamix"),
        ("ademamix", "beta3", 1.0, r"optimizer.params.beta3 must be in \[0, 1\), got 1"),
        ("ademamix", "alpha_warmup_steps", -1, "alpha_warmup_steps must be a whole number of at least 0, got -1"),
        ("ademamix", "betas", [0.9, 0.99, 0.999], "betas must be two numbers"),
        ("signum", "correct_bias", 0, "correct_bias must be true or false, got 0")])
    def test_mistakes(self, scalar, key, value, message):
        with pytest.raises(ConfigError, match=message):
            OptimizerConfig.from_section({"params": {"scalar_optimizer": scalar, key: value}})

    def test_a_key_that_both_optimizers_have_holds_for_both(self):
        config = OptimizerConfig.from_section({"params": {"scalar_optimizer": "signum", "nesterov": False}})
        assert (config.matrix.nesterov, config.scalar.nesterov) == (False, False)
        plain = OptimizerConfig.from_section({"params": {"scalar_optimizer": "signum"}})
        assert (plain.matrix.nesterov, plain.scalar.nesterov) == (True, False)
        # A switch of other packages' groups that is a setting here.
        config = OptimizerConfig.from_section({"params": {"scalar_optimizer": "signum", "correct_bias": False}})
        with pytest.raises(ConfigError, match="correct_bias is True, and the whole run has False"):
            LayerWiseOptimizer([{"params": [torch.nn.Parameter(torch.zeros(2))], "correct_bias": True}], config)
