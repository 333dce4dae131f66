"""Weight decay of every optimizer: each method by its formula, around a step of the rule without it."""

from dataclasses import replace

import pytest
import torch

from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig, Recipes
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.optimizers.rules.elementwise import Adam, AdamW, Lion, Sgd
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.routing.routes import Route, recipe_named, with_changes
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.live_memory import most_beside
from tests.support.rooms import rooms

pytestmark = rooms("recipe", "muon_family", "elementwise", "routes")

HYPER = Hyper(lr=0.1, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)
METHODS = ["decoupled", "independent", "l2", "palm"]
CASES = [(rule, method, cautious) for rule in REGISTRY for method in METHODS for cautious in (False, True)
         if not (cautious and method == "l2") and (rule, method) != ("namo", "l2")]


def recipe_of(name, method, cautious):
    """The recipe; scion is unconstrained, as its weights decay by its own rule else, and SOAP moves at once."""
    own = {"scion": {"constrained": False}, "soap": {"lagged_basis": False}, "kl_soap": {"lagged_basis": False}}
    own = own.get(name, {})
    return REGISTRY[name](weight_decay_method=method, cautious_weight_decay=cautious, **own)


def shapes_of(recipe):
    return [(6, 4), (4, 6), (6, 4), (2, 6, 4)] if recipe.whole else [(7,), (33,)]


def numbers(shape, seed):
    """Some of them are zero, and where they are gradients, at every step the same."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found.view(-1)[::5] = 0
    return found


@pytest.mark.parametrize("ours, theirs", [
    (AdamW(), torch.optim.AdamW), (Adam(), torch.optim.Adam), (AdamW(weight_decay_method="l2"), torch.optim.Adam),
    (Adam(weight_decay_method="decoupled"), torch.optim.AdamW), (Sgd(), torch.optim.SGD)])
def test_torchs_bits(ours, theirs):
    param = torch.nn.Parameter(numbers((33,), 0))
    own = {"momentum": 0.9} if theirs is torch.optim.SGD else {"betas": (0.8, 0.95), "eps": 1e-8}
    optimizer = theirs([param], lr=0.1, weight_decay=0.2, foreach=True, **own)
    value = param.detach().clone()
    state = ours.init_state(value)
    for step in range(5):
        param.grad = numbers((33,), step + 1)
        optimizer.step()
        ours.update_([value], [param.grad], [state], HYPER)
        assert torch.equal(value, param.detach())


def test_cautious_decay_shrinks_weights_that_updates_shrink():
    weights = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, 0.0, 1e-30, 1e-30])
    updates = torch.tensor([1.0, -1.0, 0.0, -1.0, 1.0, 1.0, -1e-30, 1e-30])
    rule = AdamW(weight_decay_method="independent", cautious_weight_decay=True)
    rule.decay_([weights], [updates], replace(HYPER, weight_decay=0.5))
    assert torch.equal(weights, torch.tensor([0.5, 1.0, 0.5, -0.5, -1.0, 0.0, 1e-30, 0.5e-30]))


def test_caution_changes_no_bit_if_all_updates_shrink_weights():
    weights = torch.randn(99, generator=torch.Generator().manual_seed(0))
    alike = weights.clone()
    AdamW().decay_([weights], [], HYPER)
    AdamW(cautious_weight_decay=True).decay_([alike], [alike.clone()], HYPER)
    assert torch.equal(alike, weights)


@pytest.mark.parametrize("name", REGISTRY)
def test_at_a_rate_of_zero_only_independent_decay_goes_on(name):
    for method, cautious in [("decoupled", False), ("palm", True), ("independent", False), ("independent", True)]:
        recipe = recipe_of(name, method, cautious)
        rule, shape = recipe, shapes_of(recipe)[0]
        param, grad = numbers(shape, 0), numbers(shape, 1)
        start, other = param.clone(), param.clone()
        rule.update_([other], [grad], [rule.init_state(other)], replace(HYPER, weight_decay=0.0))
        rule.update_([param], [grad], [rule.init_state(param)], replace(HYPER, lr=0.0))
        agree = (start - other) * start >= 0 if cautious else torch.ones_like(start, dtype=torch.bool)
        expected = torch.where(agree, start * 0.8, start) if method == "independent" else start
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name, method, cautious", CASES)
def test_it_takes_no_more_memory_than_the_recipe_says(name, method, cautious):
    recipe = recipe_of(name, method, cautious)
    rule, shape = recipe, (64, 640) if recipe.whole else (40960,)
    # A few bytes of factors without axes.
    assert most_beside(rule, [shape], HYPER) <= recipe.workspace(shape) + 64


class TestWhatUsersWrite:
    def test_both_optimizers_take_it(self):
        config = OptimizerConfig.from_section({"type": "LayerWise", "params": {
            "scalar_optimizer": "adam", "weight_decay_method": "palm", "cautious_weight_decay": True}})
        for recipe in config.recipes:
            assert (recipe.weight_decay_method, recipe.cautious_weight_decay) == ("palm", True)
        plain = OptimizerConfig.from_section({"params": {"scalar_optimizer": "adam"}})
        assert [recipe.weight_decay_method for recipe in plain.recipes] == ["decoupled", "l2"]

    def test_every_optimizer_that_an_override_names_takes_what_the_run_says(self):
        recipes = OptimizerConfig.from_section({"params": {"weight_decay_method": "independent"}}).recipes
        assert recipe_named("lion", recipes, {}) == Lion(weight_decay_method="independent")
        assert recipe_named("sgd", recipes, {"weight_decay_method": "l2"}) == Sgd()
        assert recipe_named("sgd", Recipes(), {}) == Sgd() and recipe_named("adamw", recipes, {}) == recipes.scalar

    def test_l2_cannot_be_cautious(self):
        with pytest.raises(ConfigError, match="^optimizer.params: cautious_weight_decay is true, and "
                           "weight_decay_method of adam is 'l2', which .*; set weight_decay_method to 'decoupled'"):
            OptimizerConfig.from_section({"params": {"scalar_optimizer": "adam", "cautious_weight_decay": True}})
        route = Route(name="head", recipe=Sgd(), reason="", group=0)
        with pytest.raises(ConfigError, match="^layerwise.overrides for head: cautious_weight_decay is true"):
            with_changes(route, {"cautious_weight_decay": True}, Recipes())
        cautious = Recipes(Muon(cautious_weight_decay=True), AdamW(cautious_weight_decay=True))
        with pytest.raises(ConfigError, match="^an override to sgd: cautious_weight_decay is true"):
            recipe_named("sgd", cautious, {})
        assert recipe_named("sgd", cautious, {"weight_decay_method": "palm"}).cautious_weight_decay
        changed = with_changes(route, {"cautious_weight_decay": True, "weight_decay_method": "palm"}, Recipes())
        assert changed.recipe == Sgd(weight_decay_method="palm", cautious_weight_decay=True)

    @pytest.mark.parametrize("params, message", [
        ({"weight_decay_method": "palm2"}, "optimizer.params.weight_decay_method must be one of 'decoupled', "),
        ({"cautious_weight_decay": 1}, "optimizer.params.cautious_weight_decay must be true or false, got 1"),
        ({"cautious_wd": True}, "optimizer.params.cautious_wd is not an option; did you mean")])
    def test_mistakes(self, params, message):
        with pytest.raises(ConfigError, match=message):
            OptimizerConfig.from_section({"params": params})

    def test_overrides_may_set_it(self):
        section = {"overrides": [{"name": "*", "weight_decay_method": "palm", "cautious_weight_decay": True}]}
        changes = LayerWiseConfig.from_section(section).overrides[0].changes()
        assert changes == {"weight_decay_method": "palm", "cautious_weight_decay": True}

    def test_a_group_cannot(self):
        config = OptimizerConfig.from_section({"params": {"scalar_optimizer": "adam"}})
        param = torch.nn.Parameter(torch.zeros(2))
        for said in ("decoupled", "l2"):
            with pytest.raises(ConfigError, match=rf"param_groups\[0\].weight_decay_method is '{said}', and the whole "
                               "run has 'decoupled' for muon and 'l2' for adam, which a group cannot change"):
                LayerWiseOptimizer([{"params": [param], "weight_decay_method": said}], config)
        alike = OptimizerConfig.from_section({})
        LayerWiseOptimizer([{"params": [param], "weight_decay_method": "decoupled"}], alike)
