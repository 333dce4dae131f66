"""Any number of recipes in a run: what overrides set for the parameters that they name is what trains those."""

from dataclasses import replace

import pytest
import torch

from ds_layerwise.errors import RoutingError
from ds_layerwise.orthogonalize.newton_schulz import coefficients
from tests.support.checkpoints import assert_equal_states, loaded, masters, whole_states
from tests.support.expected import assert_close, each_alone, mean_gradient
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import (
    Net,
    ds_config,
    start,
    train_engine,
    train_engines,
)

pytestmark = rooms("recipe", "muon_family", "elementwise", "routes", "registry")

RANKS, STEPS = 2, 5

OVERRIDES = [
    {"name": "square.weight", "momentum": 0.5, "ns_coefficients": "quintic"},
    {"name": "twin.weight", "nesterov": False, "lr_scale": 0.5},
    {"name": "tall.weight", "extra_scale_factor": 2.0},
    {"name": "embed.weight", "betas": [0.5, 0.75], "eps": 1e-3, "weight_decay": 0.0},
    {"name": "head.weight", "optimizer": "sgd", "momentum": 0.75},
    {"name": "flat.weight", "optimizer": "lion"},
    {"name": "flat.bias", "optimizer": "lion", "betas": [0.5, 0.75]},
]

#: Settings of the oracle that differ from the run's, by parameter.
OWN = {
    "square.weight": {"momentum": 0.5, "ns_coefficients": coefficients("quintic", 5)},
    "twin.weight": {"nesterov": False, "muon_lr": 0.01},
    # Its scale is no part of the oracle: twice the rate, and half the decay.
    "tall.weight": {"muon_lr": 0.04, "weight_decay": 0.05},
    "embed.weight": {"betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.0},
}


def by_the_oracle(module):
    """Masters after all steps, each parameter trained on its own."""
    found = each_alone(module, lambda name, recipe: replace(recipe, **OWN.get(name, {})), STEPS, RANKS)
    return found | {name: by_hand(name, p) for name, p in trainable(module).items()
                    if name in ("head.weight", "flat.weight", "flat.bias")}


def by_hand(name, param):
    """SGD with momentum and L2 regularisation, by torch; Lion as its paper has it."""
    value = param.detach().clone().requires_grad_()
    sgd = torch.optim.SGD([value], lr=0.003, momentum=0.75, weight_decay=0.1)
    average, (beta1, beta2) = torch.zeros_like(value), (0.5, 0.75) if name == "flat.bias" else (0.9, 0.95)
    for step in range(STEPS):
        grad = mean_gradient(name, param.shape, step, RANKS)
        if name == "head.weight":
            value.grad = grad
            sgd.step()
            continue
        with torch.no_grad():
            direction = (beta1 * average + (1 - beta1) * grad).sign()
            value.mul_(1 - 0.003 * 0.1).sub_(0.003 * direction)
            average = beta2 * average + (1 - beta2) * grad
    return value.detach()


class TestOverrides(DistributedTest):
    world_size = RANKS

    def test_each_parameter_trains_as_its_recipe_says(self, stage, tmp_path):
        config = ds_config(stage=stage, layerwise={"overrides": OVERRIDES})
        expected = by_the_oracle(Net())
        engine = train_engine(start(Net(), config), STEPS)
        assert_close(masters(engine), expected)
        # A checkpoint has states of four families, and goes on.
        engine.save_checkpoint(tmp_path)
        other = loaded(start(Net(), config), tmp_path)
        assert_equal_states(whole_states(other), whole_states(engine))
        train_engines((engine, other), 2, first=STEPS)
        assert_equal_states(whole_states(other), whole_states(engine))

    def test_the_table_names_each(self):
        text = start(Net(), ds_config(layerwise={"overrides": OVERRIDES})).optimizer.describe()
        for line in ("muon with ns_coefficients quintic: momentum 0.5, nesterov, scale_mode original",
                     "muon with nesterov False: momentum 0.95, scale_mode original", "sgd: momentum 0.75",
                     "muon with extra_scale_factor 2.0: momentum 0.95, nesterov, scale_mode original x 2",
                     "lion: betas [0.5, 0.75] and [0.9, 0.95]"):
            assert line in " ".join(text.split()), (line, text)

    def test_settings_that_a_recipe_does_not_take_are_refused(self):
        for entry, message in (
                ({"name": "embed.weight", "ns_steps": 3}, r"sets ns_steps for embed.weight, which goes to adamw "
                 r"\(embedding\) and accepts .*betas, eps, weight_decay"),
                ({"name": "square.weight", "betas": [0.5, 0.5]}, r"sets betas for square.weight, which goes to muon "
                 r"\(matrix\) and accepts .*nesterov.*; narrow the pattern"),
                ({"name": "square.weight", "scale_mode": "match_rms_adamw"}, "sets scale_mode for square.weight: muon "
                 "needs a learning rate of another size.* give the entry lr_scale"),
                ({"name": "head.weight", "optimizer": "lion", "eps": 1e-3},
                 "sets eps for head.weight, which goes to lion"),
                ({"name": "norm.weight", "optimizer": "muon"},
                 r"norm.weight \(12,\) was sent to the matrix optimizer")):
            with pytest.raises(RoutingError, match=message):
                start(Net(), ds_config(layerwise={"overrides": [entry]}))
