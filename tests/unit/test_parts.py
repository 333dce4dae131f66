"""Named parts of fused matrices: where they lie, what rules see of them, and what they cost."""

import math
import random

import pytest
import torch
from torch import nn

from ds_layerwise.config import Override
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.muon import Muon as Rule
from ds_layerwise.optimizers.rule import Hyper
from ds_layerwise.orthogonalize.parts import first_state, seen_parts
from ds_layerwise.plan.forecast import specs_of
from ds_layerwise.plan.model_file import find_model, load_model, route_model
from ds_layerwise.plan.routes import Route
from ds_layerwise.recipes.muon import Muon
from ds_layerwise.recipes.parts import Part, Parts, whole_states
from ds_layerwise.recipes.recipe import Recipe, StateSpec, like
from ds_layerwise.routing.rules import route_parameters
from tests.support.rooms import rooms

pytestmark = rooms("parts", "routes")


def random_parts(seed):
    """Parts of one axis of a parameter, and its shape, with axes of length 1 among them."""
    generator = random.Random(seed)
    axis, groups = generator.choice((-2, -1)), generator.choice((1, 1, 2, 3))
    each = []
    for name in "qkvgu"[:generator.randint(1, 5)]:
        heads = generator.choice((None, None, 1, 2, 3))
        each.append((name, Part(size=generator.randint(1, 4) * (heads or 1), heads=heads)))
    parts, across = Parts(axis, tuple(each), groups), generator.randint(1, 5)
    shape = (parts.length, across) if axis == -2 else (across, parts.length)
    return parts, (*generator.choice(((), (), (1,), (3,))), *shape)


def by_index(whole, parts):
    """Each part, put together matrix by matrix from single rows or columns."""
    found = {}
    of_group = parts.length // parts.groups
    first = 0
    for name, part in parts.each:
        lines = [[group * of_group + first + i for i in range(part.size)] for group in range(parts.groups)]
        if part.heads is None:
            matrices = [[line for group in lines for line in group]]
        else:
            width = part.size // part.heads
            matrices = [group[head * width:(head + 1) * width] for group in lines for head in range(part.heads)]
        stacked = whole if whole.dim() == 3 else whole.unsqueeze(0)
        chosen = [matrix.index_select(parts.axis, torch.tensor(lines)) for matrix in stacked for lines in matrices]
        found[name] = torch.stack(chosen) if whole.dim() == 3 or part.heads else chosen[0]
        first += part.size
    return found


def views(param, grad, state, parts, recipe=Muon()):
    return seen_parts(param, grad, state, parts.places(tuple(param.shape)), whole_states(recipe))


@pytest.mark.parametrize("seed", range(150))
def test_any_parts_are_those_that_single_lines_make_and_go_back_where_they_were(seed):
    parts, shape = random_parts(seed)
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    grad, state = -whole, {"momentum_buffer": whole + 0.5}
    expected = by_index(whole, parts)
    assert parts.shapes(shape) == {name: tuple(part.shape) for name, part in expected.items()}
    seen = views(whole, grad, state, parts)
    for place, each, part in zip(parts.places(shape).values(), seen, expected.values(), strict=True):
        copy = each.copy()
        assert torch.equal(copy.param, part) and torch.equal(copy.grad, -part)
        assert torch.equal(copy.state["momentum_buffer"], part + 0.5)
        assert place.is_view == (copy.param.data_ptr() == each.param.data_ptr()) == (each.shape is None)
    # What a rule writes is found again, and by no other part.
    for each in seen:
        copy = each.copy()
        copy.param.mul_(-1)
        copy.state["momentum_buffer"].mul_(2)
        each.take_back(copy)
    numbers = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    assert torch.equal(whole, -numbers) and torch.equal(state["momentum_buffer"], 2 * numbers + 1)


@pytest.mark.parametrize("shape, parts, views_of", [
    ((12, 5), Parts(-2, (("q", Part(size=8)), ("k", Part(size=4)))), "qk"),
    ((12, 5), Parts(-2, (("q", Part(size=8, heads=2)), ("k", Part(size=4, heads=1)))), "qk"),
    ((5, 12), Parts(-1, (("q", Part(size=8, heads=2)), ("k", Part(size=4)))), "qk"),
    ((3, 12, 5), Parts(-2, (("gate", Part(size=6)), ("up", Part(size=6)))), "gateup"),
    ((3, 5, 12), Parts(-1, (("gate", Part(size=6)), ("up", Part(size=6)))), "gateup"),
    ((3, 5, 12), Parts(-1, (("gate", Part(size=1)), ("up", Part(size=1))), 6), "gateup"),
    ((12, 5), Parts(-2, (("q", Part(size=2)), ("k", Part(size=1))), 4), "k"),
    ((12, 5), Parts(-2, (("q", Part(size=2, heads=1)), ("k", Part(size=1, heads=1))), 4), "qk"),
])
def test_what_needs_no_copy(shape, parts, views_of):
    assert "".join(name for name, place in parts.places(shape).items() if place.is_view) == views_of
    copied = [math.prod(place.shape) for place in parts.places(shape).values() if not place.is_view]
    # The parameter, its gradient and its momentum.
    assert parts.copied(Muon(), shape) == 12 * sum(copied)


class Preconditioned(Recipe):
    """One state like the parameter, one of each side, and a count."""

    rule, whole, family = "preconditioned", True, "preconditioned"

    def states(self, shape):
        *batch, rows, cols = shape
        return {**like(shape, "average"), "left": StateSpec((*batch, rows, rows)), "step": StateSpec((), on_host=True),
                "right": StateSpec((*batch, cols, cols))}


def test_states_are_whole_where_they_are_like_the_parameter_and_each_parts_own_elsewhere():
    # k is square, so that its left state looks like the parameter.
    parts = Parts(-2, (("q", Part(size=4, heads=2)), ("k", Part(size=3))), 1)
    states = parts.states(Preconditioned(), (7, 3))
    assert {key: spec.shape for key, spec in states.items()} == {
        "average": (7, 3), "left.q": (2, 2, 2), "step.q": (), "right.q": (2, 3, 3), "left.k": (3, 3), "step.k": (),
        "right.k": (3, 3)}
    assert states["step.k"].on_host

    def init(param):
        made = {key: torch.zeros(spec.shape) for key, spec in Preconditioned().states(tuple(param.shape)).items()}
        made["left"] += param.sum()
        return {**made, "average": param + 1}

    whole = torch.arange(21.0).view(7, 3)
    first = first_state(whole, parts.places((7, 3)), whole_states(Preconditioned()), init)
    assert {key: tuple(value.shape) for key, value in first.items()} == {
        key: spec.shape for key, spec in states.items()}
    assert torch.equal(first["average"], whole + 1)
    assert torch.equal(first["left.k"], torch.full((3, 3), float(whole[4:].sum())))
    q, k = views(whole, -whole, first, parts, Preconditioned())
    assert q.state.keys() == k.state.keys() == {"average", "left", "step", "right"}
    assert k.state["left"] is first["left.k"] and torch.equal(k.state["average"], whole[4:] + 1)


def test_cost_is_that_of_the_parts():
    recipe, parts = Muon(), Parts(-2, (("q", Part(size=8)), ("k", Part(size=4, heads=2))), 2)
    route = Route(name="w", recipe=recipe, reason="", group=0, matrix_shape=(24, 6), parts=parts)
    spec, = specs_of([("w", (24, 6), "float32")], {"w": route})
    assert spec.work == recipe.work((16, 6)) + recipe.work((4, 2, 6)) and spec.state_bytes == 4 * 24 * 6


@pytest.mark.parametrize("parts, shape", [
    (Parts(-2, (("q", Part(size=8)), ("k", Part(size=4)), ("v", Part(size=4)))), (16, 6)),
    (Parts(-1, (("q", Part(size=8)), ("k", Part(size=4)), ("v", Part(size=4)))), (6, 16)),
    (Parts(-2, (("q", Part(size=4)), ("k", Part(size=2)), ("v", Part(size=2))), 3), (24, 6)),
    (Parts(-2, (("q", Part(size=4, heads=2)), ("k", Part(size=2)), ("v", Part(size=2))), 3), (24, 6)),
    (Parts(-1, (("gate", Part(size=1)), ("up", Part(size=1))), 6), (3, 5, 12)),
    (Parts(-2, (("gate", Part(size=6)), ("up", Part(size=6)))), (3, 12, 5)),
])
@pytest.mark.parametrize("scale_mode", ["original", "spectral"])
def test_a_rule_updates_parts_as_the_same_matrices_apart(parts, shape, scale_mode):
    rule = Rule.of(Muon(ns_dtype="fp32", scale_mode=scale_mode))
    hyper = Hyper(lr=0.1, weight_decay=0.1, momentum=0.9, betas=(0.9, 0.9), eps=0.0)
    generator = torch.Generator().manual_seed(3)
    whole, grads = torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(3)]
    apart = {name: part.clone() for name, part in by_index(whole, parts).items()}
    apart_states = {name: rule.init_state(part) for name, part in apart.items()}
    state = first_state(whole, parts.places(shape), whole_states(Muon()), rule.init_state)
    for grad in grads:
        seen = views(whole, grad, state, parts)
        copies = [each.copy() for each in seen]
        rule.update_([c.param for c in copies], [c.grad for c in copies], [c.state for c in copies], hyper)
        for each, copy in zip(seen, copies, strict=True):
            each.take_back(copy)
        rule.update_(list(apart.values()), list(by_index(grad, parts).values()), list(apart_states.values()), hyper)
    for name, part in by_index(whole, parts).items():
        assert torch.equal(part, apart[name]), name
    for name, part in by_index(state["momentum_buffer"], parts).items():
        assert torch.equal(part, apart_states[name]["momentum_buffer"]), name
