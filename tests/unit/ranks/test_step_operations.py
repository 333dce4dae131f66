"""A step asks nothing of a device, operation by operation, that waits for it, leaves it, or that it cannot do.

The model is on torch's meta device, which has no numbers: whoever asks for one is refused.
"""

import ast
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ds_layerwise
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.optimizers.registry import REGISTRY, names
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.owned.buffers import FlatBuffer, dtype_name
from ds_layerwise.ranks.owned.captured import Numbers
from ds_layerwise.ranks.owned.owned import OneUpdate, Owned, OwnedSettings
from ds_layerwise.ranks.owned.reductions import sum_of_squares
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.step.clip import Decision
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.routing import route_parameters
from tests.support.training import Net

pytestmark = rooms("owned")

#: Of clipping to half the norm.
DECISION = Decision(factor=0.5, frozen=frozenset(), overflow=False, norm=None, factors={}, norms={}, above=None,
                    zeros=None, loss_scale=1.0, clip_grad=1.0)

META = torch.device("meta")

PACKAGE = Path(ds_layerwise.__file__).parent

#: They hand a number, or how many there are of something, to the host.
WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal")


class Watch(TorchDispatchMode):
    """Notes what waits, what takes tensors of two devices, and what touches float64."""

    def __init__(self):
        super().__init__()
        self.waiting, self.across, self.wide = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        name = func.overloadpacket.__name__
        if any(t.device == META for t in tensors):
            if name.startswith(WAITING):
                self.waiting.append(name)
            # A number on the host goes along with a launch, unless it is copied.
            if any(t.device != META and (t.dim() or "copy" in name) for t in tensors):
                self.across.append(name)
            if any(t.dtype == torch.float64 for t in tensors):
                self.wide.append(name)
        return out


def owned(dtype, accumulation, device=META, **params):
    model = Net()
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            # Fake ones cannot be swapped.
            setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device)))
    config = OptimizerConfig.from_section({"type": "LayerWise", "params": {
        "lr": 0.003, "muon_lr": 0.02, "weight_decay": 0.1, **params}})
    optimizer = LayerWiseOptimizer(model.parameters(), config)
    routes = route_parameters(model, optimizer.param_groups, recipes=config.recipes)
    specs = specs_of(((name, tuple(p.shape), dtype_name(dtype)) for name, p in model.named_parameters()), routes)
    layout = plan_layout(specs, 2, bucket_numel=600)
    grads = None if accumulation is None else FlatBuffer(layout, device, {dtype_name(dtype): accumulation})
    settings = OwnedSettings({spec.name: (spec.name,) for spec in specs}, batch_matrices=True, on_host=(),
                             pin_memory=False, master_dtype="float32", rounding_seed=0, peers=None,
                             fast_dtypes=frozenset(), expert_rank=0)
    return optimizer, Owned(routes, FlatBuffer(layout, device).shards(0), grads, settings)


def update_of(optimizer):
    """The first update of a run, after which nothing changes masters."""
    return OneUpdate(optimizer.param_groups, 1, DECISION.factor_of, frozenset())


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("scalar", names(whole=False))
@pytest.mark.parametrize("dtype, ns_dtype, method", [
    (torch.float32, "fp32", "standard"), (torch.bfloat16, "bf16", "gram"), (torch.float16, "fp16", "gram")])
def test_a_step_neither_waits_nor_leaves_the_device(dtype, ns_dtype, method, scalar, wide, monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "is_fp64_supported", lambda self: wide, raising=False)
    optimizer, mine = owned(dtype, None if wide else torch.float32, scalar_optimizer=scalar, ns_dtype=ns_dtype,
                            ns_method=method)
    with torch.no_grad(), mine.updating(), Watch() as watch:
        squares = mine.reduced.sum_of_squares()
        for index in reversed(range(len(mine.layout.buckets))):
            mine.update(index, update_of(optimizer))
    assert (watch.waiting, watch.across) == ([], [])
    assert squares.dtype == (torch.float64 if wide else torch.float32) and bool(watch.wide) is wide


@pytest.mark.parametrize("matrix, scalar", [("muon", "adamw"), ("normuon", "lion")])
@pytest.mark.parametrize("decay", [{"weight_decay_method": "l2"}, {"cautious_weight_decay": True}])
def test_neither_does_weight_decay(matrix, scalar, decay):
    optimizer, mine = owned(torch.bfloat16, None, matrix_optimizer=matrix, scalar_optimizer=scalar, **decay)
    with torch.no_grad(), mine.updating(), Watch() as watch:
        for index in reversed(range(len(mine.layout.buckets))):
            mine.update(index, update_of(optimizer))
    assert (watch.waiting, watch.across, watch.wide) == ([], [], [])


@pytest.mark.parametrize("matrix, scalar", [
    (matrix, "lion") for matrix in names(whole=True) if REGISTRY[matrix].can_be_captured] + [
    ("muon", scalar) for scalar in names(whole=False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_does_a_captured_update(matrix, scalar, dtype):
    optimizer, mine = owned(dtype, None, matrix_optimizer=matrix, scalar_optimizer=scalar)
    numbers = Numbers(META)
    with torch.no_grad(), mine.updating(), Watch() as watch:
        for index in reversed(range(len(mine.layout.buckets))):
            mine._update(index, update_of(optimizer), numbers)
    assert (watch.waiting, watch.across) == ([], []) and numbers._functions


class Counts(TorchDispatchMode):
    """Lets the host read its own numbers, all of which are 1, as counts of steps; and notes who asks the device."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            self.asked += args[0].device.type != "cpu"
            return 1.0
        return func(*args, **(kwargs or {}))


class TestADeviceMadeInPython(DistributedTest):
    """Fake tensors of a device that torch knows nothing of, which refuse any of another device beside them; in a
    process of its own, as torch takes one such device for good."""

    world_size = 1

    def test_every_rule_stays_on_it(self):
        backend_registration._setup_privateuseone_for_python_backend("made")
        made, asks = torch.device("made:0"), set()
        for matrix, scalar in [*((name, "lion") for name in names(whole=True)),
                               *(("muon", name) for name in names(whole=False))]:
            for dtype in (torch.float32, torch.bfloat16):
                with torch.no_grad(), FakeTensorMode(), Counts() as counts:
                    optimizer, mine = owned(dtype, None, made, matrix_optimizer=matrix, scalar_optimizer=scalar)
                    with mine.updating():
                        squares = mine.reduced.sum_of_squares()
                        for index in reversed(range(len(mine.layout.buckets))):
                            mine.update(index, update_of(optimizer))
                    assert squares.device == made, (matrix, scalar, dtype)
                    asks |= {matrix} if counts.asked else set()
        # torch's eigenvalues wait by themselves.
        assert asks == {"soap", "kl_soap", "shampoo"}
        with FakeTensorMode(), pytest.raises(RuntimeError, match="made:0"):
            torch.ones(3, device=made) + torch.ones(3, device="cpu")


def test_the_watch_sees_what_it_is_for():
    a, b = torch.ones(3, device=META), torch.ones(3, device="cpu")
    with Watch() as watch:
        a.double()
        a.copy_(b)
        torch.empty(3, device="cpu").double()
        with pytest.raises(RuntimeError):
            a.sum().item()
        with pytest.raises((RuntimeError, NotImplementedError)):
            a.nonzero()
    assert (set(watch.wide), watch.across) == ({"_to_copy"}, ["copy_"])


class Largest(TorchDispatchMode):
    """Notes the largest input of a norm, which copies it as a whole into another dtype."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm" in func.overloadpacket.__name__:
            self.numel = max(self.numel, *(t.numel() for t in tree_leaves(args) if isinstance(t, Tensor)))
        return func(*args, **(kwargs or {}))


def test_the_norm_of_a_large_piece_takes_no_copy_of_it():
    with Largest() as largest:
        sum_of_squares([torch.empty(2**29, dtype=torch.float32, device=META)], META)
    assert 0 < largest.numel <= 2**24


@pytest.mark.parametrize("factor", [1.0, 1e30, 1e-30])
def test_the_norm_in_parts_is_the_norm(factor):
    """The values are whole numbers, over the ends of several parts."""
    values = torch.arange(-5, 6, dtype=torch.float32, device="cpu").repeat(2**20) * factor
    expected = 2**20 * 110 * float(torch.tensor(factor, dtype=torch.float32)) ** 2
    assert float(sum_of_squares([values], values.device)) == pytest.approx(expected, rel=1e-6)


def test_no_number_of_the_host_is_copied_to_a_device():
    """``torch.tensor(..., device=...)`` and ``new_tensor`` copy pageable memory, for which the host waits: torch does
    so below the operations that :class:`Watch` sees. ``full`` and its like are launches."""
    copies = []
    for folder in ("optimizers", "orthogonalize", "parallel", "ranks", "zero"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = getattr(getattr(node, "func", None), "attr", None)
                device = next((ast.unparse(each.value) for each in getattr(node, "keywords", ())
                               if each.arg == "device"), None)
                if name == "new_tensor" or (name in ("tensor", "as_tensor") and device != "'cpu'"):
                    copies.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert not copies
