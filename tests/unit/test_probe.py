"""What a probe says that a class keeps, against what it keeps."""

import pytest
import torch
from pytorch_optimizer import CAME, SOAP, Shampoo
from torch.optim import Adafactor, AdamW, Optimizer

from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.optimizers.any_torch import AnyTorch
from ds_layerwise.optimizers.probe import kept_of, states_of
from ds_layerwise.optimizers.rule import Hyper
from ds_layerwise.recipes.any_torch import is_path, recipe_of
from ds_layerwise.recipes.registry import entry_of
from tests.support.rooms import rooms

pytestmark = rooms("probe", "any_torch")

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
                if self.extra == "late" and int(state["n"][0]) == 5:
                    state["late"] = torch.zeros(cols)
                state["n"] += 1
                state["left"].addmm_(param.grad, param.grad.mT)
                param.sub_(group["lr"] * param.grad)


class Draws(Optimizer):
    """Draws random numbers at every step."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.add_(torch.randn_like(param))


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
    found = {key: (spec.shape, spec.dtype) for key, spec in states_of(recipe(kind, **arguments), shape).items()
             if spec.shape}
    assert found == really_kept(kind, shape, arguments)


def test_a_probe_without_memory_is_the_one_with_memory():
    for kind in (AdamW, Adafactor, CAME, SOAP):
        small, large = ({key: spec.dtype for key, spec in states_of(recipe(kind), shape).items()}
                        for shape in ((8, 12), (2000, 3000)))
        assert small == large, kind


@pytest.mark.parametrize("kind, arguments, message", [
    (Looks, {"extra": "half a side"}, r"keeps odd of which a side is 3 for \(7, 11\) and 6 for \(13, 5\)"),
    (Looks, {"lr": 0.1}, "is given lr"),
    (Looks, {"other": 0.1}, "cannot be made with .*other")])
def test_what_cannot_be_told_is_refused(kind, arguments, message):
    with pytest.raises(ConfigError, match=message):
        kept_of(recipe(kind, **arguments), (80, 96))


def test_a_state_that_comes_after_the_probe_is_an_error():
    rule = AnyTorch.of(recipe(Looks, extra="late"))
    param = torch.zeros(6, 10)
    state = rule.init_state(param)
    for _ in range(5):
        rule.update_([param], [torch.ones(6, 10)], [state], HYPER)
    with pytest.raises(StepError, match=r"Looks keeps late \(10,\) of a parameter of \(6, 10\) after 6 steps"):
        rule.update_([param], [torch.ones(6, 10)], [state], HYPER)


def test_a_probe_takes_no_random_numbers_of_the_run():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    rule = AnyTorch.of(recipe(Draws))
    rule.init_state(torch.zeros(6, 10))
    assert torch.equal(torch.rand(4), expected)


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


@pytest.mark.parametrize("text, yes", [
    ("torch.optim:AdamW", True), ("m:C", True), ("muon", False), ("a.b.C", False), ("a:b:c", False), (":C", False),
    ("a:", False), ("a/b:C", False), (3, False)])
def test_what_a_path_is(text, yes):
    assert is_path(text) is yes
