"""Scalar optimizers, the Newton-Schulz family and weight decay of every kind in one run, while parameter groups change.

Two ranks train and save, one and three go on; the oracle is each parameter's rule on the whole parameter, with the mean
of the ranks' gradients, without ranks or buffers.
"""

import numpy as np
import pytest
import torch
from torch import nn

from ds_layerwise.optimizers.recipe import Hyper, WeightDecayMethod
from ds_layerwise.optimizers.registry import REGISTRY, names
from ds_layerwise.optimizers.rules import elementwise
from ds_layerwise.optimizers.rules.muon_family import Muon
from tests.support.checkpoints import assert_equal_states, masters, whole_states
from tests.support.expected import by_its_rule
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import MATRICES, Net, ds_config, start, train_engine

pytestmark = rooms("elementwise", "muon_family", "recipe", "routes", "record", "reshard", "param_groups")

FP32 = {"ns_method": "standard", "ns_dtype": "fp32"}
MUON = Muon(**FP32)
CAUTIOUS = {"cautious_weight_decay": True}

#: What overrides make of single parameters, beside their optimizer; all others have the run's.
OVERRIDES = {
    "embed.weight": elementwise.AdamW(weight_decay_method="palm"),
    "head.weight": elementwise.Sgd(weight_decay_method="decoupled", **CAUTIOUS),
    "flat.weight": elementwise.Lion(weight_decay_method="l2"),
    "flat.bias": elementwise.Adam(weight_decay_method="independent", **CAUTIOUS),
    "norm.weight": elementwise.Lion(weight_decay_method="palm", **CAUTIOUS),
    "norm.bias": elementwise.Sgd(),
    "tall.bias": elementwise.AdamW(**CAUTIOUS),
    "square.weight": MUON.model_copy(update={"weight_decay_method": "l2"}),
    "twin.weight": MUON.model_copy(update={"weight_decay_method": "independent", **CAUTIOUS}),
    "tall.weight": REGISTRY["normuon"](moment2_per="longer_side", radial_brake=(0.5, 1.0), **FP32),
    "conv.weight": REGISTRY["namo"](moment2_beta=0.5, **FP32),
    "experts": REGISTRY["polargrad"](extra_scale_factor=0.01, **FP32),
    "more.0": REGISTRY["adamuon"](moment2_rescale=False, sign_momentum=True, **FP32),
    "more.1": REGISTRY["scion"](constrained=False, spectral_radius=3.0, **FP32),
    # Every element-wise optimizer as it is, those that come, too.
    **{f"spare.{i}": REGISTRY[name]() for i, name in enumerate(names(whole=False))},
}


class Model(Net):
    """Has a parameter to spare for each element-wise optimizer, ``spare.0`` and so on, and two matrices more."""

    def __init__(self):
        super().__init__()
        self.spare = nn.ParameterList(torch.randn(5 + i) for i in range(len(names(whole=False))))
        self.more = nn.ParameterList(torch.randn(6, 9 - 5 * i) for i in range(2))


#: What a schedule puts into the group before a step, of whatever kind its numbers are.
SCHEDULE = {0: {}, 1: {"weight_decay": 0.3, "momentum": 0.8}, 2: {"betas": (0.7, np.float64(0.9)), "eps": 1e-4},
            3: {}, 4: {"weight_decay": torch.tensor(0.0625), "momentum": np.float32(0.5), "lr": 0.0015}}
SAVED = 3


def entry(name, recipe):
    """The override that makes this of a parameter."""
    plain = MUON if recipe.rule == "muon" else type(recipe)()
    return {"name": name, "optimizer": recipe.rule, **{
        key: value for key, value in recipe.settings().items() if value != plain.settings()[key]}}


def engine_of(**changes):
    entries = [entry(name, recipe) for name, recipe in OVERRIDES.items()]
    return start(Model(), ds_config(layerwise={"overrides": entries, "save_universal": True}, **changes))


def train(engine, steps):
    for step in steps:
        engine.optimizer.param_groups[0].update(SCHEDULE[step])
        train_engine(engine, 1, first=step)


def by_the_rules(ranks_of_step):
    """Masters after as many steps as ``ranks_of_step`` has, each with so many ranks."""
    found = {}
    for name, param in trainable(Model()).items():
        recipe = OVERRIDES.get(name, MUON if name in MATRICES else elementwise.AdamW())
        group = {"lr": 0.003, "weight_decay": 0.1, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-10}

        def hyper_of(step, group=group, recipe=recipe):
            group |= {key: each if key == "betas" else float(each) for key, each in SCHEDULE[step].items()}
            return Hyper(**{**group, "lr": group["lr"] * (0.02 / 0.003 if recipe.whole else 1.0)})

        found[name] = by_its_rule(recipe, name, param, ranks_of_step, hyper_of)
    return found


def assert_masters(engine, expected):
    for name, value in masters(engine).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")


def test_every_method_of_weight_decay_is_there():
    assert {recipe.weight_decay_method for recipe in OVERRIDES.values()} == set(WeightDecayMethod.__args__)


class TestEveryRule(DistributedTest):
    @pytest.fixture
    def saved(self, class_tmpdir):
        return made_once(class_tmpdir / "saved", [2], self.save)

    def save(self, folder):
        engine = engine_of()
        train(engine, range(SAVED))
        engine.save_checkpoint(folder, tag="regular")
        assert_masters(engine, by_the_rules([2] * SAVED))
        expected = whole_states(engine)
        if engine.global_rank == 0:
            torch.save(expected, folder / "expected.pt")

    @pytest.mark.world_size([1, 3])
    @pytest.mark.parametrize("tag", ["regular", "regular_universal"])
    def test_it_goes_on(self, saved, tag):
        engine = engine_of(bucket_numel=10**6)
        engine.load_checkpoint(saved, tag=tag)
        assert_equal_states(whole_states(engine), torch.load(saved / "expected.pt"), tag)
        group, = engine.optimizer.param_groups
        assert [group[key] for key in ("weight_decay", "momentum", "eps")] == [0.3, 0.8, 1e-4]
        assert tuple(group["betas"]) == (0.7, 0.9)
        train(engine, range(SAVED, len(SCHEDULE)))
        ranks = engine.world_size
        assert_masters(engine, by_the_rules([2] * SAVED + [ranks] * (len(SCHEDULE) - SAVED)))
