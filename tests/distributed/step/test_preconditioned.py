"""SOAP, KL-SOAP and Shampoo with engines: any number of ranks, resumed at another, on the host, from and to Muon."""

import deepspeed.comm as dist
import pytest
import torch

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import LayerWiseError, RoutingError, StepError
from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.rules import kronecker
from ds_layerwise.routing.routes import recipe_named
from tests.support import internals, preconditioned
from tests.support.checkpoints import assert_equal_states, masters, whole_states
from tests.support.expected import assert_close, by_its_rule, mean_gradient
from tests.support.harness import DistributedTest, made_once
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import MATRICES, Net, ds_config, start, train_engine

pytestmark = rooms("kronecker", "soap", "shampoo", "owned", "routes")

PARAMS = {"matrix_optimizer": "soap", "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-6,
          "precondition_frequency": 3}
OVERRIDES = [
    {"name": "twin.weight", "optimizer": "kl_soap", "precondition_frequency": 4, "nesterov": True},
    {"name": "tall.weight", "optimizer": "kl_soap", "max_side": 20, "lr_scale": 0.5},
    {"name": "flat.weight", "optimizer": "shampoo", "precondition_frequency": 2},
    {"name": "conv.weight", "basis": "eigh", "lagged_basis": False, "max_update_rms": 0.5},
]
STEPS = 20


def config(overrides=OVERRIDES, params=PARAMS, layerwise=None, **changes):
    return ds_config(optimizer={"type": "LayerWise", "params": params},
                     layerwise={"overrides": overrides, **(layerwise or {})}, **changes)


def by_the_rules(ranks_of_step):
    """Matrices after all steps, each by its rule alone, in one process without buffers."""
    recipes = OptimizerConfig.from_section(config()["optimizer"]).recipes
    found = {}
    for name, param in trainable(Net()).items():
        if name not in MATRICES:
            continue
        mine = next((entry for entry in OVERRIDES if entry["name"] == name), {})
        settings = {key: value for key, value in mine.items() if key not in ("name", "optimizer", "lr_scale")}
        recipe = recipe_named(mine.get("optimizer", "matrix"), recipes, {})
        hyper = Hyper(lr=0.01 * mine.get("lr_scale", 1), weight_decay=0.1, momentum=0, betas=(0.9, 0.95), eps=1e-6)
        found[name] = by_its_rule(type(recipe)(**{**recipe.settings(), **settings}), name, param, ranks_of_step,
                                  lambda _, now=hyper: now)
    return found


def by_the_oracle(ranks_of_step):
    """The square ones by an implementation that shares nothing with ours."""
    params = dict(trainable(Net()))
    common = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6, "limit": 1.0}
    found = {"square.weight": preconditioned.Soap(params["square.weight"].detach(), every=3, **common),
             "twin.weight": preconditioned.Soap(params["twin.weight"].detach(), every=4, kl=True, nesterov=True,
                                                **common)}
    for name, oracle in found.items():
        for step, num_ranks in enumerate(ranks_of_step):
            oracle.step(mean_gradient(name, params[name].shape, step, num_ranks))
    return {name: torch.from_numpy(oracle.w).float() for name, oracle in found.items()}


class TestPreconditioned(DistributedTest):
    @pytest.fixture
    def runs(self, class_tmpdir):
        """Checkpoints after half of the steps, in folders that are called as the number of ranks that saved them."""
        return made_once(class_tmpdir / "runs", [1, 2, 4], self.save)

    def save(self, folder):
        engine = train_engine(start(Net(), config(layerwise={"save_universal": True})), STEPS // 2)
        folder = folder / str(engine.world_size)
        engine.save_checkpoint(folder, tag="regular")
        expected = whole_states(engine)
        if engine.global_rank == 0:
            torch.save(expected, folder / "expected.pt")

    @pytest.mark.world_size([1, 2, 4])
    def test_twenty_steps_resumed_in_the_middle_at_another_number_of_ranks(self, runs):
        engine = start(Net(), config(stage=1 + (dist.get_world_size() == 2), layerwise={"layout": "lpt"},
                                     bucket_numel=10**5))
        # Each from another, and one from the universal format.
        saved_by, tag = {1: (4, "regular"), 2: (1, "regular_universal"), 4: (2, "regular")}[engine.world_size]
        train_engine(engine, 1, first=40)
        engine.load_checkpoint(runs / str(saved_by), tag=tag)
        assert_equal_states(whole_states(engine), torch.load(runs / str(saved_by) / "expected.pt"))
        train_engine(engine, STEPS // 2, first=STEPS // 2)
        ranks_of_step = [saved_by] * (STEPS // 2) + [engine.world_size] * (STEPS // 2)
        found = masters(engine)
        for expected, bound in ((by_the_rules(ranks_of_step), 1e-5), (by_the_oracle(ranks_of_step), 1e-4)):
            assert_close({name: found[name] for name in expected}, expected, rtol=bound, atol=bound)

    @pytest.mark.world_size(2)
    def test_muon_goes_on_from_the_average_of_soap(self, runs, tmp_path):
        muon = start(Net(), ds_config(layerwise={"on_optimizer_change": "keep_shared"}))
        muon.load_checkpoint(runs / "4", tag="regular")
        saved, found = torch.load(runs / "4" / "expected.pt"), whole_states(muon)
        for name in MATRICES.keys() & {name for name, _ in found}:
            assert torch.equal(found[name, "momentum_buffer"].flatten(), saved[name, "exp_avg"].flatten()), name
            assert "muon now; momentum_buffer goes on" in muon.optimizer.fresh_states[name] or name == "flat.weight"
        with pytest.raises(LayerWiseError, match="was updated by (kl_)?(soap|shampoo) .*this run updates it by muon"):
            start(Net(), ds_config()).load_checkpoint(runs / "4", tag="regular")

    @pytest.mark.world_size(2)
    def test_a_matrix_without_eigenvectors_is_named_on_all_ranks(self, monkeypatch, tmp_path):
        engine = train_engine(start(Net(), config([], {**PARAMS, "precondition_frequency": 1})), 1)
        engine.save_checkpoint(tmp_path)
        mine = {piece.name for piece in internals.pieces(engine)} & MATRICES.keys()

        def fails(matrix):
            raise kronecker.LinAlgError("no")

        with monkeypatch.context() as patch:
            if engine.global_rank == 1:
                patch.setattr(torch.linalg, "qr", fails)
                with pytest.raises(StepError, match=f"({'|'.join(mine)}): soap finds no eigenvectors of .*step 2 .no"):
                    train_engine(engine, 1, first=1)
            else:
                train_engine(engine, 1, first=1)
        with pytest.raises(LayerWiseError, match="the update of step 2 was interrupted by StepError: "
                                                     ".*soap finds no eig"):
            train_engine(engine, 1, first=2)
        engine.load_checkpoint(tmp_path)
        train_engine(engine, 2, first=1)

    @pytest.mark.world_size(1)
    def test_rates_of_another_size_are_asked_for(self):
        with pytest.raises(RoutingError, match="sets optimizer for square.weight: soap .*run's muon, that of Ad"):
            start(Net(), ds_config(layerwise={"overrides": [{"name": "square.weight", "optimizer": "soap"}]}))
        with pytest.raises(RoutingError, match="sets grafting for square.weight: shampoo .*run's soap, that of Muo"):
            start(Net(), config([{"name": "square.weight", "optimizer": "shampoo", "grafting": "none"}]))
        with pytest.raises(RoutingError, match=r"flat.weight \(12, 40\) has no side of at most max_side 11, so that"):
            start(Net(), config([{"name": "flat.weight", "max_side": 11}]))
        text = " ".join(start(Net(), config()).optimizer.describe().split())
        assert "soap: betas [0.9, 0.95], eps 1e-06, shampoo_beta 0.95, bases by qr every 3 steps, RMS up to 1" in text
