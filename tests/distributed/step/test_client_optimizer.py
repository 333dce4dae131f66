"""Optimizers that a script gives to ``initialize``: against the same object in one process."""

import copy

import deepspeed.comm as dist
import pytest
import torch
from pytorch_optimizer import CAME, MARS, SOAP, Lookahead, ScheduleFreeAdamW, Shampoo
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Muon, NAdam
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

import ds_layerwise
from ds_layerwise.checkpoint import record
from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.plan.forecast.report import as_json
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, loaded, masters, whole_states
from tests.support.expected import assert_close, mean_gradient
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import ON_HOST, Net, ds_config, train_engine, train_engines
from tests.support.versions import needs

pytestmark = rooms("client_groups", "any_torch", "engine_hooks")

STEPS = 6
MATRIX_NAMES = ("square.weight", "tall.weight", "flat.weight", "twin.weight")


def config(*, split="whole", layerwise=None, **changes):
    given = ds_config(layerwise={"client_optimizer": {"split": split}, **(layerwise or {})}, **changes)
    del given["optimizer"]
    return given


def start(module, optimizer, given=None, **kwargs):
    kwargs.setdefault("model_parameters", list(module.parameters()))
    engine, *_ = ds_layerwise.initialize(model=module, optimizer=optimizer, config=given or config(), **kwargs)
    return engine


def matrices(module):
    return [p for name, p in trainable(module).items() if name in MATRIX_NAMES]


def two_groups(module):
    """Groups of which the second has no weight decay, and another rate."""
    named = trainable(module)
    return [{"params": [p for p in named.values() if p.dim() > 1]},
            {"params": [p for p in named.values() if p.dim() < 2], "lr": 0.004, "weight_decay": 0.0}]


#: Functions that make objects of parameters or groups.
MADE = {
    "Muon": lambda params: Muon(params, lr=0.02, weight_decay=0.1, ns_steps=4),
    "Adafactor": lambda params: Adafactor(params, lr=0.02, beta2_decay=-0.7),
    "AdamW": lambda params: AdamW(params, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1),
    "SOAP": lambda params: SOAP(params, lr=0.02, weight_decay=0.1, precondition_frequency=2),
    "CAME": lambda params: CAME(params, lr=0.02),
    "MARS": lambda params: MARS(params, lr=0.02),
    "Shampoo": lambda params: Shampoo(params, lr=0.02, preconditioning_compute_steps=2),
    "NAdam": lambda params: NAdam(params, lr=0.02),
    # Its constructor makes states, at step 0.
    "Adagrad": lambda params: Adagrad(params, lr=0.02, initial_accumulator_value=0.5),
    "fused": lambda params: AdamW(params, lr=0.02, fused=True),
    "a tensor for a rate": lambda params: AdamW(params, lr=torch.tensor(0.02), foreach=False),
}
#: Functions that choose what is trained, where not all in two groups. Muon takes matrices alone: others are frozen.
TRAINED = {"Muon": matrices, "a tensor for a rate": lambda m: list(m.parameters())}
#: Given as functions.
FUNCTIONS = ("Adafactor", "CAME")
NEW_ADAGRAD = needs("torch>=2.13", "its Adagrad makes states when it is made, not in its first step")
ALWAYS = ("Muon", "Adafactor", "SOAP", "Adagrad", "a tensor for a rate")


def groups(kind, module):
    return TRAINED.get(kind, two_groups)(module)


def made(kind):
    return lambda module: MADE[kind](groups(kind, module))


def start_kind(kind, module, given=None, **kwargs):
    if kind in FUNCTIONS:
        return start(module, MADE[kind], given, model_parameters=groups(kind, module), **kwargs)
    return start(module, made(kind)(module), given, **kwargs)


def in_one_process(make, steps, ranks, *, before_step=lambda optimizer, step: None, after=lambda optimizer: None,
                   clip=None):
    """The weights that the object makes by itself, without engine or ranks."""
    module = Net()
    optimizer = make(module)
    schedule = after(optimizer)
    for step in range(steps):
        before_step(optimizer, step)
        for name, param in trainable(module).items():
            param.grad = mean_gradient(name, param.shape, step, ranks)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return {name: param.detach() for name, param in trainable(module).items()}


class TestAgainstOneProcess(DistributedTest):

    @pytest.mark.world_size([2, 3])
    @pytest.mark.parametrize("kind", [
        pytest.param(kind, marks=[*[pytest.mark.thorough] * (kind not in ALWAYS), *[NEW_ADAGRAD] * (kind == "Adagrad")])
        for kind in MADE])
    def test_it_trains_as_alone_and_resumes(self, kind, tmp_path):
        module = Net()
        engine = start_kind(kind, module)
        train_engine(engine, STEPS // 2)
        planned = as_json(engine.optimizer.forecast())["memory_bytes"][engine.global_rank]["states"]
        found = internals.bytes_of_states(engine)
        assert found <= planned <= 1.02 * found + 4 * len(internals.states(engine))
        engine.save_checkpoint(tmp_path)
        other = Net()
        resumed = loaded(start_kind(kind, other, config(stage=2, bucket_numel=10**6)), tmp_path)
        assert_equal_states(whole_states(resumed), whole_states(engine))
        expected = in_one_process(made(kind), STEPS, dist.get_world_size())
        for each in (engine, resumed):
            train_engine(each, STEPS - STEPS // 2, first=STEPS // 2)
            assert_close(masters(each), expected)
        if kind == "Muon":
            frozen = {name: p for name, p in Net().named_parameters() if name not in MATRIX_NAMES}
            for name, param in engine.module.named_parameters():
                assert name in MATRIX_NAMES or torch.equal(param, frozen[name]), name

    def test_a_cycle_that_moves_betas_too_with_either_split(self):
        def cycle(optimizer):
            return OneCycleLR(optimizer, max_lr=[0.03, 0.01], total_steps=STEPS + 3, base_momentum=0.7)

        expected = in_one_process(made("AdamW"), STEPS, 2, after=cycle)
        for split in ("element", "whole"):
            module = Net()
            optimizer = made("AdamW")(module)
            engine = start(module, optimizer, config(split=split), lr_scheduler=cycle(optimizer))
            train_engine(engine, STEPS)
            assert_close(masters(engine), expected)
            cut = [name for name, route in engine.optimizer.routes.items() if not route.whole]
            assert sorted(cut) == (sorted(trainable(Net())) if split == "element" else [])
            assert engine.optimizer.param_groups is optimizer.param_groups

    @pytest.mark.parametrize("how", ["object before", "object after", "callable", "section", "section of torch",
                                     "by hand"])
    def test_schedules_move_what_the_script_holds(self, how):
        rates = [1.0, 0.5, 0.25, 2.0, 1.0, 0.5, 0.25]

        def schedule(optimizer):
            return LambdaLR(optimizer, rates.__getitem__)

        module, given, kwargs = Net(), config(clip=0.0), {}
        optimizer = made("AdamW")(module)
        if how == "object before":
            kwargs["lr_scheduler"] = schedule(optimizer)
        elif how == "callable":
            kwargs["lr_scheduler"] = schedule
        elif how == "section":
            given["scheduler"] = {"type": "WarmupLR", "params": {
                "warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}}
        elif how == "section of torch":
            given["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
            rates = [1.0, 0.5, 0.25, 0.125]
        engine = start(module, optimizer, given, **kwargs)
        after, found = (schedule(optimizer) if how == "object after" else None), []
        for step in range(4):
            if how == "by hand":
                for group, lr in zip(optimizer.param_groups, (0.02, 0.004), strict=True):
                    group.update(lr=lr * rates[step], betas=(0.5 + step / 10, 0.9))
            found.append([dict(group) for group in optimizer.param_groups])
            train_engine(engine, 1, first=step)
            if after:
                after.step()

        def as_found(alone, step):
            for group, said in zip(alone.param_groups, found[step], strict=True):
                group.update({key: said[key] for key in ("lr", "betas", "weight_decay")})

        assert_close(masters(engine), in_one_process(made("AdamW"), 4, 2, before_step=as_found))
        if how != "section":
            assert [group["lr"] for group, _ in found] == [0.02 * rate for rate in rates[:4]]
        else:
            assert found[0][0]["lr"] == 0 < found[2][0]["lr"] < found[3][0]["lr"] < 0.02

    @pytest.mark.parametrize("changes", [
        ON_HOST, {"stage": 2, "bf16": {"enabled": True}}], ids=["host", "bf16"])
    def test_the_host_and_half_precision(self, changes, tmp_path):
        module, plain = Net(), Net()
        engine = start_kind("SOAP", module, config(**changes))
        other = start_kind("SOAP", plain, config(**({"bf16": changes["bf16"]} if "bf16" in changes else {})))
        train_engines((engine, other), STEPS)
        assert_equal_states(whole_states(engine), whole_states(other))
        assert all(value.dtype == torch.float32 for value in masters(engine).values())

    def test_overrides_and_groups_of_two_kinds(self):
        """A group may be cut by element beside others that are whole; overrides set rates and weight decay."""
        def make(module):
            first, second = two_groups(module)
            return AdamW([first, {**second, "split": "element"}], lr=0.02, weight_decay=0.1)

        def alone(module):
            named = trainable(module)
            return AdamW([
                {"params": [p for name, p in named.items() if p.dim() > 1 and name != "tall.weight"]},
                {"params": [p for p in named.values() if p.dim() < 2], "lr": 0.004, "weight_decay": 0.0},
                {"params": [named["tall.weight"]], "lr": 0.01, "weight_decay": 0.5}], lr=0.02, weight_decay=0.1)

        module = Net()
        engine = start(module, make(module), config(layerwise={"overrides": [
            {"name": "tall.weight", "lr_scale": 0.5, "weight_decay": 0.5}]}))
        train_engine(engine, STEPS)
        assert_close(masters(engine), in_one_process(alone, STEPS, 2))
        assert {name for name, route in engine.optimizer.routes.items() if not route.whole} == {
            name for name, p in trainable(Net()).items() if p.dim() < 2}
        assert "torch.optim:AdamW: betas (0.9, 0.999), eps 1e-08, decoupled_weight_decay True" in " ".join(
            engine.optimizer.describe().split())

    def test_a_checkpoint_goes_on_with_its_own_rates_or_the_configs(self, tmp_path):
        """States belong to the class, however it was given."""
        module = Net()
        engine = train_engine(start(module, Adafactor(module.parameters(), lr=0.02)), 2)
        engine.save_checkpoint(tmp_path)
        again = Net()
        changed = start(again, Adafactor(again.parameters(), lr=0.01), config(
            layerwise={"on_hyper_change": "config"}))
        changed.load_checkpoint(tmp_path)
        assert changed.optimizer.param_groups[0]["lr"] == 0.01 and changed.optimizer.step_count == 2
        assert_equal_states(whole_states(changed), whole_states(engine))
        third = Net()
        kept = loaded(start(third, Adafactor(third.parameters(), lr=0.01)), tmp_path)
        assert kept.optimizer.param_groups[0]["lr"] == 0.02

    @pytest.mark.parametrize("spelled", [
        "torch.optim.adamw:AdamW", pytest.param("torch.optim:AdamW", marks=pytest.mark.thorough), "object"])
    def test_a_class_goes_on_under_all_of_its_paths(self, spelled, tmp_path, monkeypatch):
        """The class is found also where a version wrote the path as the config had spelled it."""
        def engine_of(path):
            if path == "object":
                module = Net()
                return start(module, AdamW(module.parameters(), lr=0.003), config(
                    split="element", layerwise={"save_universal": True}))
            params = {"matrix_optimizer": path, "scalar_optimizer": path, "lr": 0.003}
            given = {**ds_config(layerwise={"save_universal": True}),
                     "optimizer": {"type": "LayerWise", "params": params}}
            return ds_layerwise.initialize(model=(module := Net()), model_parameters=list(module.parameters()),
                                           config=given)[0]

        engine = engine_of(spelled)
        train_engine(engine, 2)
        engine.save_checkpoint(tmp_path, tag="now")
        with monkeypatch.context() as patch:
            patch.setattr(record, "family_at", lambda path: path)
            engine.save_checkpoint(tmp_path, tag="before")
        expected = whole_states(engine)
        for path in ("torch.optim:AdamW", "torch.optim.adamw:AdamW", "object"):
            resumed = engine_of(path)
            for tag in ("now", "before", "now_universal"):
                resumed.load_checkpoint(tmp_path, tag=tag)
                assert_equal_states(whole_states(resumed), expected, (path, tag))
                assert not resumed.optimizer.fresh_states
                train_engine(resumed, 1, first=7)
            resumed.destroy()


class Counts(SGD):
    """Counts where no checkpoint looks."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.turns = 0

    def step(self, closure=None):
        self.turns += 1
        super().step()


def stepped(optimizer, module):
    """An object with the states of a step, as after a load of its own."""
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def hooked(optimizer):
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_step(optimizer):
    optimizer.step = lambda closure=None: None
    return optimizer


REFUSED = {
    "a wrapper": (lambda m: Lookahead(SGD(m.parameters(), lr=0.1)), {}, "Lookahead keeps .*optimizer .SGD.*inside, if"),
    "a closure": (lambda m: torch.optim.LBFGS(m.parameters()), {}, "LBFGS keeps _params .list.*name the class"),
    "a count of its own": (lambda m: Counts(m.parameters(), 0.1), {}, r"Counts goes on from optimizer\.turns"),
    "rates of all groups": (lambda m: lambda params: ScheduleFreeAdamW(params, lr=0.1), {}, "keeps base_lrs .list"),
    "a wrapper that a function makes": (lambda m: lambda params: Lookahead(SGD(params, lr=0.1, momentum=0.9)), {},
                                        "Lookahead"),
    "hooks": (lambda m: hooked(SGD(m.parameters(), lr=0.1)), {}, "register_step_pre_hook"),
    "a step of the script": (lambda m: with_step(SGD(m.parameters(), lr=0.1)), {}, "SGD keeps step .function"),
    "states": (lambda m: stepped(AdamW(m.parameters(), lr=0.1), m), {},
               "AdamW has states already.*without states.*safe_set_full_optimizer_state"),
    "no rate": (lambda m: SGD([{"params": m.parameters(), "lr": None}], lr=0.1), {}, "lr of .* is None"),
    "a group's split": (lambda m: SGD([{"params": m.parameters(), "split": "elements"}], lr=0.1), {},
                        "split must be one of 'whole', 'element', got 'elements'"),
    "a function in a group": (lambda m: SGD([{"params": m.parameters(), "turn": len}], lr=0.1), {},
                              "param_groups.0..turn is a builtins.builtin_function_or_method, which a checkpoint"),
    "no optimizer": (lambda m: lambda params: "SGD", {}, "must be a torch.optim.Optimizer, .*got builtins.str"),
    "an override": (lambda m: SGD(m.parameters(), lr=0.1), {"layerwise": {
        "overrides": [{"name": "embed.*", "optimizer": "adamw"}]}}, "sets optimizer for embed.weight.*can set lr"),
    "a rate of embeddings": (lambda m: SGD(m.parameters(), lr=0.1), {"layerwise": {"decoupled_lr": 0.1}},
                             "layerwise.decoupled_lr has no effect with an optimizer passed to"),
    "another's parameter": (lambda m: SGD([*m.parameters(), nn.Parameter(torch.ones(3))], lr=0.1), {},
                            "the model does not have"),
    "two optimizers": (lambda m: SGD(m.parameters(), lr=0.1), {"optimizer": {"type": "LayerWiseMuon"}},
                       "given twice"),
    "no optimizer at all": (lambda m: None, {}, "or an optimizer given to initialize"),
    "a misspelt split": (lambda m: SGD(m.parameters(), lr=0.1), {"split": "rows"},
                         "layerwise.client_optimizer.split must be one of 'whole', 'element', got 'rows'"),
}


class TestRefusals(DistributedTest):
    def test_optimizers_that_cannot_be_right_are_refused(self):
        for what, (make, changes, message) in REFUSED.items():
            module, given = Net(), {**config(**{k: v for k, v in changes.items() if k != "optimizer"})}
            if "optimizer" in changes:
                given["optimizer"] = changes["optimizer"]
            with pytest.raises(LayerWiseError, match=message):
                start(module, make(module), given)
                pytest.fail(what)

    def test_states_on_one_rank_alone_are_refused_on_all(self):
        module = Net()
        optimizer = AdamW(module.parameters(), lr=0.0)
        if dist.get_rank():
            stepped(optimizer, module)
        with pytest.raises(LayerWiseError, match="has states already"):
            start(module, optimizer)

    def test_states_that_are_asked_for_and_empty_are_none(self):
        module = Net()
        optimizer = AdamW(module.parameters(), lr=0.02)
        assert not optimizer.state[module.experts]
        train_engine(start(module, optimizer), 1)

    def test_groups_of_another_class_do_not_go_on(self, tmp_path, capsys):
        module, again = Net(), Net()
        engine = train_engine(start(module, AdamW(module.parameters(), lr=0.02)), 2)
        engine.save_checkpoint(tmp_path)
        momentum = SGD(again.parameters(), lr=0.005, momentum=0.9)
        said = {key: value for key, value in momentum.param_groups[0].items() if key != "params"}
        _changed = loaded(start(again, momentum, config(layerwise={"on_optimizer_change": "reset"})), tmp_path)
        assert {key: value for key, value in momentum.param_groups[0].items() if key != "params"} == said
        if dist.get_rank() == 0:
            assert "this run's values are used, because the saved run used torch.optim:AdamW (states exp_avg, " \
                "exp_avg_sq, step)" in capsys.readouterr().out
        third = Net()
        # The same class, with settings that no state of the checkpoint goes with.
        largest = start(third, AdamW(third.parameters(), lr=0.005, amsgrad=True), config(
            layerwise={"on_optimizer_change": "reset"}))
        largest.load_checkpoint(tmp_path)
        weights = {name: value.clone() for name, value in masters(largest).items()}
        train_engine(largest, 2)

        def alone(module):
            with torch.no_grad():
                for name, param in trainable(module).items():
                    param.copy_(weights[name])
            return AdamW(module.parameters(), lr=0.005, amsgrad=True)

        assert_close(masters(largest), in_one_process(alone, 2, 2))

    def test_calls_that_would_go_behind_the_engine_are_errors(self):
        module, plain = Net(), Net()
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        saved = copy.deepcopy(optimizer.state_dict())
        seen = []

        def hook(*_):
            with pytest.raises(StepError, match=r"save with engine\.save_checkpoint\(\)"):
                optimizer.state_dict()
            seen.append(len(seen))

        optimizer.register_step_post_hook(hook)
        engine = start(module, optimizer)
        for call in (optimizer.step, lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
                     lambda: optimizer.load_state_dict(saved), optimizer.state_dict,
                     lambda: copy.deepcopy(optimizer)):
            with pytest.raises(StepError, match="an engine trains with this"):
                call()
        train_engine(engine, 2)
        assert seen == [0, 1]
        with pytest.raises(LayerWiseError, match="given to another engine"):
            start(plain, optimizer)
