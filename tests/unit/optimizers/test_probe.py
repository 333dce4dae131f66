"""The states that a probe finds of a class, against those that the class keeps; and classes that are refused."""

import copy
import pickle
import random
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pytorch_optimizer import CAME, MADGRAD, SOAP, SPAM, AdaBound, DAdaptAdam, EmoNavi, Kron, ScheduleFreeRAdam, Shampoo
from torch.optim import Adafactor, AdamW, Optimizer

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.foreign.any_torch import AnyTorch
from ds_layerwise.optimizers.foreign.any_torch_recipe import is_path, recipe_of
from ds_layerwise.optimizers.foreign.probe import kept_of
from ds_layerwise.optimizers.recipe_registry import entry_of
from ds_layerwise.optimizers.rule import Hyper, UpdateError
from tests.support.rooms import rooms

pytestmark = rooms("probe", "probe_checks", "any_torch", "any_torch_recipe")

HYPER = Hyper(lr=0.01, weight_decay=0.0, momentum=0.9, betas=(0.9, 0.9), eps=1e-8)


class Looks(Optimizer):
    """Looks into its gradient, so that it cannot step without memory; and keeps sides of every kind."""

    def __init__(self, params, lr=1e-3, extra=None):
        super().__init__(params, {"lr": lr})
        self.extra = extra

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad.abs().sum().item() == 0:
                    continue
                state, (rows, cols) = self.state[param], param.shape
                if not state:
                    state.update(left=torch.zeros(rows, rows), flat=torch.zeros(rows * cols), four=torch.zeros(4, cols),
                                 half=torch.zeros(rows, dtype=torch.bfloat16), n=torch.zeros(3, dtype=torch.int64))
                    if self.extra == "half a side":
                        state["odd"] = torch.zeros(rows // 2)
                if self.extra == "late" and int(state["n"][0]) == 15:
                    state["late"] = torch.zeros(cols)
                state["n"] += 1
                state["left"].addmm_(param.grad, param.grad.mT)
                param.sub_(group["lr"] * param.grad)


def recipe(kind, **arguments):
    return recipe_of(f"{kind.__module__}:{kind.__name__}", whole=True)(matrix_params=arguments)


def really_kept(kind, shape, arguments, steps=3):
    """Tensors with axes that the class keeps, by the dotted way to them."""
    param = torch.zeros(shape)
    optimizer = kind([param], **arguments)
    for step in range(steps):
        param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    found = {}

    def put(where, value):
        if isinstance(value, dict):
            for key, each in value.items():
                put([*where, str(key)], each)
        elif isinstance(value, (list, tuple)):
            for key, each in enumerate(value):
                put([*where, str(key)], each)
        elif isinstance(value, torch.Tensor) and value.dim():
            found[".".join(where)] = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
    put([], optimizer.state[param])
    return found


@pytest.mark.parametrize("kind, arguments", [
    (AdamW, {}), (Adafactor, {}), (CAME, {}), (SOAP, {"max_precondition_dim": 60}), (Shampoo, {}), (Looks, {})],
    ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("shape", [(16, 24), (80, 96), (130, 40)])
def test_states_are_those_of_the_class(kind, arguments, shape):
    found = {key: (spec.shape, spec.dtype) for key, spec in recipe(kind, **arguments).states(shape).items()
             if spec.shape}
    assert found == really_kept(kind, shape, arguments)


@pytest.mark.parametrize("shape", [(64, 64, 3, 3), (40, 40, 40), (16, 16, 16, 3, 3), (5000,)], ids=str)
def test_states_of_large_parameters_of_any_number_of_axes(shape):
    found = {key: spec.shape for key, spec in recipe(AdamW).states(shape).items() if spec.shape}
    assert found == {"exp_avg": shape, "exp_avg_sq": shape}


@pytest.mark.parametrize("kind, arguments, message", [
    (Looks, {"lr": 0.1}, "is given lr"),
    (Looks, {"other": 0.1}, "cannot be made with .*other")])
def test_arguments_that_the_class_cannot_take_are_refused(kind, arguments, message):
    with pytest.raises(ConfigError, match=message):
        kept_of(recipe(kind, **arguments), (80, 96))


def test_a_side_that_does_not_follow_from_the_shape_is_an_error_at_the_first_step():
    rule = AnyTorch.of(recipe(Looks, extra="half a side"))
    param = torch.zeros(80, 96)
    with pytest.raises(StepError, match=r"keeps odd of a parameter of \(80, 96\) as \(40,\) in torch.float32 after 1 "
                       r"steps, and its probe said \(8,\)"):
        rule.update_([param], [torch.ones(80, 96)], [rule.init_state(param)], HYPER)


def test_a_state_that_comes_after_the_probe_is_an_error():
    rule = AnyTorch.of(recipe(Looks, extra="late"))
    params, grads = [torch.zeros(6, 10) for _ in range(2)], [torch.ones(6, 10) for _ in range(2)]
    states = [rule.init_state(param) for param in params]
    for _ in range(15):
        rule.update_(params[1:], grads[1:], states[1:], HYPER)
    with pytest.raises(UpdateError, match=r"Looks keeps late \(10,\) of .* \(6, 10\) after 16 steps") as caught:
        rule.update_(params, grads, states, HYPER)
    assert caught.value.index == 1


class Writes(AdamW):
    """Writes to the gradient."""

    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            param.grad.zero_()


def test_a_gradient_is_left_alone_and_the_state_lies_where_it_was():
    rule = AnyTorch.of(recipe(Writes))
    param, grad = torch.zeros(6, 10), torch.ones(6, 10)
    state = rule.init_state(param)
    places = {key: value.data_ptr() for key, value in state.items()}
    for _ in range(3):
        rule.update_([param], [grad], [state], HYPER)
    assert torch.equal(grad, torch.ones(6, 10)) and param.grad is None
    assert places == {key: value.data_ptr() for key, value in state.items()} and state["step"] == 3


def test_a_state_that_is_set_back_starts_anew():
    rule = AnyTorch.of(recipe(SOAP, precondition_frequency=2))
    grads = torch.randn(5, 6, 10, generator=torch.Generator().manual_seed(2))
    ends = []
    state = rule.init_state(torch.zeros(6, 10))
    for _ in range(2):
        param = torch.ones(6, 10)
        for value in state.values():
            value.zero_()
        for grad in grads:
            rule.update_([param], [grad], [state], HYPER)
        ends.append(param)
    assert torch.equal(*ends)


def test_recipes_of_one_path_are_equal():
    path = "torch.optim:AdamW"
    one, other = (entry_of(path, whole=True).recipe(matrix_params={"betas": [0.9, 0.8]}) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one.rule == path
    assert one != entry_of(path, whole=True).recipe() != entry_of(path, whole=False).recipe()
    # Stages of a pipeline send them to each other.
    for each in (one, entry_of(path, whole=False).recipe()):
        for sent in (pickle.loads(pickle.dumps(each)), copy.deepcopy(each)):
            assert sent == each and type(sent) is type(each) and sent.model_fields_set == each.model_fields_set


def test_arguments_are_what_ranks_can_compare():
    def arguments(value):
        return OptimizerConfig.from_section({"type": "LayerWise", "params": {
            "matrix_optimizer": "torch.optim:SGD", "matrix_params": {"momentum": value}}}).matrix.arguments["momentum"]

    for given, found in ((np.float64(0.5), 0.5), (torch.tensor(2), 2), (np.array([0.5, 1]), (0.5, 1.0)),
                         ([1, [None, "a"]], (1, (None, "a"))), (True, True)):
        assert repr(arguments(given)) == repr(found)
    for given in ({"a": 1}, {0.5}, [{"a": 1}], torch.float32, lambda: 3):
        with pytest.raises(ConfigError, match="optimizer.params: the argument momentum of a class is .*; arguments are "
                           "numbers, texts, true, false, null, and lists of them"):
            arguments(given)
    with pytest.raises(ConfigError, match="optimizer.params.matrix_params must be an object, got 3"):
        OptimizerConfig.from_section({"type": "LayerWise", "params": {"matrix_optimizer": "torch.optim:SGD",
                                                                      "matrix_params": 3}})


@pytest.mark.parametrize("text, yes", [
    ("torch.optim:AdamW", True), ("m:C", True), ("muon", False), ("a.b.C", False), ("a:b:c", False), (":C", False),
    ("a:", False), ("a/b:C", False), (3, False)])
def test_a_path_is_a_module_and_a_class(text, yes):
    assert is_path(text) is yes


# --- what cannot be run on parts of a model, or resumed --------------------------------------------------------------


class Hidden:
    """Shows nothing of what it has."""


class Elsewhere(Optimizer):
    """Keeps a number where nobody looks, or divides by what it was made with."""

    def __init__(self, params, lr=1e-3, where=""):
        super().__init__(params, {"lr": lr, "size": [0.0], "far": torch.zeros(2)})
        self.where, self.seen, self.all, self.made_with = where, 0.0, {"n": [torch.zeros(1)]}, lr
        self.space, self.hidden = SimpleNamespace(), Hidden()

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for param in group["params"]:
            size, before = float(param.grad.abs().mean()), 0.0
            if self.where == "attribute":
                before, self.seen = self.seen, size
            elif self.where == "tensor of an attribute":
                before = float(self.all["n"][0])
                self.all["n"][0].fill_(size)
            elif self.where == "list of a group":
                before, group["size"] = group["size"][0], [size]
            elif self.where == "tensor of a group":
                before = float(group["far"][1])
                group["far"][1] = size
            elif self.where == "state of all":
                before = self.state["all"].get("seen", 0.0)
                self.state["all"]["seen"] = size
            elif self.where in ("unseen", "namespace"):
                hidden = self.hidden if self.where == "unseen" else self.space
                before = vars(hidden).get(str(id(param)), 0.0)
                setattr(hidden, str(id(param)), size)
            rate = group["lr"] * (group["lr"] / self.made_with if self.where == "rate" else 1)
            param.sub_(rate * (1 + before) * param.grad)


@pytest.mark.parametrize("where, message", [
    ("attribute", r"goes on from optimizer.seen, and not from optimizer.state\[param\] alone"),
    ("tensor of an attribute", "goes on from optimizer.all, and"),
    ("namespace", "goes on from optimizer.space, and"),
    ("list of a group", r"goes on from optimizer.param_groups\[0\]\['size'\], and"),
    ("tensor of a group", r"goes on from optimizer.param_groups\[0\]\['far'\], and"),
    ("state of all", r"goes on from optimizer.state\['all'\], and"),
    ("unseen", r"does otherwise where each .* optimizer.state\[param\], as after a load, .* that it keeps elsewhere"),
    ("rate", "does otherwise where each .* more of the lr that it is made with than its parameter groups tell")])
def test_a_class_that_keeps_something_elsewhere_is_refused(where, message):
    AnyTorch.of(recipe(Elsewhere))
    with pytest.raises(ConfigError, match=f"Elsewhere {message}"):
        AnyTorch.of(recipe(Elsewhere, where=where))


@pytest.mark.parametrize("kind, message", [
    (MADGRAD, r"optimizer.state\['k'\]"), (SPAM, r"optimizer.state\['total_step'\]"),
    (EmoNavi, r"optimizer.state\['ema'\]"), (DAdaptAdam, "'numerator_weighted'"), (AdaBound, "more of the lr"),
    (ScheduleFreeRAdam, "does otherwise where each")], ids=lambda value: getattr(value, "__name__", ""))
def test_published_classes_that_keep_something_elsewhere_are_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        AnyTorch.of(recipe(kind))


class Counts(Optimizer):
    """Counts in a tensor on the device of the parameter, and keeps more of what is large."""

    def __init__(self, params, lr=1e-3, large=10**9):
        super().__init__(params, {"lr": lr, "large": large})

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for param in group["params"]:
            state = self.state[param]
            if not state:
                state.update(step=torch.zeros((), device=param.device), average=torch.zeros_like(param))
                if param.numel() > group["large"]:
                    state["more"] = torch.zeros_like(param)
            state["step"] += 1
            state["average"].lerp_(param.grad, 0.1)
            param.sub_(group["lr"] * state["average"] / (1 - 0.9 ** state["step"]))


def test_states_of_a_piece_do_not_depend_on_its_length():
    path = f"{Counts.__module__}:{Counts.__name__}"
    scalar = recipe_of(path, whole=False)()
    AnyTorch.of(scalar)
    for numel in (1, 60, 5000):
        assert {key: spec.shape for key, spec in scalar.states((numel,)).items()} == {
            "step": (), "average": (numel,)}
    with pytest.raises(ConfigError, match="Counts keeps more of a parameter of some sizes and not of others.*number of "
                       "ranks; use it as matrix_optimizer"):
        AnyTorch.of(recipe_of(path, whole=False)(scalar_params={"large": 3000}))


#: Noise for a parameter, by its source.
NOISE = {"nothing": lambda param: 0.0, "many": torch.rand_like, "torch": lambda param: float(torch.rand(())),
         "python": lambda param: random.random(), "numpy": lambda param: float(np.random.rand())}


class Later(Optimizer):
    """Lets a parameter know of those before it, and draws random numbers, if it shall."""

    def __init__(self, params, lr=1e-3, draws="nothing", mixes=True):
        super().__init__(params, {"lr": lr, "draws": draws, "mixes": mixes})

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        before = 0.0
        for param in group["params"]:
            param.sub_(group["lr"] * (param.grad + before + NOISE[group["draws"]](param)))
            before = before + param.grad.mean() if group["mixes"] else 0.0


def test_the_first_parameter_is_not_the_only_one_that_is_compared():
    AnyTorch.of(recipe(Later, mixes=False))
    with pytest.raises(ConfigError, match="Later does otherwise where each"):
        AnyTorch.of(recipe(Later))


@pytest.mark.parametrize("kind, arguments", [
    (Kron, {}), *((Later, {"draws": source, "mixes": False}) for source in ("many", "torch", "python", "numpy"))])
def test_a_class_that_draws_random_numbers_gets_matrices_alone(kind, arguments):
    AnyTorch.of(recipe(kind, **arguments))
    scalar = recipe_of(f"{kind.__module__}:{kind.__name__}", whole=False)(scalar_params=arguments)
    with pytest.raises(ConfigError, match=f"{kind.__name__} draws random numbers, .* on several ranks, .*use it as "
                       "matrix_optimizer"):
        AnyTorch.of(scalar)


def test_a_probe_takes_no_random_numbers_of_the_run():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    rule = AnyTorch.of(recipe(Later, draws="many", mixes=False))
    rule.init_state(torch.zeros(6, 10))
    assert torch.equal(torch.rand(4), expected)


class DrawsElsewhere(Optimizer):
    """Draws in its constructor, for its last parameter first, or from a generator of its own."""

    def __init__(self, params, lr=1e-3, where="constructor"):
        super().__init__(params, {"lr": lr})
        self.where, self.own = where, random.Random(42)
        if where == "constructor":
            torch.rand(())

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        number = self.own.random() if self.where == "own generator" else 1.0
        for param in group["params"][::-1 if self.where == "order" else 1]:
            param.sub_(group["lr"] * (param.grad + number * torch.rand_like(param)))


@pytest.mark.parametrize("where", ["constructor", "order", "own generator"])
def test_a_class_that_draws_elsewhere_is_told_so(where):
    """A matrix_optimizer may draw in step alone, for one parameter after another."""
    with pytest.raises(ConfigError, match="DrawsElsewhere does otherwise where each .*: it draws random numbers "
                       "elsewhere than in step, .* or from a generator of its own, or what it does depends on other"):
        AnyTorch.of(recipe(DrawsElsewhere, where=where))


class Half(torch.Tensor):
    """A tensor that is more than its elements."""


class Wraps(Optimizer):
    """Keeps a tensor of a class of its own of what is large."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for param in group["params"]:
            if not self.state[param]:
                average = torch.zeros_like(param)
                self.state[param]["average"] = average.as_subclass(Half) if param.numel() >= 5000 else average
            param.sub_(group["lr"] * param.grad)


def test_a_tensor_of_another_class_is_refused_at_the_size_that_has_it():
    """It would go on as a plain one."""
    assert recipe(Wraps).refusal((6, 10)) is None
    message = "keeps average of a parameter in a tensor of the class Half, which would come back as a plain one"
    assert message in recipe(Wraps).refusal((80, 96))
    with pytest.raises(ConfigError, match="keeps average of a parameter in a tensor of the class Half"):
        AnyTorch.of(recipe_of(f"{Wraps.__module__}:{Wraps.__name__}", whole=False)())


class KeepsParameters(Optimizer):
    """Keeps a slow copy of the weights, and a count, as parameters."""

    def __init__(self, params, lr=1e-3, of="parameter"):
        super().__init__(params, {"lr": lr})
        self.make = {"parameter": torch.nn.Parameter, "tensor": torch.clone}[of]

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for param in group["params"]:
            state = self.state[param]
            if not state:
                state.update(slow=self.make(param.clone()), step=self.make(torch.tensor(0.0)))
            state["step"] += 1
            state["slow"] = self.make(state["slow"].lerp(param, 0.5))
            param.sub_(group["lr"] * (param.grad + state["slow"] / state["step"]))


@pytest.mark.parametrize("shape", [(6, 10), (80, 96)])
def test_a_state_may_be_a_parameter(shape):
    grads = torch.randn(4, *shape, generator=torch.Generator().manual_seed(2))
    ends = []
    for kind in ("parameter", "tensor"):
        rule = AnyTorch.of(recipe(KeepsParameters, of=kind))
        param = torch.ones(shape)
        state = rule.init_state(param)
        for grad in grads:
            rule.update_([param], [grad], [state], HYPER)
        assert {key: (type(value), value.requires_grad) for key, value in state.items()} == {
            "slow": (torch.Tensor, False), "step": (torch.Tensor, False)}
        ends.append([param, state["slow"], state["step"]])
    assert all(map(torch.equal, *ends)) and ends[0][2] == 4


def test_nothing_that_a_step_works_on_is_kept():
    rule = AnyTorch.of(recipe(SOAP, precondition_frequency=2))
    state = rule.init_state(torch.zeros(6, 10))
    for _ in range(4):
        param, grad = torch.ones(6, 10), torch.ones(6, 10)
        lent = {key: value if key == "step" else value.clone() for key, value in state.items()}
        rule.update_([param], [grad], [lent], HYPER)
        gone = [weakref.ref(each) for each in (param, grad, *(value for key, value in lent.items() if key != "step"))]
        for key, value in state.items():
            value.copy_(lent[key])
        del param, grad, lent, value
        assert not any(each() is not None for each in gone)
