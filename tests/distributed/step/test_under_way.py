"""``overlap_param_gather``: whoever reads or writes a parameter has its new value, in a forward pass and outside."""

import copy
import ctypes
import gc
import threading
import warnings
import weakref

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import eager_transforms

from ds_layerwise.ranks import comm
from ds_layerwise.ranks.wires import Wire
from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import assert_same_on_all_ranks, ds_config, start, weights

pytestmark = rooms("under_way", "param_sync")

STEPS = 3


class Layers(nn.Module):
    """A head at the end, which a reader may want at the start."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.second, self.seldom, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.read = None

    def forward(self, x, seldom=True):
        if self.read is not None:
            x = x + self.read(self).sum() * 1e-3
        x = torch.tanh(self.first(x)) * self.scale
        x = self.second(x) + F.linear(x, self.head.weight.t())
        return self.head(self.seldom(x) if seldom else x).square().mean()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


def plain(forward):
    """A call of the model by itself, as a reader that is inside it would call itself."""
    def read(model):
        kept, model.read = model.read, None
        try:
            return forward(model)
        finally:
            model.read = kept
    return read


def by_pointer(model):
    weight = model.head.weight
    memory = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return torch.tensor(list(memory))


def in_a_thread(model):
    found = []
    thread = threading.Thread(target=lambda: found.append(model.head.weight.detach().clone()))
    thread.start()
    thread.join()
    return found[0]


def copied(model):
    model.read, kept = None, model.read
    twin = copy.deepcopy(model)
    model.read = kept
    assert all(type(p) is nn.Parameter for p in [*twin.parameters(), copy.deepcopy(twin.scale)])
    assert type(type(twin.scale)(torch.ones(2))) is nn.Parameter
    return weights(twin)


def written(model):
    """What is added stays; the reader comes again, so that it is taken off again."""
    model.head.weight.data.add_(1)
    found = weights(model).clone()
    model.head.weight.data.sub_(1)
    return found


def linearized(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a graph that it makes itself
        return torch.func.linearize(torch.square, model.head.weight)[1](torch.ones(8, 8))


X = torch.linspace(-1, 1, 16).view(2, 8)
READERS = {
    "an embedding": lambda m: F.embedding(torch.tensor([0, 5]), m.head.weight),
    "a penalty": lambda m: sum(p.square().sum() for p in m.parameters()),
    "many at once": lambda m: torch.stack(torch._foreach_norm([m.scale, m.head.weight, m.second.bias])),
    "a list": lambda m: torch.cat([m.second.weight, m.head.weight]),
    "a keyword": lambda m: F.linear(X, weight=m.head.weight, bias=m.second.bias),
    "a functional call": plain(lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (X, ))),
    "a transform": plain(lambda m: torch.func.grad(lambda p: torch.func.functional_call(m, p, (X, )))(
        dict(m.named_parameters()))["second.weight"]),
    "a transform of a weight": lambda m: torch.func.grad(lambda weight: weight.square().sum())(m.head.weight),
    "a map": lambda m: torch.func.vmap(torch.sum)(m.head.weight),
    "a map of a closure": lambda m: torch.func.vmap(lambda x: m.head.weight @ x)(X),
    "forward mode": lambda m: torch.func.jvp(torch.square, (m.head.weight, ), (torch.ones(8, 8), ))[1],
    "a Jacobian": lambda m: torch.func.jacrev(lambda weight: weight.square().sum(0))(m.head.weight),
    "a functionalized function": lambda m: torch.func.functionalize(lambda weight: weight * 2)(m.head.weight),
    "a linearized function": linearized,
    "a function of autograd": lambda m: Product.apply(X, m.head.weight),
    "numpy": lambda m: torch.from_numpy(m.head.weight.detach().numpy().copy()),
    "a pointer": by_pointer,
    "a thread": in_a_thread,
    "a deep copy": copied,
    "a copy": lambda m: copy.copy(m.head.weight).detach(),
    "a shallow copy": lambda m: copy.copy(m.head)(X),
    "a state_dict": lambda m: m.state_dict()["head.weight"],
    "its variables": lambda m: m.state_dict(keep_vars=True)["head.weight"].mul(1),
    "words": lambda m: torch.tensor([float(len(repr(m.head.weight))), m.head.weight.tolist()[0][0]]),
    "a module of another": lambda m: m.head(X),
    "a write": written,
}

#: What is kept from before the first step, and read after each.
KEPT = {
    "data": lambda m: m.head.weight.data,
    "a state_dict": lambda m: m.state_dict()["head.weight"],
    "a view": lambda m: m.head.weight.detach()[2:5].t(),
    "the parameter": lambda m: m.head.weight,
    "a storage": lambda m: torch.empty(0).set_(m.head.weight.untyped_storage(), m.head.weight.storage_offset(), (64, )),
}


def arrive_late(monkeypatch):
    """Nothing is sent before somebody waits for it: who does not, is sure to read what is old."""
    gather = Wire.gather

    def late(wire, memory, bucket):
        return comm.Pending(finish=lambda: gather(wire, memory, bucket).wait())

    monkeypatch.setattr(Wire, "gather", late)


def engine_of(overlap, **changes):
    return start(Layers(), ds_config(bucket_numel=1, layerwise={"overlap_param_gather": overlap}, **changes))


def train(engine, seldom=True):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(engine.global_steps + 10 * dist.get_rank()))
    engine.backward(engine(x, seldom))
    engine.step()


def under_way(engine):
    """The names of the parameters that have not arrived."""
    buckets = engine.optimizer.layout.buckets
    return {slot.name for index in internals.gathers_under_way(engine) for slot in buckets[index].slots}


ALL = {"first.weight", "first.bias", "scale", "second.weight", "second.bias", "seldom.weight", "seldom.bias",
       "head.weight"}


class TestReaders(DistributedTest):
    world_size = 2

    def runs(self, overlap, read, *, inside, kept=False):
        """What ``read`` finds, after each step or within each forward pass, and the weights in the end."""
        engine, found, late = engine_of(overlap), [], []
        module = engine.module
        if kept:
            held = read(module)
        for step in range(STEPS):
            if inside:
                def record(model):
                    late.append(under_way(engine))
                    value = held if kept else read(model)
                    found.append(value.detach().clone())
                    return value
                module.read = record
            train(engine)
            if not inside:
                late.append(under_way(engine))
                found.append((held if kept else read(module)).detach().clone())
        module.read = None
        # Where it is inside, the model's own parameter has arrived.
        expected = ALL - {"scale"} if inside else ALL
        if not overlap or (kept and held is not module.head.weight):
            expected = set()
        assert late[1:] == [expected] * (STEPS - 1), late
        engine.optimizer.wait_for_params()
        assert all(type(p) is nn.Parameter for p in module.parameters())
        assert type(eager_transforms._grad_increment_nesting) is type(torch._C._functorch._grad_increment_nesting)
        assert_same_on_all_ranks(module)
        return [*found, weights(module)]

    def compare(self, *args, **kwargs):
        for found, expected in zip(self.runs(True, *args, **kwargs), self.runs(False, *args, **kwargs), strict=True):
            assert torch.equal(found, expected)

    def test_that_nothing_is_left_to_overlap_is_said_once(self, capsys):
        engine = engine_of(True)
        capsys.readouterr()
        for _ in range(3):
            train(engine)
            torch.func.vmap(torch.square)(X)
            assert not under_way(engine)
        assert capsys.readouterr().out.count("a transform of torch.func") == (dist.get_rank() == 0)

    @pytest.mark.parametrize("inside", [False, True], ids=["after a step", "before its module runs"])
    def test_every_reader_has_what_is_new(self, inside, monkeypatch):
        arrive_late(monkeypatch)
        for name, read in READERS.items():
            try:
                self.compare(read, inside=inside)
            except Exception as error:
                error.add_note(f"the reader is {name}")
                raise

    def test_what_looks_past_the_parameter_is_found_before(self, monkeypatch):
        arrive_late(monkeypatch)
        for name, read in KEPT.items():
            try:
                self.compare(read, inside=False, kept=True)
            except Exception as error:
                error.add_note(f"kept is {name}")
                raise


class Own(nn.Parameter):
    """A parameter of a class that somebody else has made."""


class TestWhatIsUnderWay(DistributedTest):
    world_size = 2

    def test_each_module_waits_for_its_own(self):
        engine, seen = engine_of(True), {}
        for name, module in engine.module.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: seen.update({name: under_way(engine)}))
        engine.offload_states()
        engine.reload_states()
        for _ in range(2):
            train(engine)
            assert under_way(engine) == ALL
            engine.zero_grad()
            engine.module.zero_grad(set_to_none=False)
            engine.module.train()
            [p.requires_grad_() for p in engine.module.parameters() if p.is_leaf and p.grad is None and p.numel() > 3]
            assert under_way(engine) == ALL
            seen.clear()
        train(engine)
        # The head's weight is read by another before.
        later, last = {"second.weight", "second.bias"}, {"seldom.weight", "seldom.bias"}
        assert seen == {"": ALL - {"scale"}, "first": {"head.weight"} | later | last,
                        "second": {"head.weight"} | last, "seldom": set(), "head": set()}

    def test_an_update_never_writes_to_it(self):
        engine, written_while = engine_of(True), set()
        owned = internals.owned(engine)
        update = owned.update

        def recording(index, *args, **options):
            written_while.update({index} & internals.gathers_under_way(engine).keys())
            update(index, *args, **options)

        owned.update = recording
        for seldom in (True, False, False):
            train(engine, seldom)
            assert under_way(engine) == ALL
        assert not written_while

    def test_a_part_of_the_model(self, monkeypatch):
        arrive_late(monkeypatch)
        found = []
        for overlap in (True, False):
            engine = engine_of(overlap)
            for _ in range(STEPS):
                engine.backward(engine.module.second(X).square().mean())
                engine.step()
                found.append(engine.module.head(engine.module.first(X)).detach())
        for value, expected in zip(found[:STEPS], found[STEPS:], strict=True):
            assert torch.equal(value, expected)

    def test_a_copy_of_the_model_is_not_the_model(self, monkeypatch):
        arrive_late(monkeypatch)
        engine = engine_of(True)
        train(engine)
        twin = copy.deepcopy(engine.module)
        assert torch.equal(weights(twin), weights(engine.module)) and not under_way(engine)
        train(engine)
        before = twin(X)
        assert under_way(engine) == ALL and torch.equal(twin(X), before)
        twin.load_state_dict(twin.state_dict())
        assert under_way(engine) == ALL
        gone = weakref.ref(twin)
        del twin
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize("case", ["a class of its own", "scripted", "compiled"])
    def test_where_a_reader_might_be_missed_the_step_waits(self, case, monkeypatch):
        arrive_late(monkeypatch)
        model = Layers()
        if case == "a class of its own":
            model.scale = Own(torch.ones(8))
        if case == "scripted":
            model.seldom = torch.jit.script(model.seldom)
        engine = start(model, ds_config(bucket_numel=1, layerwise={"overlap_param_gather": True}))
        if case == "compiled":
            monkeypatch.setitem(torch._dynamo.utils.counters, "frames", {"total": 1, "ok": 1})
        for _ in range(2):
            train(engine)
            assert not internals.gathers_under_way(engine)
        assert_same_on_all_ranks(engine.module)

    def test_nothing_after_the_end(self):
        engine = engine_of(True)
        train(engine)
        engine.destroy()
        assert not internals.gathers_under_way(engine)
        assert all(type(p) is nn.Parameter for p in engine.module.parameters())
        assert_same_on_all_ranks(engine.module)
