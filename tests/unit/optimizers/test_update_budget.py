"""The cost of updates of an owner's matrices of real models: memory beside what is kept, and dispatched operations."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_layerwise.config.sections import Recipes
from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.orthogonalize.batching import FULL_BATCH_NUMEL, MAX_BATCH_NUMEL, batches
from ds_layerwise.plan.forecast.forecast import LayoutReport
from ds_layerwise.plan.forecast.memory import update_bytes
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.owned.update_sets import update_sets
from tests.support.live_memory import LiveMemory
from tests.support.model_specs import bare, routes_of, shipped, specs_in
from tests.support.rooms import rooms

pytestmark = rooms("muon_family", "batching", "newton_schulz", "forecast", "update_sets")

META = torch.device("meta")
HYPER = Hyper(lr=0.1, weight_decay=0.2, momentum=0.9, betas=(0.8, 0.95), eps=1e-8)

#: Experts that are one parameter: gpt-oss-120b's and Qwen3-30B-A3B's.
STACKED = {"gpt-oss": [(128, 2880, 5760), (128, 2880, 2880)], "qwen3-moe": [(128, 2048, 1536), (128, 768, 2048)]}


class Launches(TorchDispatchMode):
    """Counts dispatched operations that are no views; a ``torch._foreach_*`` call is one, and a few on a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += all(each.alias_info is None or each.alias_info.is_write for each in func._schema.returns)
        return func(*args, **(kwargs or {}))


def model_of(name):
    if name not in STACKED:
        return shipped(name)
    return bare({f"{layer}.{i}": shape for layer in range(4) for i, shape in enumerate(STACKED[name])})


def updates_of(layout, rank, routes, *, elsewhere=(), tp_size=1):
    """The names that each call updates of what ``rank`` owns, in the order of buckets, last first."""
    pieces = [list(bucket.pieces(rank)) for bucket in layout.buckets]
    names = {piece.name for held in pieces for piece in held}
    sets = update_sets(pieces, routes, batch_matrices=True,
                       in_place=names - {*elsewhere}, most=MAX_BATCH_NUMEL, tp_size=tp_size)
    return [each.names for of_bucket in reversed(sets) for each in of_bucket if each.route.whole]


def shapes_of(names, routes):
    return [shape for name in names for shape in routes[name].seen(0).values()]


@pytest.mark.parametrize("method, ns_dtype", [("gram", "fp16"), ("gram", "bf16"), ("gram", "fp32"),
                                              ("standard", "fp32")])
@pytest.mark.parametrize("model, ranks, bucket_numel, budget", [
    ("gpt2-124m", 2, 50_000_000, 37), ("qwen3-0.6b", 8, 50_000_000, 38), ("llama-2-7b", 8, 500_000_000, 37),
    ("llama-3-405b", 64, 500_000_000, 37), ("gpt-oss", 2, 500_000_000, 37), ("qwen3-moe", 1, 500_000_000, 37)])
def test_an_update_takes_what_the_table_says_and_few_launches(model, ranks, bucket_numel, budget, method, ns_dtype):
    module, rule = model_of(model), Muon(ns_method=method, ns_dtype=ns_dtype)
    routes = routes_of(module, recipes=Recipes(matrix=rule))
    specs = specs_in(module, routes)
    layout = plan_layout(specs, ranks, bucket_numel=bucket_numel)
    said = update_bytes(layout, routes, "float32")
    work = LayoutReport.of(layout, specs).work
    rank = work.index(max(work))
    peak = launches = num_batches = 0
    for names in updates_of(layout, rank, routes):
        shapes = shapes_of(names, routes)
        values, grads = ([torch.empty(shape, device=META) for shape in shapes] for _ in range(2))
        states = [rule.init_state(value) for value in values]
        with LiveMemory([*values, *grads, *(state["momentum_buffer"] for state in states)]) as memory, \
                Launches() as counted:
            held = memory.now()
            rule.update_(values, grads, states, HYPER)
        peak, launches = max(peak, memory.peak - held), launches + counted.count
        num_batches += len(batches(shapes))
        assert memory.now() == held
    # It is said for float32. Half precision takes 2.5 matrices of 3.25 and more, 3 of 5 where they are square.
    least, most = (0.45, 1) if ns_dtype == "fp32" else (0.2, 0.78)
    assert least < peak / said <= most
    largest = max(math.prod(spec.shape[-2:]) for spec in specs if spec.whole)
    assert peak <= 5 * 4 * max(largest, MAX_BATCH_NUMEL)
    assert launches <= budget * num_batches


@pytest.mark.parametrize("model, ranks, bucket_numel, matrices, calls", [
    ("qwen3-0.6b", 8, 50_000_000, 25, 6), ("qwen3-0.6b", 8, 500_000_000, 25, 4), ("qwen3-0.6b", 64, 50_000_000, 4, 2),
    ("llama-2-7b", 8, 50_000_000, 28, 28)])
def test_owners_that_have_few_of_each_bucket_still_update_them_together(model, ranks, bucket_numel, matrices, calls):
    """A matrix of Llama-2-7B is a full batch by itself."""
    module = model_of(model)
    routes = routes_of(module, recipes=Recipes(matrix=Muon()))
    specs = specs_in(module, routes)
    layout = plan_layout(specs, ranks, bucket_numel=bucket_numel)
    found = []
    for rank in range(ranks):
        updates = updates_of(layout, rank, routes)
        found.append((sum(len(names) for names in updates),
                      sum(len(batches(shapes_of(names, routes))) for names in updates)))
    assert max(found) == (matrices, calls)


def qwen():
    module = shipped("qwen3-0.6b")
    routes = routes_of(module, recipes=Recipes(matrix=Muon()))
    return routes, plan_layout(specs_in(module, routes), 8, bucket_numel=50_000_000)


def test_a_matrix_that_comes_from_elsewhere_joins_no_other_bucket():
    routes, layout = qwen()
    bucket_of = {slot.name: bucket.index for bucket in layout.buckets for slot in bucket.slots}
    far = [names for names in updates_of(layout, 7, routes) if len({bucket_of[name] for name in names}) > 1]
    assert far
    away = far[0][0]
    for names in updates_of(layout, 7, routes, elsewhere=[away]):
        others = {bucket_of[name] for name in names}
        assert len(others) == 1 or bucket_of[away] not in others


def test_parts_of_matrices_fill_a_batch_as_the_wholes_that_are_gathered():
    """With eight parts each, the whole of one is a full batch."""
    routes, layout = qwen()
    bucket_of = {slot.name: bucket.index for bucket in layout.buckets for slot in bucket.slots}
    cut = {name: replace(route, tp_axis=-2) if route.whole else route for name, route in routes.items()}
    blocks = {name: replace(route, recipe=Muon(muon_tp_mode="blockwise")) if route.whole else route
              for name, route in cut.items()}

    def most(routes, tp_size):
        """Elements of matrices of one shape in an update of several buckets, where there are several."""
        found = [0]
        for names in updates_of(layout, 7, routes, tp_size=tp_size):
            shapes = Counter(routes[name].matrix_shape for name in names)
            if len({bucket_of[name] for name in names}) > 1:
                found += [count * math.prod(shape) for shape, count in shapes.items() if count > 1]
        return max(found)

    assert 0 < most(cut, 8) <= FULL_BATCH_NUMEL // 8 < most(blocks, 8) == most(routes, 1) <= FULL_BATCH_NUMEL
    assert update_bytes(layout, cut, "float32", tp_size=8) >= Muon().workspace((2, 1024 * 8, 3072))
