"""Parameters that a user freezes, replaces, adds and takes out between steps are trained as meant, or an error."""


import deepspeed.comm as dist
import pytest
import torch
from deepspeed.utils import logger
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import ds_layerwise
from ds_layerwise.errors import StepError
from tests.support.expected import assert_trained_as, oracle_step, start_oracle
from tests.support.harness import DistributedTest
from tests.support.reference import whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, raises_on_rank_1, relative_error, start, start_adamw, train_engine

pytestmark = rooms("param_guard", "param_owner")


def start_on(params, module, config):
    return ds_layerwise.initialize(model=module, model_parameters=params, config=config)[0]


class TestFreezing(DistributedTest):
    @pytest.mark.parametrize("stage, gas, overlap", [(1, 1, True), (1, 2, False), (2, 2, True)])
    def test_frozen_parameters_stay_as_they_are(self, stage, gas, overlap):
        """Neither weight decay nor momentum moves them, as with torch's optimizers."""
        engine, oracle = start(Net(), ds_config(stage=stage, gas=gas, overlap=overlap)), start_oracle(Net(), gas=gas)
        alone, frozen = start_oracle(Net(), gas=gas), ("square.weight", "experts", "norm.bias")
        for step in range(6):
            now = frozen if step in (2, 3) else ()
            for name in frozen:
                engine.module.get_parameter(name).requires_grad_(not now)
            train_engine(engine, 1, gas=gas, first=step)
            oracle_step(oracle, step, gas=gas, frozen=now)
            if not now:
                oracle_step(alone, step, gas=gas)
            # A frozen parameter counts its own steps.
            assert relative_error(engine.module.norm.bias.detach(), alone.params["norm.bias"]) < 1e-5
            for name in frozen:
                engine.module.get_parameter(name).requires_grad_()
            assert_trained_as(engine.module, oracle, but=("norm.bias", ))

    @pytest.mark.parametrize("grouped", [True, False])
    def test_unfreezing_a_parameter_that_was_frozen_at_the_start_is_an_error(self, stage, grouped):
        """Some scripts leave out of their groups what is frozen. A single rank unfreezes; frozen again it goes on."""
        module, oracle = Net(frozen=True), start_oracle(Net(frozen=True))
        before = {name: module.get_parameter(name).detach().clone() for name in ("tall.weight", "norm.bias")}
        given = [p for p in module.parameters() if p.requires_grad or grouped]
        engine = start_on(given, module, ds_config(stage=stage))
        for step, name in enumerate(before):
            module.get_parameter(name).requires_grad_(dist.get_rank() == 1)
            engine.backward(engine((step, 0, dist.get_rank())))
            with raises_on_rank_1(StepError, f"{name} requires a gradient .* it was frozen when this engine was made"):
                engine.step()
            module.get_parameter(name).requires_grad_(False)
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(module, oracle)
        assert all(torch.equal(module.get_parameter(name), value) for name, value in before.items())

    def test_parameters_that_the_user_has_left_out_stay_the_users(self):
        module, oracle = Net(), start_oracle(Net())
        before = module.tall.weight.detach().clone()
        engine = start_on([p for p in module.parameters() if p is not module.tall.weight], module, ds_config())
        for step in range(4):
            module.tall.weight.requires_grad_(step != 1)
            train_engine(engine, 1, first=step)
            oracle_step(oracle, step)
        module.tall.weight.requires_grad_(False)
        assert_trained_as(module, oracle)
        assert torch.equal(module.tall.weight, before)

    @pytest.mark.parametrize("start_other", [lambda module: start(module, ds_config()), start_adamw],
                             ids=["ours", "stock"])
    def test_parameters_of_another_engine_are_its_own(self, start_other):
        """A discriminator inside of a generator, each with an engine, the second one made later."""
        both = nn.ModuleDict({"one": Net(), "other": Net()})
        both["other"].requires_grad_(False)
        engine, oracle = start_on([*both["one"].parameters()], both, ds_config()), start_oracle(Net())
        both["other"].requires_grad_(True)
        other = start_other(both["other"])
        for step in range(2):
            train_engine(other, 1, first=step)
            engine.backward(both["one"]((step, 0, dist.get_rank())))
            engine.step()
            oracle_step(oracle, step)
        assert_trained_as(both["one"], oracle)


def recast(engine):
    engine.module.square.to(torch.float64)


def move(engine):
    engine.module.tall.weight.data = engine.module.tall.weight.data.clone()


def assign(engine):
    state = {name: p.detach().clone() for name, p in engine.module.state_dict().items()}
    engine.module.load_state_dict(state, assign=True)


def give_a_gradient(engine):
    engine.module.experts.grad = torch.ones_like(engine.module.experts)


class TestReplaced(DistributedTest):
    def test_replaced_parameters_and_gradients_are_errors(self, stage):
        for change, message in ((recast, "square.weight was replaced since"), (move, "tall.weight was replaced since"),
                                (assign, "experts was replaced since"),
                                (give_a_gradient, "experts.grad was set after the gradients were reduced")):
            engine = train_engine(start(Net(tied=True), ds_config(stage=stage)), 1)
            engine.backward(engine((1, 0, dist.get_rank())))
            change(engine)
            with pytest.raises(StepError, match=message):
                engine.step()
            engine.destroy()


def new_head(engine):
    engine.module.twin = nn.Linear(12, 12, bias=False)


def new_layer(engine):
    engine.module.flat.more = nn.Linear(3, 3)


def new_parameter(engine):
    engine.module.square.scale = nn.Parameter(torch.ones(12))


def untie(engine):
    engine.module.head = nn.Linear(12, 17, bias=False)


def factors(engine):
    parametrizations.weight_norm(engine.module.flat)


def freeze_in_its_place(engine):
    engine.module.tall = nn.Linear(12, 40).requires_grad_(False)


ADDED = "requires a gradient but has no optimizer, because it was added after"
CONTENTS = {new_head: "twin.weight was replaced since", new_layer: f"flat.more.weight {ADDED}",
            new_parameter: f"square.scale {ADDED}", untie: "head.weight was replaced since",
            factors: f"flat.parametrizations.weight.original0 {ADDED}",
            freeze_in_its_place: "tall.weight was replaced since"}


class Steady(nn.Module):
    """Reaches its parameters by the names that they had at the start, wherever they are by now."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.named = [dict(self.net.named_parameters())]

    def forward(self, place):
        return sum((p * whole_number_gradients(name, p.shape, *place)).sum() for name, p in self.named[0].items())


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers, self.first = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3)), 0
        self.all = [list(self.layers)]

    def forward(self, x):
        for layer in self.layers[self.first:]:
            x = layer(x)
        return x


class TestContents(DistributedTest):
    """Modules that come, go and move in a model that is trained."""

    @pytest.mark.parametrize("change", CONTENTS, ids=lambda change: change.__name__)
    def test_contents_that_nobody_would_train_are_an_error_until_undone(self, change):
        module, oracle = Net(tied=True), start_oracle(Net(tied=True))
        engine = start(module, ds_config())
        modules, params = dict(module._modules), dict(module.square._parameters)
        engine.backward(engine((0, 0, dist.get_rank())))
        change(engine)
        for _ in range(2):
            with pytest.raises(StepError, match=CONTENTS[change]):
                engine.step()
        if change is factors:
            return
        module._modules.update(modules)
        module.square._parameters.pop("scale", None)
        assert module.square._parameters == params
        module.flat._modules.clear()
        engine.step()
        oracle_step(oracle, 0)
        assert_trained_as(module, oracle)

    def test_modules_taken_out_count_as_unused_which_is_said_once(self, monkeypatch):
        warned, oracle, gone = [], start_oracle(Net()), ("tall.weight", "tall.bias")
        monkeypatch.setattr(logger, "warning", warned.append)
        engine = start(Net(), ds_config())
        tall = engine.module.tall
        for step, there in enumerate((True, False, False, True)):
            if there:
                engine.module.tall = tall
            else:
                engine.module._modules.pop("tall", None)
            train_engine(engine, 1, first=step)
            oracle.step([[{name: whole_number_gradients(name, p.shape, step, 0, rank)
                           for name, p in oracle.params.items() if there or name not in gone}] for rank in range(2)])
        assert_trained_as(engine.module, oracle)
        told = ("ds_layerwise: tall.weight, tall.bias got no gradient, and is in no module of the model any more: it "
                "counts as unused, with a gradient of zeros; freeze it to leave it unchanged")
        assert [text for text in warned if "no module" in text] == [told] * (dist.get_rank() == 0)

    def test_steps_that_leave_out_layers_by_taking_them_out(self):
        def passed_over(module, step):
            module.first = step % 2

        def taken_out(module, step):
            module.layers = nn.ModuleList(module.all[0][step % 2:])

        modules = []
        for change in (passed_over, taken_out):
            modules.append(Layered())
            engine = start(modules[-1], ds_config())
            for step in range(4):
                change(modules[-1], step)
                engine.backward(engine(torch.ones(2, 6) + dist.get_rank()).square().mean())
                engine.step()
        for one, other in zip(*(module.all[0] for module in modules), strict=True):
            assert torch.equal(one.weight, other.weight)

    @pytest.mark.parametrize("how", ["checkpoint", "one file"])
    def test_weights_that_would_be_saved_by_the_name_of_others_are_refused(self, how, tmp_path):
        engine = start(Layered(), ds_config())
        save = engine.save_checkpoint if how == "checkpoint" else (
            lambda folder: engine.optimizer.save_state_dict_to_file(folder / "file"))
        layers, one, other = engine.module.layers, *engine.module.all[0][:2]
        engine.module.layers = nn.ModuleList(engine.module.all[0][1:])
        with pytest.raises(StepError, match="layers.0.weight is another parameter than when .*; put it back for the "):
            save(tmp_path)
        dist.barrier()
        assert not list(tmp_path.iterdir())
        engine.module.layers, own = layers, other.weight
        other.weight = one.weight
        with pytest.raises(StepError, match="layers.1.weight is another parameter than when"):
            save(tmp_path)
        other.weight = own
        save(tmp_path)

    def test_changes_that_train_the_same_go_on(self):
        module, oracle = Steady(), start_oracle(Net())
        engine, net = start_on([*module.parameters()], module, ds_config()), module.net

        def freeze_a_new_one():
            net.adapter = nn.Linear(3, 3).requires_grad_(False)

        def hide():
            tall = net.tall
            net.tall = nn.Identity()
            net.tall.forward = lambda x: tall(x)

        changes = (lambda: setattr(net, "twin", torch.compile(net.twin, backend="eager")),
                   lambda: parametrize.register_parametrization(net.square, "weight", Doubled()),
                   lambda: prune.identity(net.flat, "weight"),
                   lambda: setattr(net, "conv", nn.Sequential(net.conv)), freeze_a_new_one, hide,
                   lambda: net.head.register_forward_hook(lambda *_: None), net.head.compile)
        for step, change in enumerate(changes):
            change()
            engine.backward(engine((step, 0, dist.get_rank())))
            engine.step()
            oracle_step(oracle, step)
        assert len(list(module.parameters())) == len(oracle.params)  # tall's two are out, the adapter's are in
        for name, value in oracle.params.items():
            assert relative_error(module.named[0][name].detach(), value) < 1e-5, name
        # Parameters that came later are watched, too.
        net.adapter.requires_grad_(True)
        engine.backward(engine((len(changes), 0, dist.get_rank())))
        with pytest.raises(StepError, match=f"net.adapter.weight {ADDED} this engine was made; "):
            engine.step()
