"""Corners of steps and of the engine that a rewrite has lost once: errors of one rank on its way, and odd classes."""

import enum
import math
import sys
import threading
import types
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ds_layerwise import engine
from ds_layerwise.engine import inference_only
from ds_layerwise.engine.contract.contract import Name
from ds_layerwise.engine.register import register
from ds_layerwise.errors import ConfigError, LayoutError, StepError
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.planner import plan_layout
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.scratch import Turn
from ds_layerwise.ranks.owned.reductions import ReducedGradients
from ds_layerwise.ranks.sync.bucket_transfers import Wire
from ds_layerwise.ranks.sync.grad_sync import GradSync
from ds_layerwise.zero.step import attention_logits
from ds_layerwise.zero.step.attention_logits import AttentionLogits
from ds_layerwise.zero.step.update import update
from ds_layerwise.zero.step_progress import Interrupted
from tests.support.rooms import rooms

pytestmark = rooms("attention_logits", "comm", "contract", "grad_sync", "inference_only", "register", "update")


class Updating:
    """A run of three buckets, whose parts note what they are asked for, and fail where ``fails`` says."""

    def __init__(self, *fails):
        self.fails, self.calls, self.interrupted = fails, [], Interrupted()
        self.settings = SimpleNamespace(timers=lambda name: SimpleNamespace(start=lambda: None, stop=lambda: None))
        self.owned = SimpleNamespace(pieces=range(3), updating=nullcontext, update=self.noted("update"))
        self.param_sync = SimpleNamespace(launch=self.noted("launch"), leave_pending=self.noted("leave"))
        self.send = self.noted("send")
        self.optimizer = SimpleNamespace(mark_step=self.noted("mark"))
        self.observers = [SimpleNamespace(after_update=self.noted("observe"))] * 2

    def noted(self, what):
        def call(*args, **_):
            self.calls.append(what)
            if what in self.fails:
                raise MemoryError(what)
        return call

    def step(self):
        step = SimpleNamespace(number=3, failed=False)
        with pytest.raises(MemoryError) as error:
            update(self, step, self.observers)
        return str(error.value), step.failed, bool(self.interrupted)


@pytest.mark.parametrize("fails, calls, error", [
    (["leave"], [*["update", "launch"] * 3, "mark", "leave", "observe", "observe"], ("leave", True, False)),
    (["update"], ["update", "send", "observe", "observe"], ("update", True, True)),
    # The first error is the cause of the second.
    (["update", "send"], ["update", "send", "observe", "observe"], ("update", True, True)),
    (["leave", "observe"], [*["update", "launch"] * 3, "mark", "leave", "observe"], ("leave", True, False)),
], ids=lambda value: " and ".join(value) if isinstance(value, list) and len(value) < 3 else None)
def test_an_error_while_weights_are_sent_keeps_no_observer_from_collectives(fails, calls, error):
    run = Updating(*fails)
    assert run.step() == error
    assert run.calls == calls


def test_a_launch_without_memory_begins_again_as_if_it_had_not_begun(monkeypatch):
    """At stage 2: what the bucket held, the averages of the last step, is not added to."""
    monkeypatch.setattr(comm, "size_of", lambda group: 1)
    monkeypatch.setattr(comm, "rank_of", lambda group: 0)
    layout = plan_layout([ParamSpec("w", (4, 4), "float32", True, 10), ParamSpec("b", (5,), "float32", False, 0)], 1,
                         bucket_numel=1)
    params = {"w": nn.Parameter(torch.zeros(4, 4)), "b": nn.Parameter(torch.zeros(5))}
    reduced = ReducedGradients(layout, 0, None, torch.device("cpu"))
    sync = GradSync(params, reduced, wires={1: Wire(None, on_host=True)}, divide_by=1.0,
                         sent_as=["float32"] * 2)
    empty, fails = Turn.empty, []

    def scarce(turn, what, shape, dtype):
        if what in fails:
            fails.remove(what)
            raise torch.OutOfMemoryError(what)
        return empty(turn, what, shape, dtype)

    monkeypatch.setattr(Turn, "empty", scarce)
    for step in range(1, 4):
        sync.reset()
        for name, param in params.items():
            param.grad = torch.full_like(param, float(step))
            sync.accumulate(name, launch=False)
        if step == 2:
            fails.append("travelling")
            with pytest.raises(torch.OutOfMemoryError):
                sync.reduce()
        sync.reduce()
        sync.finish()
        assert all((reduced.piece(name) == step).all() for name in params), step


@pytest.mark.parametrize("first, other, told", [
    (["a (4,)", "b (5,)"], ["a (4,)", "b (5,)", "a (4,)"], r"only rank 1 has a \(4,\)"),
    (["a (4,)", "b (5,)", "b (6,)"], ["a (4,)", "b (5,)"], r"only rank 0 has b \(6,\)"),
])
def test_an_entry_more_at_the_end_is_of_one_rank_only_whatever_it_is_called(first, other, told, monkeypatch):
    """The name of the entry may be that of an entry which both have."""
    barrier, said = threading.Barrier(2), [None, None]

    def gather(value, *, group):
        said[threading.current_thread().name == "rank 1"] = value
        barrier.wait(timeout=20)
        everyone = list(said)
        barrier.wait(timeout=20)
        return everyone

    def differ(name, items):
        with pytest.raises(LayoutError, match=f"the model differs between ranks: {told}; 1 of 2 ranks agree with"):
            comm.same_on_all_ranks("the model", items, group=None)
        right.append(name)

    monkeypatch.setattr(comm, "gather_objects", gather)
    right = []
    threads = [threading.Thread(target=differ, args=(name, items), name=name)
               for name, items in (("rank 0", first), ("rank 1", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == ["rank 0", "rank 1"]


def test_a_logit_that_is_not_finite_does_not_let_other_modules_count_as_never_seen(monkeypatch):
    """The step is tried again, and what was measured in the first attempt was measured."""
    monkeypatch.setattr(attention_logits, "_PATIENCE", 2)
    logits = AttentionLogits.__new__(AttentionLogits)
    logits._updates, logits._last, logits.clip = 0, {"a": 0, "b": 0}, object()
    with pytest.raises(StepError, match="an attention logit of a is not finite"):
        logits._judge({"a": math.inf, "b": 3.0})
    logits._judge({"a": 2.0, "b": -math.inf})
    # One that has given logits may stop to: its implementation of attention was replaced.
    with pytest.raises(StepError, match="got no attention logits of b in 2 updates"):
        logits._judge({"a": 2.0, "b": -math.inf})


class Level(enum.IntEnum):
    ASKED = 0


@pytest.mark.parametrize("stage, asked", [(0, True), (Level.ASKED, True), (False, False), (0.0, False), ("0", False),
                                          (1, False), (None, False)])
def test_a_stage_may_be_of_a_class_of_whole_numbers(stage, asked):
    given = {"zero_optimization": {"stage": stage}, "optimizer": {"type": "LayerWiseMuon", "params": {}}}
    assert inference_only._is_for_asking(given) is asked


@pytest.fixture
def release(monkeypatch):
    """Modules that stand for a DeepSpeed of another release, whose classes lie in several files."""
    for name in ("otherspeed", "otherspeed.engine", "otherspeed.base"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    def save(self, tag):
        pass

    base = type("Base", (), {"save": save, "__module__": "otherspeed.base"})
    engine = type("Engine", (base, nn.Module), {"__module__": "otherspeed.engine"})
    sys.modules["otherspeed.engine"].Engine = engine
    return engine


def test_a_method_may_have_moved_to_a_base_of_the_same_package(release):
    name = Name("otherspeed.engine.Engine.save", "self tag")
    assert name.place() == (release, "save") and name.problem() is None


def test_a_method_that_only_a_class_of_torch_has_is_not_there(release):
    name = Name("otherspeed.engine.Engine.forward", "self x")
    assert name.problem() == "otherspeed.engine.Engine.forward is not there"
    moved = Name("otherspeed.engine.Engine.save", "self tag", was="otherspeed.engine.Engine.load")
    assert moved.problem() is None


@pytest.mark.parametrize("missing, kind", [("deepspeed.runtime.gone", ConfigError), ("triton", ImportError),
                                           (None, ImportError)])
def test_only_what_deepspeed_lacks_is_blamed_on_its_release(missing, kind, monkeypatch):
    """An import that fails within ours, or in another package, says so itself."""
    class Failing:
        def find_spec(self, name, path=None, target=None):
            if name == "ds_layerwise.engine.engine_hooks":
                raise ImportError(f"no {missing}", name=missing)

    monkeypatch.delitem(sys.modules, "ds_layerwise.engine.engine_hooks", raising=False)
    monkeypatch.delattr(engine, "engine_hooks", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Failing(), *sys.meta_path])
    with pytest.raises(kind, match=f"no {missing}") as error:
        register()
    assert type(error.value) is kind
