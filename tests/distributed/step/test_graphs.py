"""Graphs that a backward pass runs through: more than once, through one parameter in several places, with hooks of the
user's own. Every gradient is compared with plain autograd's, bit for bit."""

import copy
import functools
from dataclasses import dataclass

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.utils import ModelOutput

from ds_layerwise.errors import StepError
from tests.support.harness import DistributedTest
from tests.support.reference import trainable
from tests.support.rooms import rooms
from tests.support.training import allow_fp16, assert_same_on_all_ranks, ds_config, start, whole_gradients

pytestmark = rooms("grad_sync", "param_guard", "gradient_share")

STEPS = 2


class Twice(nn.Module):
    """A model that runs one module twice, and uses one weight in two places."""

    def __init__(self, *, reentrant=None, kind=tuple):
        super().__init__()
        torch.manual_seed(1)
        self.reentrant, self.kind = reentrant, kind
        self.first, self.shared, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def body(self, x):
        x = torch.tanh(self.shared(torch.tanh(self.other(self.shared(x)))))
        return F.linear(x, self.other.weight)

    def forward(self, x):
        x = self.first(x)
        x = self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)
        loss, other = x.square().mean(), x.abs().mean()
        return self.kind(loss, other) if self.kind is not tuple else (loss, other)


def batch(step, micro, rank):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def plain_gradients(module, passes, *, stage, gas, with_module=False):
    """The average of the ranks' gradients, summed in the order in which they are reduced.

    Args:
        passes: of a rank, the backward passes of a step: pairs of a micro-batch and a function of the model's outputs,
            or, ``with_module``, of the model and these.
    """
    size = dist.get_world_size()
    grads = []
    for rank in range(size):
        grads.append([])
        for inputs, loss in passes(rank):
            plain = copy.deepcopy(module)
            (loss(*[plain] * with_module, plain(inputs)) / gas).backward()
            grads[-1].append({name: p.grad for name, p in trainable(plain).items()})
    total = {}
    for name in trainable(module):
        of = [[g[name] for g in of_rank] for of_rank in grads]
        # Ranks' sums are made in float32.
        parts = ([sum(of_rank).float() for of_rank in of] if stage == 1 else
                 [sum(grad.float() for grad in of_all) for of_all in zip(*of, strict=True)])
        total[name] = sum(parts) / size
    return total


def assert_gradients(engine, expected):
    for name, value in whole_gradients(engine).items():
        assert torch.equal(value, expected[name].flatten()), name


def engine_of(module, stage, *, gas=1, overlap=True, **changes):
    return start(module, ds_config(stage=stage, gas=gas, overlap=overlap, bucket_numel=1, **changes))


def compare(engine, loss, begin, *, stage, gas, steps=STEPS):
    """Steps of ``gas`` micro-batches, each with a graph of its own: the gradients are plain autograd's."""
    for step in range(steps):
        expected = plain_gradients(engine.module, lambda rank: [
            (batch(step, micro, rank), loss) for micro in range(gas)], stage=stage, gas=gas)
        for micro in range(gas):
            begin(engine, loss(engine(batch(step, micro, dist.get_rank()))))
            if micro == gas - 1:
                assert_gradients(engine, expected)
            engine.step()


def first(outputs):
    return outputs[0]


def second(outputs):
    return outputs[1]


WAYS = [(True, True), (False, False)]


def backward(engine, loss, *, direct, again=False):
    """``engine.backward``, or autograd's own."""
    loss.backward(retain_graph=again) if direct else engine.backward(loss, retain_graph=again)


class TestOneGraphTwice(DistributedTest):
    @pytest.mark.parametrize("losses", [(first, first), (first, second)])
    @pytest.mark.parametrize("by_hand", [False, True], ids=["two micro-batches", "a boundary set by hand"])
    def test_each_pass_counts_once(self, stage, losses, by_hand):
        gas = 1 if by_hand else 2
        for overlap, direct in WAYS:
            engine = engine_of(Twice(), stage, gas=gas, overlap=overlap)
            for step in range(STEPS):
                expected = plain_gradients(engine.module, lambda rank: [(batch(step, 0, rank), f) for f in losses],
                                           stage=stage, gas=gas)
                outputs = engine(batch(step, 0, dist.get_rank()))
                for micro in range(2):
                    if by_hand:
                        engine.set_gradient_accumulation_boundary(micro == 1)
                    backward(engine, losses[micro](outputs), direct=direct, again=micro == 0)
                    if micro:
                        assert_gradients(engine, expected)
                    if micro or not by_hand:
                        engine.step()
            assert_same_on_all_ranks(engine.module)
            engine.destroy()

    def test_both_losses_at_once(self, stage):
        for gas in (1, 2):
            engine = engine_of(Twice(), stage, gas=gas)
            for step in range(STEPS):
                expected = plain_gradients(engine.module, lambda rank: [
                    (batch(step, micro, rank), sum) for micro in range(gas)], stage=stage, gas=gas)
                for micro in range(gas):
                    torch.autograd.backward(engine(batch(step, micro, dist.get_rank())))
                    if micro == gas - 1:
                        assert_gradients(engine, expected)
                    engine.step()
            engine.destroy()

    def test_twice_at_the_boundary(self, stage):
        """Stage 1 reduces once a step."""
        engine = engine_of(Twice(), stage)
        expected = plain_gradients(engine.module, lambda rank: [(batch(0, 0, rank), f) for f in (first, second)],
                                   stage=stage, gas=1)
        outputs = engine(batch(0, 0, dist.get_rank()))
        engine.backward(outputs[0], retain_graph=True)
        engine.backward(outputs[1])
        if stage == 2:
            assert_gradients(engine, expected)
        else:
            with pytest.raises(StepError, match="got a gradient after its bucket . was reduced"):
                engine.step()


class TestUsedTwice(DistributedTest):
    def test_modules_and_weights_used_twice_also_under_checkpointing(self, stage):
        for gas, overlap in ((1, False), (2, True)):
            for reentrant, direct in ((None, True), (None, False), (True, True), (True, False), (False, True)):
                engine = engine_of(Twice(reentrant=reentrant), stage, gas=gas, overlap=overlap)
                compare(engine, first, functools.partial(backward, direct=direct), stage=stage, gas=gas)
                engine.destroy()


@dataclass
class Plain:
    """A class that the engine does not look into, so that it hooks no tensor of it."""

    loss: torch.Tensor
    other: torch.Tensor


def its_loss(outputs):
    return outputs.loss


class TestOutputs(DistributedTest):
    def test_a_dataclass_needs_the_engines_backward(self, stage):
        for gas, overlap in ((1, True), (2, False), (2, True)):
            engine = engine_of(Twice(kind=Plain), stage, gas=gas, overlap=overlap)
            compare(engine, its_loss, functools.partial(backward, direct=False), stage=stage, gas=gas)
            with pytest.raises(StepError, match="before the gradients were reduced"):
                for micro in range(gas):
                    engine(batch(0, micro, dist.get_rank())).loss.backward()
                    engine.step()
            engine.destroy()

    def test_a_loss_that_is_computed_outside(self, stage):
        """Every way to begin a backward pass from outputs that are no scalars counts them once."""
        for begin in (lambda engine, out: engine.backward(out.square().sum()),
                      lambda engine, out: out.square().sum().backward(),
                      lambda engine, out: out.backward(2 * out.detach()),
                      lambda engine, out: engine.scale(out.square().sum()).backward(),
                      lambda engine, out: engine.backward(out.square().sum() / 2, scale_wrt_gas=False)):
            engine = engine_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), stage, gas=2)
            expected = plain_gradients(engine.module, lambda rank: [
                (batch(0, micro, rank), lambda out: out.square().sum()) for micro in range(2)], stage=stage, gas=2)
            for micro in range(2):
                begin(engine, engine(batch(0, micro, dist.get_rank())))
                if micro:
                    assert_gradients(engine, expected)
                engine.step()
            engine.destroy()


class Layers(nn.Module):
    """Outputs that depend on one another, as a transformer's: a loss on logits, these on hidden states."""

    def __init__(self, kind, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.kind, self.layers = kind, nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for _ in range(3))

    def forward(self, x):
        x = x.to(self.layers[0].weight.dtype)
        states = [x := torch.tanh(layer(x)) for layer in self.layers]
        return self.kind(loss=x.square().mean(), logits=x, hidden_states=tuple(states))


@dataclass
class LayersOutput(ModelOutput):
    """The outputs of a transformer with ``output_hidden_states``."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None


def as_tuple(loss, logits, hidden_states):
    return loss, logits, hidden_states


def nested(loss, logits, hidden_states):
    return {"loss": loss, "more": [{"logits": logits}, hidden_states]}


KINDS = {"ModelOutput": (LayersOutput, lambda out: (out.loss, out.logits, out.hidden_states)),
         "tuple": (as_tuple, lambda out: out), "dict": (dict, lambda out: tuple(out.values())),
         "nested": (nested, lambda out: (out["loss"], out["more"][0]["logits"], out["more"][1]))}

#: Losses of what a model returns, and of its parameters.
LOSSES = {"its own": lambda module, loss, logits, states: loss,
          "outside": lambda module, loss, logits, states: logits.sum(),
          "several outputs": lambda module, loss, logits, states: loss + states[0].square().sum() + logits.sum(),
          "a penalty": lambda module, loss, logits, states: loss + module.layers[1].weight.square().sum()}

#: Backward passes that DeepSpeed does not start itself, and one that it does.
BEGINS = {"by hand": lambda engine, loss: loss.backward(),
          "scaled": lambda engine, loss: engine.scale(loss).backward(),
          "for some": lambda engine, loss: loss.backward(inputs=[*engine.module.parameters()]),
          "engine": lambda engine, loss: engine.backward(loss)}


class TestSeveralOutputs(DistributedTest):
    """A gradient is divided by the number of micro-batches once, whatever it passes on its way."""

    def check(self, stage, kind, loss, begin, *, gas=4, dtype=torch.float32, scale=1, swap=False, **changes):
        make, outputs_of = KINDS[kind]

        def loss_of(module, outputs):
            return LOSSES[loss](module, *outputs_of(outputs))

        engine = engine_of(Layers(make, dtype), stage, gas=gas, **changes)
        expected = plain_gradients(engine.module, lambda rank: [
            (batch(0, micro, rank), lambda module, outputs: scale * loss_of(module, outputs)) for micro in range(gas)],
            stage=stage, gas=gas, with_module=True)
        for micro in range(gas):
            outputs = engine(batch(0, micro, dist.get_rank()))
            if swap and micro in (0, 2):
                # A float32 average comes and goes, between the passes of a micro-batch.
                kept = {param: param.data for param in engine.module.parameters()}
                for param, data in kept.items():
                    param.data = data.float()
                    param.data = data
            BEGINS[begin](engine, loss_of(engine.module, outputs))
            if micro == gas - 1:
                assert_gradients(engine, expected)
            engine.step()
        engine.destroy()

    def test_outputs_in_every_container(self, stage):
        for kind in KINDS:
            self.check(stage, kind, "its own", "by hand")

    def test_every_loss_and_every_way_to_begin(self, stage):
        for loss, begin in [*zip(LOSSES, BEGINS, strict=True), *zip(LOSSES, reversed(BEGINS), strict=True)]:
            self.check(stage, "ModelOutput", loss, begin, gas=2)

    def test_bf16_and_a_scaled_loss(self, stage):
        allow_fp16()
        for begin, swap in (("by hand", False), ("engine", False), ("by hand", True), ("scaled", True)):
            self.check(stage, "ModelOutput", "several outputs", begin, swap=swap, dtype=torch.bfloat16,
                       bf16={"enabled": True})
        for begin in ("scaled", "engine"):
            self.check(stage, "ModelOutput", "several outputs", begin, dtype=torch.float16, scale=2**6, fp16={
                "enabled": True, "initial_scale_power": 6})

    def test_gradients_asked_of_autograd_are_not_divided(self, stage):
        engine = engine_of(Layers(LayersOutput), stage, gas=4)
        outputs = engine(batch(0, 0, 0))
        wanted = [engine.module.layers[0].weight, outputs.hidden_states[0]]
        got = torch.autograd.grad(outputs.loss, wanted, retain_graph=True)
        plain = Layers(LayersOutput)
        outputs = plain(batch(0, 0, 0))
        expected = torch.autograd.grad(outputs.loss, [plain.layers[0].weight, outputs.hidden_states[0]])
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))

    def test_together_and_with_another_number_of_micro_batches(self, stage):
        """Gradients that stay on parameters are not divided again."""
        engine = engine_of(Layers(LayersOutput), stage)
        engine.set_train_batch_size(4 * dist.get_world_size())
        expected = plain_gradients(engine.module, lambda rank: [
            (batch(0, micro, rank), lambda outputs: outputs.loss) for micro in range(4)], gas=4, stage=stage)
        with engine.coalesce_grad_reduction():
            for micro in range(4):
                backward(engine, engine(batch(0, micro, dist.get_rank())).loss, direct=micro % 2 == 0)
        for name, value in whole_gradients(engine).items():
            torch.testing.assert_close(value, expected[name].flatten(), msg=name)


class TestHooks(DistributedTest):
    """Hooks of the user's own."""

    def test_a_hook_on_a_parameter_changes_its_gradient(self, stage):
        for gas, overlap, direct in ((1, False, False), (2, True, False), (2, False, True)):
            module, seen = Twice(), []

            def double(grad):
                seen.append(grad.clone())
                return 2 * grad

            module.shared.weight.register_hook(double)
            engine = engine_of(module, stage, gas=gas, overlap=overlap)
            module.first.weight.register_hook(lambda grad: torch.zeros_like(grad))
            plain = Twice()
            expected = plain_gradients(plain, lambda rank: [(batch(0, micro, rank), first) for micro in range(gas)],
                                     gas=gas, stage=stage)
            for micro in range(gas):
                loss = first(engine(batch(0, micro, dist.get_rank())))
                loss.backward() if direct else engine.backward(loss)
                plain.zero_grad()
                (first(plain(batch(0, micro, dist.get_rank()))) / gas).backward()
                assert torch.equal(seen[-1], plain.shared.weight.grad)  # this rank's, of this micro-batch
                if micro == gas - 1:
                    expected["shared.weight"] = 2 * expected["shared.weight"]
                    expected["first.weight"] = torch.zeros_like(expected["first.weight"])
                    assert_gradients(engine, expected)
                engine.step()
            assert len(seen) == gas
            engine.destroy()

    def test_a_hook_after_accumulation(self, stage):
        """A hook that was there first sees, and may change, the gradient of this rank and micro-batch."""
        module, plain, before, after = Twice(), Twice(), [], []

        def halve(p):
            before.append(p.grad.clone())
            p.grad.mul_(0.5)

        module.shared.weight.register_post_accumulate_grad_hook(halve)
        engine = engine_of(module, stage, gas=2)
        module.shared.weight.register_post_accumulate_grad_hook(lambda p: after.append(p.grad))
        expected = plain_gradients(plain, lambda rank: [(batch(0, micro, rank), first) for micro in range(2)], gas=2,
                                   stage=stage)
        expected["shared.weight"] = expected["shared.weight"] / 2
        for micro in range(2):
            engine.backward(first(engine(batch(0, micro, dist.get_rank()))))
            plain.zero_grad()
            (first(plain(batch(0, micro, dist.get_rank()))) / 2).backward()
            assert torch.equal(before[-1], plain.shared.weight.grad)
            if micro == 1:
                assert_gradients(engine, expected)
            engine.step()
        if stage == 1:  # at stage 2 it is there until its bucket is complete
            assert after == [None, None]

    def test_hooks_of_modules(self, stage):
        engine, seen = engine_of(Twice(), stage), []
        plain = Twice()
        for module, notes in ((engine.module, seen), (plain, plain_seen := [])):
            def triple(_, into, out, notes=notes):
                notes.append(out[0].clone())
                return tuple(3 * grad for grad in into)

            module.shared.register_full_backward_hook(triple)
        expected = plain_gradients(plain, lambda rank: [(batch(0, 0, rank), first)], stage=stage, gas=1)
        plain_seen.clear()
        engine.backward(first(engine(batch(0, 0, dist.get_rank()))))
        first(plain(batch(0, 0, dist.get_rank()))).backward()
        assert_gradients(engine, expected)
        assert len(seen) == 2 and all(map(torch.equal, seen, plain_seen))
