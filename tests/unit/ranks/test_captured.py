"""Captured updates replay with the numbers of their own step, on graphs that a CPU plays; see ``PlayedGraph``."""

import math

import pytest
import torch
from torch import Tensor

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.orthogonalize import newton_schulz
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.owned import captured, weight_writes
from ds_layerwise.ranks.owned.buffers import FlatBuffer, dtype_name
from ds_layerwise.ranks.owned.owned import OneUpdate, Owned, OwnedSettings, unwatched
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from tests.support.played_graph import PlayedGraph, tensors_in
from tests.support.rooms import rooms
from tests.support.routing import route_parameters
from tests.support.training import Net

pytestmark = rooms("captured", "scalars")

CPU = torch.device("cpu")

#: What a script and the ranks change from step to step: all that is not a tensor.
STEPS = [
    {"factor": 1.0},
    {"factor": 0.25},
    {"factor": 0.5, "lr": 0.01, "weight_decay": 0.2, "momentum": 0.8, "betas": (0.8, 0.9), "eps": 1e-3},
    {"factor": 2.0, "lr": 0.002, "weight_decay": 0.0, "momentum": 0.5, "betas": (0.5, 0.7), "eps": 1e-8},
    {"factor": 1.0, "lr": 0.0, "weight_decay": 0.1, "momentum": 0.95, "betas": (0.9, 0.95), "eps": 1e-6},
    {"factor": 1 / 3, "lr": 0.03, "weight_decay": 0.3},
]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """On a CPU the package asks for numbers where that costs nothing."""
    monkeypatch.setattr(newton_schulz, "_normalised", newton_schulz._normalised_in_float64)
    monkeypatch.setattr(weight_writes, "_is_host", lambda masters: False)
    PlayedGraph.made.clear()


def owned(new_graph, *, dtype=torch.bfloat16, master_dtype="float32", bucket_numel=600, size=2, **params):
    """Rank 0 of ``size`` with its shards, in memory that has nothing of another."""
    model = Net().to(dtype)
    products = {} if params.get("matrix_optimizer") == "rmnp" else {"ns_dtype": "fp32"}
    config = OptimizerConfig.from_section({"type": "LayerWise", "params": {
        "lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.0, **products, **params}})
    optimizer = LayerWiseOptimizer(model.parameters(), config)
    routes = route_parameters(model, optimizer.param_groups, recipes=config.recipes)
    named = {name: param.detach() for name, param in model.named_parameters()}
    specs = specs_of(((name, tuple(p.shape), dtype_name(dtype)) for name, p in named.items()), routes)
    layout = plan_layout(specs, size, bucket_numel=bucket_numel)
    buffer = FlatBuffer(layout, CPU, fill=lambda name, place: place.copy_(named[name].reshape(-1)))
    settings = OwnedSettings({spec.name: (spec.name,) for spec in specs}, batch_matrices=True, on_host=(),
                             pin_memory=False, master_dtype=master_dtype, rounding_seed=0, peers=None,
                             fast_dtypes=frozenset(), expert_rank=0, new_graph=new_graph)
    return optimizer, Owned(routes, buffer.shards(0), None, settings)


def update(optimizer, mine, number, *, leave_out=frozenset(), around=unwatched, factor=1.0, **settings):
    """The update ``number`` with gradients of its own."""
    for group in optimizer.param_groups:
        group.update(settings)
    turn = OneUpdate(optimizer.groups_now(), number, lambda name: factor * (1 + ("norm" in name)), leave_out,
                     around=around)
    torch.manual_seed(number)
    for index in range(len(mine.pieces)):
        mine.reduced.allocate(index).copy_(torch.randn(mine.reduced.tensors[index].shape, device=CPU,
                                                       dtype=torch.float32))
    with torch.no_grad(), mine.updating():
        for index in reversed(range(len(mine.pieces))):
            mine.update(index, turn)
    mine.reduced.free()


def values_of(mine):
    """All masters and states, by name."""
    found = {}
    for name in mine.states:
        for key in ("fp32", *mine.states[name]):
            found[name, key] = mine.value(name, key).clone().float()
    return found


def same(one, other, tolerance=2e-5):
    for key, value in values_of(other).items():
        worst = (values_of(one)[key] - value).abs().max()
        assert worst <= tolerance * max(1.0, value.abs().max()), (key, worst)


RULES = [{"matrix_optimizer": name} for name, recipe in REGISTRY.items() if recipe.whole and recipe.can_be_captured]
RULES += [{"scalar_optimizer": name} for name, recipe in REGISTRY.items() if not recipe.whole]
MORE = [{"weight_decay_method": "independent"}, {"weight_decay_method": "l2", "scalar_optimizer": "adam"},
        {"weight_decay_method": "palm", "cautious_weight_decay": True}, {"nesterov": False, "ns_method": "standard"},
        {"hyperball": "own"}, {"relative_update": True}, {"radial_brake": [0.5, 0.7]}, {"spectral_clip": 0.5},
        {"momentum_dtype": "bfloat16"}, {"momentum_dtype": "8bit", "exp_avg_sq_dtype": "8bit"}]


@pytest.mark.parametrize("params", RULES + MORE, ids=str)
def test_replays_are_the_updates_of_their_step(params):
    plain, played = owned(None, **params), owned(PlayedGraph, **params)
    for number, settings in enumerate(STEPS):
        update(*plain, number, **settings)
        update(*played, number, **settings)
        # In fewer bits, another last bit may be another code.
        same(played[1], plain[1], 2e-2 if "8bit" in params.values() else 2e-3 if "momentum_dtype" in params else 2e-5)
    assert len(PlayedGraph.made) == len(played[1].pieces)
    assert {graph.replays for graph in PlayedGraph.made} == {len(STEPS) - 1}


@pytest.mark.parametrize("settings", [{"dtype": torch.float32}, {"master_dtype": "bfloat16+remainder"},
                                      {"bucket_numel": 10**6}], ids=str)
def test_so_are_those_of_every_form_of_masters(settings):
    plain, played = owned(None, **settings), owned(PlayedGraph, **settings)
    for number, changes in enumerate(STEPS):
        update(*plain, number, **changes)
        update(*played, number, **changes)
        same(played[1], plain[1])


def operations(graph):
    """List the operations of a graph, and the addresses of what was there before it."""
    found = []
    for func, args, kwargs, _ in graph.operations:
        numbers = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
        places = [tensor.data_ptr() for tensor in tensors_in((args, kwargs)) if tensor.data_ptr() in graph.outside]
        found.append((str(func) if hasattr(func, "_schema") else "view", list(map(str, numbers)), places))
    return found


@pytest.mark.parametrize("params", RULES, ids=str)
def test_two_steps_do_the_same_at_the_same_addresses(params):
    """Two captures, with rates, decay, momentum, moments, eps and the factor of gradients changed between them: a
    number that a graph had kept would differ."""
    optimizer, mine = owned(PlayedGraph, **params)
    update(optimizer, mine, 0, **STEPS[0])
    update(optimizer, mine, 1, **STEPS[2])
    first = list(PlayedGraph.made)
    mine._captured._graphs.clear()
    update(optimizer, mine, 2, **STEPS[3])
    second = PlayedGraph.made[len(first):]
    assert len(first) == len(second) == len(mine.pieces)
    for one, other in zip(first, second, strict=True):
        assert len(one.operations) > 10 and operations(one) == operations(other)


def test_a_change_is_captured_again():
    """A parameter that was left out at the capture is updated when it is trained again, and moved states are read
    where they are."""
    plain, played = owned(None), owned(PlayedGraph)
    name = next(piece.name for pieces in plain[1].pieces for piece in pieces)
    for number in range(8):
        left = frozenset([name] if number in (2, 3, 4) else [])
        for each in (plain, played):
            update(*each, number, leave_out=left, **STEPS[number % len(STEPS)])
        same(played[1], plain[1])
    made = len(PlayedGraph.made)
    assert made == 3 * len(played[1].pieces)
    # As ``offload_states`` and ``reload_states`` leave it.
    taken = []
    for form in played[1]._opening[0]:
        storage = form.memory.untyped_storage()
        size, away = storage.nbytes(), storage.clone()
        storage.resize_(0)
        taken.append(torch.empty(size, dtype=torch.uint8, device=CPU))
        storage.resize_(size)
        storage.copy_(away)
    for number in (8, 9, 10):
        for each in (plain, played):
            update(*each, number, **STEPS[2])
        same(played[1], plain[1])
    assert len(PlayedGraph.made) > made


@pytest.mark.parametrize("at", [0, 1, 2])
def test_captures_that_an_error_has_ended_are_made_again(at, monkeypatch):
    """A bucket opens others, whose gradients would be rescaled a second time by a capture beside old ones."""
    shape = {"size": 1, "bucket_numel": 300, "matrix_optimizer": "polargrad"}
    plain, played = owned(None, **shape), owned(PlayedGraph, **shape)
    assert any({0, 3} <= {*sets.buckets} for sets in played[1]._updates[3])
    for each in (plain, played):
        update(*each, 0)
    made, run = [], captured.Captured.run

    def fails(self, index, turn, update):
        if index == at:
            raise MemoryError("at a capture")
        made.append(index)
        run(self, index, turn, update)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(captured.Captured, "run", fails)
        update(*played, 1, **STEPS[1])
    assert made and len(PlayedGraph.made) == len(made)
    # A load follows.
    for name, states in plain[1].states.items():
        for key in ("fp32", *states):
            played[1].set_value(name, key, plain[1].value(name, key).clone())
    for masters in played[1].masters:
        masters.to_values()
    for number in (1, 2, 3):
        for each in (plain, played):
            update(*each, number, **STEPS[number])
        same(played[1], plain[1])


def test_a_watched_update_runs_as_it_is_and_the_next_is_a_replay():
    seen = []

    def around(rule, names, params, states):
        seen.append(rule)
        return unwatched(rule, names, params, states)

    plain, played = owned(None), owned(PlayedGraph)
    for number in range(5):
        watcher = around if number == 3 else unwatched
        for each in (plain, played):
            update(*each, number, around=watcher, **STEPS[number])
        same(played[1], plain[1])
    assert seen and {graph.replays for graph in PlayedGraph.made} == {3}


def test_gradients_stay_where_they_are():
    optimizer, mine = owned(PlayedGraph)
    found = []
    for number in range(3):
        update(optimizer, mine, number)
        found.append([tensor.data_ptr() for tensor in mine.reduced.tensors])
    assert found[0] == found[1] == found[2] and 0 not in found[0]


def test_a_written_weight_is_followed_by_a_replay():
    plain, played = owned(None), owned(PlayedGraph)
    for number in range(5):
        for each in (plain, played):
            if number == 3:
                each[1]._values.tensors[0].mul_(2)
            update(*each, number)
        same(played[1], plain[1])
        assert bool(played[1].written) == bool(plain[1].written) == (number >= 3)


def test_other_devices_have_no_graphs():
    with pytest.raises(ConfigError, match="cuda_graph is true, and the model is on cpu"):
        captured.graphs_of(CPU)


def test_a_played_graph_refuses_what_a_device_refuses():
    graph, value = PlayedGraph(), torch.ones(3, device=CPU)
    with graph.capture():
        doubled = value * 2
        value.add_(doubled)
    assert value.tolist() == [1, 1, 1]
    graph.replay()
    graph.replay()
    assert value.tolist() == [9, 9, 9] and math.isclose(doubled[0], 6)
    with pytest.raises(RuntimeError, match="in a capture"), PlayedGraph().capture():
        value.sum().item()
