"""``overlap_param_gather``: whoever uses a parameter in a forward pass has its new value, and so do saves and loads."""

import copy
import ctypes
import functools
import gc
import warnings
import weakref

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import internals
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import arrive_late, assert_same_on_all_ranks, ds_config, start, weights

pytestmark = rooms("param_sync")

STEPS = 3


class Around(nn.Module):
    """A container that uses a weight, and calls nothing."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return F.linear(x, self.inner.weight)


class Layers(nn.Module):
    """A head at the end, which a reader may want at the start."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.second, self.seldom, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.around = Around(nn.Linear(8, 8, bias=False))
        self.around.inner.weight = self.head.weight
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


def copied(model):
    model.read, kept = None, model.read
    twin = copy.deepcopy(model)
    model.read = kept
    return weights(twin)


def written(model):
    """The sum is taken off again, as the reader comes again and writes stay."""
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
    "a deep copy": copied,
    "a copy": lambda m: copy.copy(m.head.weight).detach(),
    "a shallow copy": lambda m: copy.copy(m.head)(X),
    "a state_dict": lambda m: m.state_dict()["head.weight"],
    "its variables": lambda m: m.state_dict(keep_vars=True)["head.weight"].mul(1),
    "words": lambda m: torch.tensor([float(len(repr(m.head.weight))), m.head.weight.tolist()[0][0]]),
    "a module of another": lambda m: m.head(X),
    "a part": lambda m: m.head(m.first(X)),
    "a container's code": lambda m: m.around(X),
    "a load": lambda m: m.load_state_dict(m.state_dict()) and weights(m).clone(),
    "a write": written,
}

#: Readers that a module, rather than torch, lets wait: outside of a forward pass of the model, too.
BY_MODULES = ("a shallow copy", "a state_dict", "its variables", "a module of another", "a part",
              "a container's code", "a load")


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
    def runs(self, overlap, read, *, inside):
        """Values that ``read`` finds, after each step or within each forward pass, and the weights in the end."""
        engine, found, late = engine_of(overlap), [], []
        module = engine.module
        for step in range(STEPS):
            if inside:
                def record(model):
                    late.append(under_way(engine))
                    value = read(model)
                    found.append(value.detach().clone())
                    return value
                module.read = record
            train(engine)
            if not inside:
                late.append(under_way(engine))
                found.append(read(module).detach().clone())
        module.read = None
        # The model's own parameter has arrived before anything inside a forward pass.
        expected = set() if not overlap else ALL - {"scale"} if inside else ALL
        assert late[1:] == [expected] * (STEPS - 1), late
        engine.optimizer.wait_for_params()
        assert_same_on_all_ranks(module)
        return [*found, weights(module)]

    @pytest.mark.parametrize("inside", [False, True], ids=["after a step", "before its module runs"])
    def test_every_reader_has_what_is_new(self, inside, monkeypatch):
        arrive_late(monkeypatch)
        for name in READERS if inside else BY_MODULES:
            try:
                for found, expected in zip(*(self.runs(overlap, READERS[name], inside=inside)
                                             for overlap in (True, False)), strict=True):
                    assert torch.equal(found, expected)
            except Exception as error:
                error.add_note(f"the reader is {name}")
                raise


def graphed(module):
    """Replay a graph in place of ``module.forward``: it reads by address, and calls nothing that is below."""
    weight, bias = module.weight, module.bias
    memory = [(ctypes.c_float * p.numel()).from_address(p.data_ptr()) for p in (weight, bias)]
    one, two = weight.shape

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *_):
            old_weight, old_bias = (torch.tensor(list(each)) for each in memory)
            ctx.save_for_backward(x, old_weight.view(one, two))
            return x @ old_weight.view(one, two).t() + old_bias

        @staticmethod
        def backward(ctx, grad):
            x, old_weight = ctx.saved_tensors
            return grad @ old_weight, grad.t() @ x, grad.sum(0)

    return lambda x: Graphed.apply(x, weight, bias)


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class TestWhatIsUnderWay(DistributedTest):
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
            assert under_way(engine) == ALL
            seen.clear()
        train(engine)
        # The head's weight is read by another before.
        later, last = {"second.weight", "second.bias"}, {"seldom.weight", "seldom.bias"}
        assert seen == {"": ALL - {"scale"}, "first": {"head.weight"} | later | last,
                        "second": {"head.weight"} | last, "seldom": set(), "head": set()}

    def test_nothing_is_under_way_when_a_forward_pass_is_over_or_has_failed(self):
        engine = engine_of(True)
        train(engine)
        with torch.no_grad():
            engine(X, False)
        assert not under_way(engine)
        train(engine)
        engine.module.read = lambda model: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine(X)
        engine.module.read = None
        assert not under_way(engine) and not torch.overrides._get_current_function_mode_stack()

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

    @pytest.mark.parametrize("who", ["a graph", "the model"])
    def test_the_step_waits_for_modules_whose_forward_was_replaced(self, who, monkeypatch):
        arrive_late(monkeypatch)
        found = []
        for overlap in (True, False):
            model = Layers()
            model.second = Block(model.second)
            engine = start(model, ds_config(bucket_numel=1, layerwise={"overlap_param_gather": overlap}))
            train(engine)
            if who == "a graph":
                model.second(X)  # a capture runs it
                model.second.forward = graphed(model.second.inner)
            else:
                model.forward = functools.partial(Layers.forward, model)
            for _ in range(STEPS):
                train(engine)
                late = {name.replace(".inner", "") for name in under_way(engine)}
                assert late == (ALL - {"second.weight", "second.bias"} if overlap and who == "a graph" else set())
            engine.optimizer.wait_for_params()
            found.append(weights(engine.module))
        assert torch.equal(*found)

    def test_a_copy_of_the_model_is_not_the_model(self, monkeypatch):
        arrive_late(monkeypatch)
        engine = engine_of(True)
        train(engine)
        engine.optimizer.wait_for_params()
        twin = copy.deepcopy(engine.module)
        assert torch.equal(weights(twin), weights(engine.module))
        train(engine)
        late = under_way(engine)
        assert torch.equal(twin.head(X), copy.deepcopy(twin.head)(X)) and under_way(engine) == late == ALL
        twin.load_state_dict(twin.state_dict())
        assert under_way(engine) == ALL
        gone = weakref.ref(twin)
        del twin
        gc.collect()
        assert gone() is None

    @pytest.mark.parametrize("case", ["scripted", "compiled"])
    def test_steps_wait_and_say_so_once_where_a_reader_might_be_missed(self, case, monkeypatch, capsys):
        arrive_late(monkeypatch)
        model = Layers()
        if case == "scripted":
            model.seldom = torch.jit.script(model.seldom)
        engine = start(model, ds_config(bucket_numel=1, layerwise={"overlap_param_gather": True}))
        if case == "compiled":
            monkeypatch.setitem(torch._dynamo.utils.counters, "frames", {"total": 1, "ok": 1})
        for _ in range(2):
            train(engine)
            assert not internals.gathers_under_way(engine)
        assert capsys.readouterr().out.count("overlap_param_gather has no effect") == (dist.get_rank() == 0)
        assert_same_on_all_ranks(engine.module)

    def test_nothing_after_the_end(self):
        engine = engine_of(True)
        train(engine)
        engine.destroy()
        assert not internals.gathers_under_way(engine)
        assert_same_on_all_ranks(engine.module)
