"""Every rule of the Newton-Schulz family in one model: 20 steps over ranks, and over other ranks from the middle on."""

import pytest
import torch

from tests.support import internals
from tests.support.checkpoints import masters
from tests.support.expected import mean_gradient
from tests.support.family import train
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, relative_error, start, train_engine

pytestmark = rooms("muon_family", "update_hooks", "routes")

HALF = 10
FP32 = {"ns_method": "standard", "ns_dtype": "fp32"}

#: The rule of each parameter, and its settings.
RULES = {
    "square.weight": ("normuon", {"radial_brake": [0.5, 1.0]}),
    "tall.weight": ("adamuon", {"sign_momentum": True}),
    "flat.weight": ("namo", {"moment2_beta": 0.5}),
    "twin.weight": ("scion", {"spectral_radius": 3.0}),
    "conv.weight": ("polargrad", {"extra_scale_factor": 0.01}),
    "experts": ("normuon", {"moment2_per": "longer_side", "relative_update": True}),
    "head.weight": ("adamuon", {"moment2_rescale": False, "hyperball": "own", "scale_mode": "match_rms_adamw"}),
    "embed.weight": ("muon", {"hyperball": 3.0, "nesterov": False}),
}
#: So large that rounding the weights is nothing beside how far they move.
LR = 0.05


def config():
    entries = [{"name": name, "optimizer": rule, "lr_scale": LR / 0.02, **settings,
                **(FP32 if rule != "muon" else {})} for name, (rule, settings) in RULES.items()]
    return ds_config(layerwise={"overrides": entries, "save_universal": True})


def by_the_oracle(ranks_of_each_step):
    """Each parameter of the table, after a step on as many ranks as ``ranks_of_each_step`` says."""
    found = {}
    for name, param in trainable(Net()).items():
        if name in RULES:
            rule, settings = RULES[name]
            seen = param.detach().view(5, 27) if name == "conv.weight" else param.detach()
            grads = [mean_gradient(name, param.shape, step, ranks) for step, ranks in enumerate(ranks_of_each_step)]
            found[name] = train(rule, seen, [grad.view(seen.shape) for grad in grads], lr=LR, weight_decay=0.1,
                                settings=settings).view(param.shape)
    return found


def assert_as_by_the_oracle(engine, ranks_of_each_step):
    first, values = dict(trainable(Net())), masters(engine)
    for name, wanted in by_the_oracle(ranks_of_each_step).items():
        begin = first[name].detach()
        assert relative_error(values[name] - begin, wanted - begin) < 1e-5, (name, ranks_of_each_step)


class TestFamily(DistributedTest):
    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints after half of the steps, in folders that are called as the number of ranks that saved them."""
        return made_once(class_tmpdir / "runs", [1, 2, 4], self.save)

    def save(self, folder):
        engine = train_engine(start(Net(), config()), HALF)
        engine.save_checkpoint(folder / str(engine.world_size), tag="half")
        train_engine(engine, HALF, first=HALF)
        assert_as_by_the_oracle(engine, [engine.world_size] * 2 * HALF)

    @pytest.mark.world_size([1, 2, 4])
    def test_another_number_of_ranks_goes_on_as_the_oracle(self, runs):
        before = {1: 4, 2: 1, 4: 2}
        engine = start(Net(), config())
        saved_by = before[engine.world_size]
        for tag in ("half", "half_universal"):
            engine.load_checkpoint(runs / str(saved_by), tag=tag)
            train_engine(engine, HALF, first=HALF)
            assert_as_by_the_oracle(engine, [saved_by] * HALF + [engine.world_size] * HALF)

    @pytest.mark.world_size(2)
    def test_states_take_what_is_planned(self):
        engine = start(Net(), config())
        held = engine.optimizer.forecast().memory[engine.global_rank].states
        assert held == internals.bytes_of_states(engine)
        text = " ".join(engine.optimizer.describe().split())
        for line in ("ns_dtype fp32, spectral_radius 3.0: momentum 0.95, spectral_radius 3, constrained",
                     "nesterov, moment2_beta 0.95 per longer_side, relative_update"):
            assert line in text, (line, text)
        assert torch.equal(masters(engine)["experts"], Net().experts.detach())
