"""Named parts of fused matrices: where they lie, what rules see of them, and what they cost."""

import math
import random

import pytest
import torch
from torch import nn

from ds_layerwise.config.overrides import Part
from ds_layerwise.config.sections import Override
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.recipe import Hyper, Recipe, StateSpec
from ds_layerwise.optimizers.rules.muon_family import Muon, NorMuon
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.forecast.memory import state_bytes_of, update_bytes
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.routing.part_views import Parts
from ds_layerwise.routing.routes import Route
from tests.support.fused import by_index
from tests.support.model_specs import routes_of, shipped
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("fused_parts", "part_views", "routes")


@pytest.mark.parametrize("is_cut, meaning", [(False, 'parts q 2, k 1 (1 heads) x 5 along "in"'), (True, "")])
def test_the_meaning_of_states_is_where_the_parts_lie(is_cut, meaning):
    """Tensor parallelism leaves other numbers of rows of the same parts."""
    parts = Parts(-1, (("q", Part(size=2)), ("k", Part(size=1, heads=1))), 5)
    for recipe, wanted in ((NorMuon(), meaning), (Muon(), "")):
        route = Route(name="w", recipe=recipe, reason="", group=0, matrix_shape=(4, 15), parts=parts, is_cut=is_cut)
        assert route.meaning == wanted


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


def views(param, grad, state, parts, recipe=Muon()):
    return parts.views(recipe, param, grad, state)


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
def test_some_parts_need_no_copy(shape, parts, views_of):
    assert "".join(name for name, place in parts.places(shape).items() if place.is_view) == views_of
    copied = [math.prod(place.shape) for place in parts.places(shape).values() if not place.is_view]
    # The parameter, its gradient and its momentum.
    assert parts.copied(Muon(), shape) == 12 * sum(copied)


class Preconditioned(Recipe):
    """A recipe with a state like the parameter, states of each side, and a count."""

    rule, whole, family = "preconditioned", True, "preconditioned"

    def states(self, shape):
        *batch, rows, cols = shape
        return {**self.like(shape, "average"), "left": StateSpec((*batch, rows, rows)),
                "step": StateSpec((), on_host=True), "right": StateSpec((*batch, cols, cols))}

    def init_state(self, param):
        state = super().init_state(param)
        state["left"] += param.sum()
        return {**state, "average": param + 1}


def test_states_are_whole_where_they_are_like_the_parameter_and_each_parts_own_elsewhere():
    # k is square, so that its left state looks like the parameter.
    parts = Parts(-2, (("q", Part(size=4, heads=2)), ("k", Part(size=3))), 1)
    states = parts.states(Preconditioned(), (7, 3))
    assert {key: spec.shape for key, spec in states.items()} == {
        "average": (7, 3), "left.q": (2, 2, 2), "step.q": (), "right.q": (2, 3, 3), "left.k": (3, 3), "step.k": (),
        "right.k": (3, 3)}
    assert states["step.k"].on_host

    whole = torch.arange(21.0).view(7, 3)
    first = parts.first_state(Preconditioned(), whole)
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
    assert spec.work == recipe.work((16, 6)) + recipe.work((4, 2, 6))
    assert state_bytes_of({"w": route})("w", 24 * 6) == 4 * 24 * 6


def test_a_step_works_in_the_copies_of_one_parameter():
    recipe, parts = Muon(), Parts(-2, (("q", Part(size=200)), ("k", Part(size=100))), 2)
    routes = {name: Route(name=name, recipe=recipe, reason="", group=0, matrix_shape=(600, 600), parts=parts)
              for name in ("a", "b")}
    specs = specs_of([(name, (600, 600), "float32") for name in routes], routes)
    layout = plan_layout(specs, 1, bucket_numel=10**6)
    assert len(layout.buckets) == 1
    # Both parts of both matrices lie in two places.
    assert update_bytes(layout, routes, "float32") == recipe.workspace((1, 400, 600)) + 12 * 600 * 600


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
    rule = Muon(ns_dtype="fp32", scale_mode=scale_mode)
    hyper = Hyper(lr=0.1, weight_decay=0.1, momentum=0.9, betas=(0.9, 0.9), eps=0.0)
    generator = torch.Generator().manual_seed(3)
    whole, grads = torch.randn(shape, generator=generator), [torch.randn(shape, generator=generator) for _ in range(3)]
    apart = {name: part.clone() for name, part in by_index(whole, parts).items()}
    apart_states = {name: rule.init_state(part) for name, part in apart.items()}
    state = parts.first_state(rule, whole)
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


# --- what users say ---------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A fused projection; marked as tensor parallelism marks it, if that has cut it."""

    def __init__(self, shape=(16, 6), **marks):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.other = nn.Parameter(torch.zeros(4, 4))
        for key, value in marks.items():
            setattr(self.weight, key, value)


def route(model, *entries, **kwargs):
    overrides = [Override.from_entry(f"layerwise.overrides[{i}]", {"name": "weight", **entry})
                 for i, entry in enumerate(entries)]
    return route_parameters(model, [{"params": list(model.parameters())}], overrides=overrides, **kwargs)["weight"]


QKV = {"q": 8, "k": 4, "v": {"size": 4, "heads": 2}}


def test_an_override_names_parts_of_either_axis_and_in_groups():
    rows = route(Layer(), {"split": QKV})
    assert rows.seen(96) == {"q": (8, 6), "k": (4, 6), "v": (2, 2, 6)} and rows.parts.axis == -2
    assert (rows.matrix_shape, rows.reason) == ((16, 6), "matrix, parts q, k, v")
    columns = route(Layer((6, 16)), {"split": QKV, "split_axis": "in"})
    assert columns.seen(96) == {"q": (6, 8), "k": (6, 4), "v": (2, 6, 2)} and columns.parts.axis == -1
    grouped = route(Layer((48, 6)), {"split": QKV, "split_groups": 3})
    assert grouped.seen(288) == {"q": (24, 6), "k": (12, 6), "v": (6, 2, 6)}
    assert grouped.reason == "matrix, parts q, k, v of 3 groups"
    stack = route(Layer((3, 16, 6)), {"split": QKV})
    assert stack.seen(288) == {"q": (3, 8, 6), "k": (3, 4, 6), "v": (6, 2, 6)}
    assert route(Layer(), {"split": {}}).parts is None


def test_the_outputs_of_a_transposed_layer_are_its_columns():
    layer = Layer((6, 16))
    layer.__class__ = type("Conv1D", (Layer,), {})
    assert route(layer, {"split": QKV}).parts.axis == -1
    with pytest.raises(RoutingError, match="it has 6 rows"):
        route(layer, {"split": QKV, "split_axis": "in"})
    experts = Layer((3, 6, 16))
    experts.is_transposed = True
    assert route(experts, {"split": QKV}).parts.axis == -1


@pytest.mark.parametrize("entry, message", [
    ({"split": {"q": 8, "k": 4}}, r"weight \(16, 6\): layerwise.overrides splits it into q 8, k 4, which is 12 in all, "
                                  "and it has 16 rows; correct the sizes, or split_axis, or split_groups"),
    ({"split": QKV, "split_axis": "in"}, 'k 4, v 4 \\(2 heads\\) along "in", which is 16 in all, and it has 6 columns'),
    ({"split": QKV, "split_groups": 2}, r"v 4 \(2 heads\) x 2, which is 32 in all, and it has 16 rows"),
    ({"split": QKV, "optimizer": "scalar"}, "which does not see it as a matrix; narrow the pattern"),
])
def test_parts_that_do_not_fit_are_refused(entry, message):
    with pytest.raises(RoutingError, match=message):
        route(Layer(), entry)


def test_overrides_that_contradict_each_other_are_refused():
    with pytest.raises(RoutingError, match=r"overrides\[0\] sets split to q 8, k 8 and .*\[1\] to k 8, q 8; narrow"):
        route(Layer(), {"split": {"q": 8, "k": 8}}, {"split": {"k": 8, "q": 8}})
    with pytest.raises(RoutingError, match="sets split to q 8, k 8 and num_heads to 2; count the heads of each part"):
        route(Layer(), {"split": {"q": 8, "k": 8}}, {"num_heads": 2})


@pytest.mark.parametrize("entry, message", [
    ({"split": 3}, r"layerwise.overrides\[0\].split must be an object like"),
    ({"split": {"q": 0}}, r"split.q must be a whole number of at least 1, got 0"),
    ({"split": {"q": {"heads": 2}}}, r"split.q.size is missing; it needs size"),
    ({"split": {"q": {"size": 2, "head": 2}}}, r"split.q.head is not an option; did you mean 'heads'\?"),
    ({"split": {"q": {"size": 3, "heads": 2}}}, r"split.q has size 3, which 2 heads do not divide"),
    ({"split": {"q/k": 3}}, r"split names a part 'q/k'; give it a name of letters, digits and underscores"),
    ({"split_groups": 2}, r"split_groups sets the layout of parts, but layerwise.overrides\[0\] has no split"),
    ({"split": {"q": 3}, "split_axis": "rows"}, r"split_axis must be one of 'out', 'in', got 'rows'"),
    ({"split": {"q": 3}, "num_heads": 3}, r"has split and num_heads; count the heads of each part"),
])
def test_bad_splits_in_a_config_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        route(Layer(), entry)


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def cut(shape, dim, stride=1):
    return Layer(shape, tensor_model_parallel=True, partition_dim=dim, partition_stride=stride)


def autotp(shape, before, **meta):
    return Layer(shape, tensor_model_parallel=True, ds_autotp_universal_checkpoint_meta={
        "original_shape": before, "conversion": {}, **meta})


HEADS = {"q": {"size": 8, "heads": 4}, "k": {"size": 8, "heads": 2}}


@pytest.mark.parametrize("layer, entry, seen, axis", [
    # Across the parts: each is cut as the whole is.
    (cut((16, 3), 1), {"split": QKV}, {"q": (8, 3), "k": (4, 3), "v": (2, 2, 3)}, -1),
    # Whole groups: a part is one matrix of all groups, of which ranks have shards, or heads that lie whole on a rank.
    (cut((16, 6), 0), {"split": {"q": 4, "k": 4}, "split_groups": 4}, {"q": (8, 6), "k": (8, 6)}, -2),
    (cut((16, 6), 0), {"split": {"q": {"size": 4, "heads": 2}, "k": {"size": 4, "heads": 1}}, "split_groups": 4},
     {"q": (4, 2, 6), "k": (2, 4, 6)}, None),
    # Whole parts, as many on each rank.
    (cut((16, 6), 0), {"split": {"gate": 16, "up": 16}}, {"gate_or_up": (16, 6)}, None),
    (cut((16, 6), 0), {"split": {"a": 12, "b": 4, "c": 12, "d": 4}}, {"a_or_c": (12, 6), "b_or_d": (4, 6)}, None),
    # An equal piece of each.
    (cut((16, 6), 0, 2), {"split": {"gate": 16, "up": 16}}, {"gate": (8, 6), "up": (8, 6)}, -2),
    (cut((8, 6), 0, 2), {"split": HEADS}, {"q": (2, 2, 6), "k": (1, 4, 6)}, None),
    (autotp((8, 6), (16, 6), sub_param_sizes=(8, 4, 4), sub_param_shard_widths=[[4, 4], [2, 2], [2, 2]]),
     {"split": {"q": 8, "k": 4, "v": 4}}, {"q": (4, 6), "k": (2, 6), "v": (2, 6)}, -2),
    # Experts: each rank has whole ones.
    (cut((3, 16, 6), 0), {"split": QKV}, {"q": (3, 8, 6), "k": (3, 4, 6), "v": (6, 2, 6)}, None),
])
def test_tensor_parallelism_that_does_not_cut_through_parts(layer, entry, seen, axis):
    found = route(layer, entry, tp_size=2)
    assert (found.seen(0), found.tp_axis, found.is_cut) == (seen, axis, True)


@pytest.mark.parametrize("layer, entry", [
    (cut((16, 6), 0), {"split": {"q": 16, "k": 8, "v": 8}}),
    (cut((16, 6), 0), {"split": {"q": 24, "k": 8}}),
    (cut((12, 6), 0), {"split": {"q": 4, "k": 4}, "split_groups": 3}),
    (cut((16, 6), 0), {"split": {"q": {"size": 4, "heads": 2}, "k": 4}, "split_groups": 4}),
    (cut((16, 6), 0, 2), {"split": {"gate": 24, "up": 8}}),
    (cut((9, 6), 0, 2), {"split": {"q": 9, "k": 9}}),
    (cut((8, 6), 0, 2), {"split": {"q": {"size": 8, "heads": 4}, "k": {"size": 8, "heads": 1}}}),
    (autotp((8, 6), (16, 6), sub_param_sizes=(8, 4, 4), sub_param_shard_widths=[[4, 4], [3, 1], [1, 3]]),
     {"split": {"q": 8, "k": 4, "v": 4}}),
    (autotp((8, 6), (16, 6), conversion={"affine_map": {"segments": []}}), {"split": {"gate": 8, "up": 8}}),
])
def test_tensor_parallelism_that_cuts_through_parts(layer, entry):
    with pytest.raises(RoutingError, match="do not fit 2 tensor-parallel ranks: each must have whole groups, "
                                           r"whole parts, or an equal piece .*\"split\": \{\} in layerwise.overrides"):
        route(layer, entry, tp_size=2)


def test_sizes_are_those_of_all_ranks_together():
    with pytest.raises(RoutingError, match="which is 16 in all, and it has 32 rows over all tensor-parallel ranks"):
        route(cut((16, 6), 0), {"split": QKV}, tp_size=2)


# --- models of the package -------------------------------------------------------------------------------------------


def test_the_models_of_the_package_have_the_parts_that_transformers_finds():
    gpt2 = routes_of(shipped("gpt2-124m"))
    assert gpt2["transformer.h.3.attn.c_attn.weight"].seen(0) == dict.fromkeys("qkv", (768, 768))
    name = "model.layers.7.self_attn.{}.weight"
    routes = routes_of(shipped("deepseek-v3"))
    assert {leaf: routes[name.format(leaf)].seen(0) for leaf in ("q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa")} == {
        "q_b_proj": {"nope": (16384, 1536), "rope": (8192, 1536)}, "kv_b_proj": {"k": (16384, 512), "v": (16384, 512)},
        "kv_a_proj_with_mqa": {"latent": (512, 7168), "rope": (64, 7168)}}
    assert not any(each.parts for each in routes_of(shipped("deepseek-v3"), auto_split=False).values())
    told = routes_of(shipped("deepseek-v3"), [Override(name="*.kv_b_proj.weight", num_heads=128),
                                              Override(name="*.q_b_proj.weight", split={})])
    assert told[name.format("kv_b_proj")].matrix_shape == (128, 256, 512)
    assert told[name.format("q_b_proj")].parts is None
