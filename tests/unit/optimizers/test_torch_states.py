"""The states that a class is asked for, against those that it keeps; and classes that are refused."""

import copy
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
from pytorch_optimizer import CAME, MADGRAD, SOAP, SPAM, DAdaptAdam, EmoNavi, Kron, ScheduleFreeRAdam, Shampoo
from torch.optim import Adafactor, AdamW, Optimizer

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.any_torch import is_path, recipe_of
from ds_layerwise.optimizers.recipe import Hyper, UpdateError
from ds_layerwise.optimizers.registry import recipe_at
from ds_layerwise.optimizers.torch_states import kept_of
from tests.support.rooms import rooms

pytestmark = rooms("any_torch", "torch_states")

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
    return recipe_of(f"{kind.__module__}:{kind.__name__}", for_matrices=True)(matrix_params=arguments)


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
    rule = recipe(Looks, extra="half a side")
    param = torch.zeros(80, 96)
    with pytest.raises(StepError, match=r"keeps odd of a parameter of \(80, 96\) after 1 steps as \(40,\) in "
                       r"torch.float32, and its first step said \(8,\)"):
        rule.update_([param], [torch.ones(80, 96)], [rule.init_state(param)], HYPER)


def test_a_state_that_comes_later_is_an_error():
    rule = recipe(Looks, extra="late")
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
    rule = recipe(Writes)
    param, grad = torch.zeros(6, 10), torch.ones(6, 10)
    state = rule.init_state(param)
    places = {key: value.data_ptr() for key, value in state.items()}
    for _ in range(3):
        rule.update_([param], [grad], [state], HYPER)
    assert torch.equal(grad, torch.ones(6, 10)) and param.grad is None
    assert places == {key: value.data_ptr() for key, value in state.items()} and state["step"] == 3


def test_a_state_that_is_set_back_starts_anew():
    rule = recipe(SOAP, precondition_frequency=2)
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
    one, other = (recipe_at(path, for_matrices=True)(matrix_params={"betas": [0.9, 0.8]}) for _ in range(2))
    assert one == other and hash(one) == hash(other) and one.rule == path
    assert one != recipe_at(path, for_matrices=True)() != recipe_at(path, for_matrices=False)()
    # Stages of a pipeline send them to each other.
    for each in (one, recipe_at(path, for_matrices=False)()):
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


class Elsewhere(Optimizer):
    """Keeps a number, or a tensor, beside the states of parameters."""

    def __init__(self, params, lr=1e-3, where=""):
        super().__init__(params, {"lr": lr, "size": [0.0], "far": torch.zeros(2)})
        self.where, self.seen, self.all = where, 0.0, {"n": [torch.zeros(1)]}

    @torch.no_grad()
    def step(self, closure=None):
        group, = self.param_groups
        for param in group["params"]:
            if self.where == "attribute":
                self.seen += 1.0
            elif self.where == "tensor of an attribute":
                self.all["n"][0].add_(1.0)
            elif self.where == "list of a group":
                group["size"] = [group["size"][0] + 1.0]
            elif self.where == "tensor of a group":
                group["far"] = group["far"] + 1.0
            elif self.where == "count of another name":
                group["turn"] = group.get("turn", 0) + 1
            elif self.where == "state of all":
                self.state["all"]["seen"] = 1.0
            param.sub_(group["lr"] * param.grad)


@pytest.mark.parametrize("where, place", [
    ("attribute", "optimizer.seen"), ("tensor of an attribute", "optimizer.all.n.0"),
    ("list of a group", r"optimizer.param_groups\[0\].size.0"),
    ("tensor of a group", r"optimizer.param_groups\[0\].far"),
    ("count of another name", r"optimizer.param_groups\[0\].turn"),
    ("state of all", r"optimizer.state\['all'\]")])
def test_a_class_that_keeps_something_elsewhere_is_refused(where, place):
    kept_of(recipe(Elsewhere), (6, 10))
    for shape in ((6, 10), (80, 96)):
        with pytest.raises(ConfigError, match=rf"Elsewhere goes on from {place}, and not from optimizer.state"):
            kept_of(recipe(Elsewhere, where=where), shape)


@pytest.mark.parametrize("kind, message", [
    (MADGRAD, r"optimizer.state\['k'\]"), (SPAM, r"optimizer.state\['total_step'\]"),
    (EmoNavi, r"optimizer.state\['ema'\]"), (DAdaptAdam, "numerator_weighted"), (Kron, "update_counter"),
    (ScheduleFreeRAdam, "lr_max")], ids=lambda value: getattr(value, "__name__", ""))
def test_published_classes_that_keep_something_elsewhere_are_refused(kind, message):
    with pytest.raises(ConfigError, match=message):
        kept_of(recipe(kind), (6, 10))


class Noise(Optimizer):
    """Draws random numbers of every kind."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(torch.rand_like(param, device="cpu").to(param.device) * random.random() * np.random.rand())


def test_no_random_numbers_of_the_run_are_taken():
    def drawn():
        return torch.rand(4).tolist(), random.random(), np.random.rand()

    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = drawn()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    kept_of(recipe(Noise), (6, 10))
    assert drawn() == expected


@pytest.mark.parametrize("for_matrices", [True, False])
def test_a_class_is_whole_unless_it_is_said_to_be_element_wise(for_matrices):
    kind = recipe_of("torch.optim:AdamW", for_matrices=for_matrices)
    given = {"split": "element", "eps": 0.1}
    cut = kind(**{kind.params_key: given})
    assert kind().whole and not cut.whole and cut.arguments == {"eps": 0.1}
    assert pickle.loads(pickle.dumps(cut)) == cut and cut.for_matrices is for_matrices
    with pytest.raises(ValueError, match="split of a class must be 'whole' or 'element', got 'rows'"):
        kind(**{kind.params_key: {"split": "rows"}})


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
    assert "keeps average of a parameter as Half, which is neither a plain tensor" in recipe(Wraps).refusal((80, 96))


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
        rule = recipe(KeepsParameters, of=kind)
        param = torch.ones(shape)
        state = rule.init_state(param)
        for grad in grads:
            rule.update_([param], [grad], [state], HYPER)
        assert {key: (type(value), value.requires_grad) for key, value in state.items()} == {
            "slow": (torch.Tensor, False), "step": (torch.Tensor, False)}
        ends.append([param, state["slow"], state["step"]])
    assert all(map(torch.equal, *ends)) and ends[0][2] == 4


def test_nothing_that_a_step_works_on_is_kept():
    rule = recipe(SOAP, precondition_frequency=2)
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
