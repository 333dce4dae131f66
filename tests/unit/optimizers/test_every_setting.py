"""Every setting of every optimizer, from an override in a config to what it changes: no field of a recipe is left out.

An override sets one setting, beside what that needs to matter. The recipe that its parameter is routed to then trains a
small matrix, or vector, and comes to where the same rule written out comes to, which is not where it comes without the
setting. What does not move weights, because it is another way to compute the same, is shown by what it computes with.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.config.overrides import Override
from ds_layerwise.config.sections import LayerWiseConfig, OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.any_torch import MatrixTorch, ScalarTorch
from ds_layerwise.optimizers.dtypes import StateDtype, state_bytes
from ds_layerwise.optimizers.recipe import KEPT_BY, Hyper, KeptStates, Site
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.optimizers.rules.muon_family import MatrixMomentum, Orthogonalized
from ds_layerwise.orthogonalize.tensor_modes import TpMode
from tests.support import elementwise, family, preconditioned
from tests.support.elementwise import values_of
from tests.support.peers import on_ranks
from tests.support.rooms import rooms
from tests.support.routing import route_parameters

pytestmark = rooms("registry", "recipe", "overrides", "routing_rules",
                   "muon_family", "kronecker", "elementwise", "update_hooks", "any_torch")

HYPER = Hyper(lr=0.1, weight_decay=0.2, momentum=0.9, betas=(0.5, 0.95), eps=1e-3)
SGD = "torch.optim:SGD"
FAMILY = tuple(name for name, entry in REGISTRY.items() if issubclass(entry, MatrixMomentum))
ITERATED = tuple(name for name in FAMILY if issubclass(REGISTRY[name], Orthogonalized))
KRONECKER = ("soap", "kl_soap", "shampoo")
#: Recipes by the name that a config has for them; a class of torch's is one, with parameters of any kind.
RECIPES = {**REGISTRY, SGD: MatrixTorch, f"{SGD} of the rest": ScalarTorch}

#: What a setting needs beside it to matter, or to be allowed; "" is any optimizer.
BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    **{(name, "cautious_weight_decay"): {"weight_decay_method": "decoupled"} for name, recipe in RECIPES.items()
       if recipe.model_fields["weight_decay_method"].default == "l2"},
    ("scion", "cautious_weight_decay"): {"constrained": False},
    ("scion", "weight_decay_method"): {"constrained": False},
    ("scion", "weight_decay"): {"constrained": False},
    # Updates are not so large otherwise.
    ("", "max_update_rms"): {"correct_bias": False},
}

#: What is an error, and the words of it.
REFUSED = {**{(name, key): f"which {key} determines" for name in ("namo", "scion", "polargrad")
              for key in ("hyperball", "relative_update")},
           **{(name, key): "decays weights in its own way" for name in (SGD, f"{SGD} of the rest")
              for key in ("weight_decay_method", "cautious_weight_decay")}}
REFUSED_VALUES = [("namo", "weight_decay_method", "l2", "weight_decay_method of namo is 'l2'")]

#: What no update of one step shows: how products are made, and what states are kept in between two; each has a test
#: below.
COMPUTED_WITH = {("ns_method", name) for name in ITERATED} | {("ns_dtype", name) for name in ITERATED} | {
    ("muon_tp_mode", name) for name in ITERATED} | {
    (field, name) for name, recipe in RECIPES.items() if issubclass(recipe, KeptStates)
    for field in (*KEPT_BY.values(), "stochastic_rounding") if field in recipe.model_fields}


def default_of(name, field):
    return RECIPES[name].model_fields[field].default


def beside(name, field):
    return BESIDE.get((name, field), BESIDE.get(("", field), {}) if field in RECIPES[name].model_fields else {})


FIELDS = [(name, field) for name, recipe in RECIPES.items() for field in recipe.model_fields]
WALK = [(name, field, value) for name, field in FIELDS for value in values_of(RECIPES[name], field)
        if value != default_of(name, field)]
MOVES = [case for case in WALK if (case[1], case[0]) not in COMPUTED_WITH and case[:2] not in REFUSED
         and not any(case == refused[:3] for refused in REFUSED_VALUES)]


def test_no_field_of_any_recipe_is_left_out():
    assert RECIPES.keys() >= REGISTRY.keys()
    shown = {case[:2] for case in MOVES} | REFUSED.keys() | {(name, field) for field, name in COMPUTED_WITH}
    assert [case for case in FIELDS if case not in shown] == []
    for name, field in FIELDS:
        default = default_of(name, field)
        assert any(value != default for value in values_of(RECIPES[name], field)), (name, field)


@pytest.mark.parametrize("name", REGISTRY)
def test_states_are_what_their_names_say(name):
    recipe = REGISTRY[name]
    states = recipe().states((16, 32) if recipe.whole else (64,))
    assert recipe.gradient_average in {None, *states}
    # What one rule with such a state offers all of them do, so that its key holds for the whole run.
    fields = {"momentum_buffer": "momentum_dtype", "exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}
    needed = {field for state, field in fields.items() if state in states}
    assert needed <= set(recipe.model_fields), f"derive {name!r} from a class of recipe.py, for self.like"


# --- from a config to a recipe ----------------------------------------------------------------------------------------


class Model(nn.Module):
    """A matrix and a vector to be named, and one of each beside."""

    def __init__(self):
        super().__init__()
        self.matrix, self.other_matrix = (nn.Parameter(torch.zeros(16, 12)) for _ in range(2))
        self.vector, self.other_vector = (nn.Parameter(torch.zeros(16)) for _ in range(2))


def for_matrices(kind):
    return kind.lr_ratio == "matrix_lr_ratio"


def routes_of(name, changes, lr_scale=0.5):
    """The route of one parameter of optimizer ``name``, of a config that sets ``changes`` for it and nothing else.

    An optimizer that takes rates of another size than before needs ``lr_scale``, too.
    """
    kind = RECIPES[name]
    path, named = name.split(" ")[0], "matrix" if for_matrices(kind) else "vector"
    params = {"lr": 0.1, "muon_lr": 0.1, ("matrix" if for_matrices(kind) else "scalar") + "_optimizer": path}
    overrides = [{"name": named, **({} if lr_scale is None else {"lr_scale": lr_scale}), **changes}]
    config = json.loads(json.dumps({"optimizer": {"type": "LayerWise", "params": params},
                                    "layerwise": {"overrides": overrides}}))
    optimizer = OptimizerConfig.from_section(config["optimizer"])
    model = Model()
    routes = route_parameters(model, [{"params": list(model.parameters())}], recipes=optimizer.recipes,
                              overrides=LayerWiseConfig.from_section(config["layerwise"]).overrides,
                              optimizer=OptimizerConfig(decay_vectors=True))
    other = routes[f"other_{named}"]
    assert other.recipe == built(name, {}) and other.lr_scale == 1
    return routes[named]


def built(name, settings):
    """The recipe in Python."""
    role = "matrix" if for_matrices(RECIPES[name]) else "scalar"
    default = OptimizerConfig.from_section({"type": "LayerWise", "params": {
        "lr": 0.1, "muon_lr": 0.1, f"{role}_optimizer": name.split(" ")[0]}}).recipes
    return type(getattr(default, role))(**settings)


def routed(name, settings):
    """The recipe that an override with ``settings`` leads to."""
    route = routes_of(name, settings)
    assert route.recipe == built(name, settings) and route.lr_scale == 0.5
    return route.recipe


# --- what it changes --------------------------------------------------------------------------------------------------


def shapes_of(name, field):
    if not for_matrices(RECIPES[name]):
        return [(33,)]
    if name in KRONECKER:
        # All directions of a side with a factor are there from the first gradient on.
        return [(16, 24)] if field == "max_side" else [(16, 16)]
    return [(12, 40), (40, 12), (16, 16)] if name in FAMILY else [(6, 4)]


def drawn(shape, name, steps):
    """A start and gradients."""
    g = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(steps + 1)]
    return values if name in KRONECKER else [value.float() for value in values]


def steps_of(name):
    return 4 if name in FAMILY else 24


def hyper_of(recipe, hyper=HYPER):
    """``hyper`` as a route changes it."""
    own = recipe.own_weight_decay
    return hyper if own is None else replace(hyper, weight_decay=own)


def trained(recipe, hyper, start, grads, state=None, fast=()):
    """The end of training with ``recipe``, on a device that multiplies fast in some dtypes."""
    value, hyper = start.clone(), hyper_of(recipe, hyper)
    state = {key: each.to(start.dtype) for key, each in recipe.init_state(value).items()} if state is None else state
    for grad in grads:
        recipe.update_([value], [grad], [state], hyper, Site(frozenset(fast)))
    return value


def written_out(name, settings, hyper, start, grads, state=None):
    """The end of training with the formulas."""
    if name in FAMILY:
        return family.train(name, start, grads, lr=hyper.lr, momentum=hyper.momentum, weight_decay=hyper.weight_decay,
                            settings=settings)
    if RECIPES[name] in (MatrixTorch, ScalarTorch):
        return torchs_own(settings, hyper, start, grads)
    if name not in KRONECKER:
        return elementwise.train(name, start, grads, hyper, settings)

    def said(key, default):
        return settings.get(key, default)

    common = dict(lr=hyper.lr, weight_decay=hyper.weight_decay, betas=hyper.betas, eps=hyper.eps,
                  shampoo_beta=said("shampoo_beta", 0.95), every=said("precondition_frequency", 10),
                  limit=said("max_update_rms", 1.0) or 0, correct=said("correct_bias", True),
                  method=said("weight_decay_method", "decoupled"), cautious=said("cautious_weight_decay", False),
                  sides="".join(key for key, side in zip("LR", start.shape) if side <= said("max_side", 10_000)))
    if name == "shampoo":
        oracle: Any = preconditioned.Shampoo(start, grafting=said("grafting", "adam") == "adam",
                                             summed=said("statistics", "average") == "sum",
                                             matrix_eps=said("matrix_eps", 1e-6), **common)
    else:
        oracle = preconditioned.Soap(start, state=state, kl=name == "kl_soap", lagged=said("lagged_basis", True),
                                     basis=said("basis", "qr"), power=said("power_iter_steps", 1),
                                     nesterov=said("nesterov", False), **common)
    for grad in grads:
        oracle.step(grad)
    return torch.from_numpy(np.asarray(oracle.w))


def torchs_own(settings, hyper, start, grads):
    arguments = settings.get("matrix_params", settings.get("scalar_params", {}))
    param = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([param], lr=hyper.lr, weight_decay=hyper.weight_decay, **arguments)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def apart(one, other, start):
    """The distance of two, over how far the second has come."""
    one, other, start = one.double(), other.double(), start.double()
    return float((one - other).norm() / (other - start).norm())


def bound_of(name, settings):
    return 1e-8 if name in KRONECKER else 1e-4 if "spectral_clip" in settings else 1e-5


def warmed(recipe, start, grads):
    """A start, and a state that has seen some gradients; without them the first update of some is rounding alone."""
    state = {key: each.to(start.dtype) for key, each in recipe.init_state(start).items()}
    return trained(recipe, HYPER, start, grads, state), state


@pytest.mark.parametrize("name, field, value", MOVES, ids=str)
def test_a_setting_changes_what_its_formula_says(name, field, value):
    others = beside(name, field)
    recipe, settings, told = routed(name, {**others, field: value}), {**others, field: value}, []
    for shape in shapes_of(name, field):
        start, *grads = drawn(shape, name, steps_of(name))
        state = before = None
        if field == "lagged_basis":
            start, state = warmed(recipe, start, grads)
            before = {key: each.clone() for key, each in state.items()}
        expected = written_out(name, settings, HYPER, start, grads, before)
        without = written_out(name, others, HYPER, start, grads, before)
        assert apart(trained(recipe, HYPER, start, grads, state), expected, start) < bound_of(name, settings), shape
        told.append(apart(without, expected, start))
    assert max(told) > 100 * bound_of(name, settings)


@pytest.mark.parametrize("name, field, value, words", [
    *((*case, values_of(RECIPES[case[0]], case[1])[-1], words) for case, words in REFUSED.items()),
    *REFUSED_VALUES], ids=str)
def test_a_setting_that_an_optimizer_cannot_have_is_refused(name, field, value, words):
    with pytest.raises(ConfigError, match=words):
        routes_of(name, {field: value})


# --- what a parameter group has, for one parameter --------------------------------------------------------------------

#: What an override sets of a route, by key: its value, and what of :class:`Hyper` that makes.
OF_GROUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "weight_decay": (0.5, {"weight_decay": 0.5}), "momentum": (0.5, {"momentum": 0.5}), "eps": (0.5, {"eps": 0.5}),
    "betas": ((0.7, 0.8), {"betas": (0.7, 0.8)}), "lr": (0.05, {"lr": 0.05}), "lr_scale": (0.25, {"lr": 0.025}),
    "min_lr": (0.3, {"lr": 0.3})}
#: What an override sets that is no number of an update: which optimizer, and which matrices.
ELSEWHERE = {"optimizer", "num_heads", "split", "split_axis", "split_groups"}
GROUP = {"lr": 0.1, "configured_lr": 0.1, "matrix_lr_ratio": 1.0, "scalar_lr_ratio": 1.0, "weight_decay": 0.2,
         "momentum": 0.9, "betas": (0.5, 0.95), "eps": 1e-3}
TAKEN = [(name, key) for name, recipe in RECIPES.items() for key in OF_GROUPS
         if key in ("weight_decay", "lr", "lr_scale", "min_lr", *recipe.hyper)]


def test_no_key_of_an_override_is_left_out():
    assert OF_GROUPS.keys() | ELSEWHERE == set(Override.change_keys())


@pytest.mark.parametrize("name, key", TAKEN, ids=str)
def test_a_parameter_has_a_number_of_its_own(name, key):
    value, changed = OF_GROUPS[key]
    settings = beside(name, key)
    route = routes_of(name, {**settings, key: value}, lr_scale=None if "lr" in key else 1.0)
    hyper = Hyper(**route.hyper(GROUP))
    assert hyper == replace(hyper_of(route.recipe), **changed)
    shape = shapes_of(name, key)[0]
    start, *grads = drawn(shape, name, steps_of(name))
    expected = written_out(name, settings, replace(HYPER, **changed), start, grads)
    assert apart(trained(route.recipe, hyper, start, grads), expected, start) < bound_of(name, settings)
    told = apart(written_out(name, settings, HYPER, start, grads), expected, start)
    assert told > 100 * bound_of(name, settings)


# --- how products are made --------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """The dtypes of all products of matrices."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            self.dtypes |= {each.dtype for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("value, fast, expected", [
    ("bf16", (), torch.bfloat16), ("fp16", (), torch.float16), ("fp32", (torch.bfloat16,), torch.float32),
    ("auto", (), torch.float32), ("auto", (torch.bfloat16,), torch.bfloat16)])
def test_ns_dtype_is_what_products_run_in(name, value, fast, expected):
    recipe = routed(name, {"ns_dtype": value})
    # One of them divides the first gradient by itself, rounding and all.
    start, *grads = drawn((16, 48), name, 3)
    with Products() as products:
        param = trained(recipe, HYPER, start, grads, fast=fast)
    assert products.dtypes == {expected} == {recipe.products_in(frozenset(fast))}
    exact = trained(routed(name, {"ns_dtype": "fp32"}), HYPER, start, grads)
    # Rounded, and not much more.
    off = apart(param, exact, start)
    assert off == 0 if expected == torch.float32 else 1e-4 < off < 0.3


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("settings", [{"ns_method": "standard"}, {"ns_method": "gram"}, {"ns_steps": 3},
                                      {"ns_method": "standard", "ns_steps": 8}], ids=str)
def test_ns_method_and_ns_steps_are_what_is_multiplied(name, settings):
    recipe, shape = routed(name, settings), (16, 48)
    method, steps = settings.get("ns_method", "gram"), settings.get("ns_steps", 5)
    start, *grads = drawn(shape, name, 1)
    with FlopCounterMode(display=False) as counter:
        param = trained(recipe, HYPER, start, grads)
    m, n = shape
    # Gram: its matrix twice, and back; squares in between, but for the last of each of two runs.
    standard = steps * (4 * m * m * n + 2 * m**3)
    gram = 2 * 2 * 2 * m * m * n + (4 * steps - 3 * 2) * 2 * m**3
    assert counter.get_total_flops() == recipe.work(shape) == (standard if method == "standard" else gram)
    assert apart(param, written_out(name, settings, HYPER, start, grads), start) < 1e-5


@pytest.mark.parametrize("name", ITERATED)
@pytest.mark.parametrize("mode", get_args(TpMode))
def test_muon_tp_mode_is_what_ranks_with_parts_of_a_matrix_do(name, mode):
    recipe, shape, axis = routed(name, {"muon_tp_mode": mode}), (12, 40), -1
    start, *grads = drawn(shape, name, 4)

    def part(value, rank):
        return value.chunk(2, axis)[rank].clone()

    def rank(peers):
        param = part(start, peers.rank)
        state = recipe.init_state(param)
        for grad in grads:
            recipe.update_([param], [part(grad, peers.rank)], [state], hyper_of(recipe), Site(cut=(axis, peers)))
        return param, *({shape for what, shape in peers.calls if what == asked} for asked in (
            "gather", "sum", "exchange"))

    parts, gathered, summed, exchanged = zip(*on_ranks(2, rank), strict=True)
    whole = functools.partial(written_out, name, {}, HYPER)
    expected = torch.cat([whole(part(start, i), [part(grad, i) for grad in grads]) for i in range(2)], axis) \
        if mode == "blockwise" else whole(start, grads)
    assert apart(torch.cat(parts, axis), expected, start) < 1e-5
    # Matrices travel, or their Gram matrices do, or nothing does.
    travel = SimpleNamespace(matrices=(1, 12, 20) in gathered[0], grams=(1, 16, 16) in summed[0] or (
        1, 12, 12) in summed[0], owner=exchanged[0] == {(240, 0), (240, 240)},
        any=bool(gathered[0] | summed[0] | exchanged[0]))
    assert (travel.matrices, travel.grams, travel.owner, travel.any) == {
        "duplicated": (True, False, False, True), "distributed": (False, True, False, True),
        "owner": (False, False, True, True), "auto": (True, False, False, True), "blockwise": (False,) * 4}[mode]


@pytest.mark.parametrize("dtype", get_args(StateDtype))
@pytest.mark.parametrize("by_chance", [False, True])
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if issubclass(recipe, KeptStates)])
def test_dtypes_of_states_are_what_is_kept(name, by_chance, dtype):
    kind, shape = RECIPES[name], (16, 24) if for_matrices(RECIPES[name]) else (512,)
    for state, field in KEPT_BY.items():
        if field not in kind.model_fields:
            continue
        recipe = routed(name, {field: dtype, "stochastic_rounding": by_chance})
        specs, plain = recipe.states(shape), kind().states(shape)
        assert recipe.rounds_by_chance is by_chance
        assert {key: spec.kept_as for key, spec in specs.items() if spec.kept_as} == (
            {} if dtype == "float32" else {state: dtype})
        # A byte and a scale of 4 for 256 elements in a row, or two bytes, and what rules see stays as it is.
        numel = math.prod(shape)
        assert specs[state].nbytes == {"float32": 4 * numel, "bfloat16": 2 * numel, "8bit": numel + 4 * -(-numel // 256)
                                       }[dtype]
        assert {key: (spec.shape, spec.dtype) for key, spec in specs.items()} == {
            key: (spec.shape, spec.dtype) for key, spec in plain.items()}


# --- what it costs ----------------------------------------------------------------------------------------------------


def as_updated(spec):
    """Return the bytes of the form that a rule gets."""
    return state_bytes(math.prod(spec.shape), spec.dtype)


@pytest.mark.parametrize("name", REGISTRY)
def test_states_are_what_every_value_makes_of_them(name):
    shapes = [(16, 24), (24, 16), (3, 16, 24)] if for_matrices(RECIPES[name]) else [(33,)]
    settings = [{**beside(name, field), field: value} for field in RECIPES[name].model_fields
                for value in values_of(RECIPES[name], field)
                if (name, field) not in REFUSED and (name, field, value) not in {case[:3] for case in REFUSED_VALUES}]
    for shape, given in itertools.product(shapes, [{}, *settings]):
        recipe = built(name, given)
        states, specs = recipe.init_state(torch.zeros(shape, device="meta")), recipe.states(shape)
        # A state that is kept in fewer bits is so beside the rule, which gets and gives float32.
        assert {key: (tuple(each.shape), str(each.dtype), each.device.type) for key, each in states.items()} == {
            key: (spec.shape, f"torch.{spec.dtype}", "cpu" if spec.on_host else "meta")
            for key, spec in specs.items()}, (shape, given)
        on_device = [key for key, spec in specs.items() if not spec.on_host]
        assert sum(as_updated(specs[key]) for key in on_device) == sum(states[key].nbytes for key in on_device)
    # A default keeps float32, so that these are all the bytes.
    assert all(spec.nbytes == as_updated(spec) for spec in built(name, {}).states(shapes[0]).values())
