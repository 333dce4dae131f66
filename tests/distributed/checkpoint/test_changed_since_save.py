"""Changes between a save and a resume, of the model and of how it is trained, in every form of checkpoint."""

import json
import re
from collections import OrderedDict

import deepspeed.comm as dist
import pytest
import torch
from torch import nn

from ds_layerwise.errors import LayerWiseError
from tests.support import internals
from tests.support.checkpoints import assert_equal_states, masters, whole_states
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    MATRICES,
    Net,
    allow_fp16,
    assert_same_on_all_ranks,
    ds_config,
    start,
    train_engine,
    whole,
)
from tests.support.universal import convert
from tests.support.versions import needs

pytestmark = rooms("reshard")


#: By the form of a checkpoint, its tag.
TAGS = {"regular": "saved", "direct": "saved_universal", "converted": "converted"}


class Plus(Net):
    """With a matrix and a vector more."""

    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(12, 5)
        # The head is found by its place at the end.
        self.head = self._modules.pop("head")


class Wrapped(nn.Module):
    """The same parameters under longer names, and one under another."""

    def __init__(self, **kwargs):
        super().__init__()
        self.body = Net(**kwargs)
        self.body._modules = {"cube" if name == "square" else name: child
                              for name, child in self.body._modules.items()}

    def forward(self, place):
        return self.body(place)


def save(module, folder, *, steps=2, **config):
    """Train ``module`` and save it in all forms; returns its engine."""
    engine = train_engine(start(module, ds_config(layerwise={"save_universal": True}, **config)), steps)
    engine.save_checkpoint(folder, tag="saved")
    convert(folder / "saved", folder / "converted")
    return engine


def values(engine):
    """Masters and states of the whole model, and everything in the module, copies."""
    module = {(name, "module"): value.clone() for name, value in engine.module.state_dict().items()}
    return whole_states(engine) | module


def assert_refused(engine, folder, message, **options):
    """Loading any form is refused, and the engine is what it was."""
    for form, tag in TAGS.items():
        train_engine(engine, 1, first=70)
        before, steps = values(engine), engine.global_steps
        with pytest.raises(LayerWiseError, match=message):
            engine.load_checkpoint(folder, tag=tag, **options)
        assert_equal_states(values(engine), before, form)
        assert engine.global_steps == engine.optimizer.step_count == steps
    train_engine(engine, 1)


def loaded(engine, folder, **options):
    """Train, so that something is there to be replaced, and load, form by form."""
    for tag in TAGS.values():
        train_engine(engine, 1, first=50)
        with torch.no_grad():
            for param in engine.module.parameters():
                if not param.requires_grad:
                    param.fill_(3)
        engine.load_checkpoint(folder, tag=tag, **options)
        assert engine.global_steps == engine.optimizer.step_count
        yield tag
    train_engine(engine, 1, first=50)


def of(states, names):
    """The ``states`` that are of ``names``."""
    return {key: value for key, value in states.items() if key[0] in names}


def without(states, names):
    """The ``states`` that are not."""
    return {key: value for key, value in states.items() if key[0] not in names}


def assert_fresh(states, names):
    """All optimizer states of ``names`` are what a run starts with."""
    found = {key: value for key, value in of(states, names).items() if key[1] != "fp32"}
    assert {name for name, _ in found} == set(names)
    for key, value in found.items():
        assert not value.any(), key


def assert_model_is_rounded_masters(engine):
    """On every rank."""
    for name, value in masters(engine).items():
        param = engine.module.get_parameter(name)
        assert torch.equal(param, value.to(param.dtype)), name
    assert_same_on_all_ranks(engine.module)


class TestParameters(DistributedTest):
    FROZEN = ("tall.weight", "norm.bias")
    EXTRA = ("extra.weight", "extra.bias")

    @needs("deepspeed>=0.19.8", "its ds_to_universal.py leaves out frozen parameters")
    def test_frozen_when_saved_and_trained_now(self, tmp_path):
        saved = save(Net(frozen=True), tmp_path, **BF16)
        expected = whole_states(saved)
        engine = start(Net(), ds_config(**BF16))
        for tag in loaded(engine, tmp_path):
            assert engine.optimizer.fresh_states == dict.fromkeys(self.FROZEN, "no state in the checkpoint")
            found = whole_states(engine)
            assert_equal_states(without(found, self.FROZEN), expected, tag)
            assert_fresh(found, self.FROZEN)
            for name in self.FROZEN:
                assert torch.equal(found[name, "fp32"], saved.module.get_parameter(name).float().flatten()), (tag, name)
            assert_model_is_rounded_masters(engine)
        assert_refused(start(Net(), ds_config(layerwise={"on_missing_state": "error"}, **BF16)), tmp_path,
                       r"no state of (tall\.weight|norm\.bias); set layerwise\.on_missing_state")

    def test_trained_when_saved_and_frozen_now(self, tmp_path):
        saved = save(Net(), tmp_path, **BF16)
        expected = whole_states(saved)
        engine = start(Net(frozen=True), ds_config(**BF16))
        for tag in loaded(engine, tmp_path):
            assert engine.optimizer.fresh_states == {}
            assert_equal_states(whole_states(engine), without(expected, self.FROZEN), tag)
            assert_equal_states(engine.module.state_dict(), saved.module.state_dict(), tag)

    def test_added(self, tmp_path, capsys):
        saved = save(Net(), tmp_path, **BF16)
        expected = values(saved)
        assert_refused(start(Plus(), ds_config(**BF16)), tmp_path, r"extra\.(weight|bias).*load_module_strict")
        engine = start(Plus(), ds_config(**BF16))
        initial = of(values(engine), self.EXTRA)
        engine.load_checkpoint(tmp_path, tag="saved_universal", load_module_strict=False)
        assert_equal_states(of(values(engine), self.EXTRA), initial)
        capsys.readouterr()
        for tag in loaded(engine, tmp_path, load_module_strict=False):
            told = "lacks extra.bias, extra.weight, which the model has: these keep their own values"
            assert capsys.readouterr().out.count(told) == (dist.get_rank() == 0), tag
            assert engine.optimizer.fresh_states == dict.fromkeys(self.EXTRA, "no state in the checkpoint")
            found = values(engine)
            assert_equal_states(without(found, self.EXTRA), expected, tag)
            assert_fresh(whole_states(engine), self.EXTRA)
            # What is not in the checkpoint keeps what the model has.
            assert_model_is_rounded_masters(engine)

    def test_removed(self, tmp_path):
        saved = save(Plus(), tmp_path, **BF16)
        expected = without(values(saved), self.EXTRA)
        engine = start(Net(), ds_config(**BF16))
        assert_refused(engine, tmp_path, r"has extra\.(weight|bias).*load_module_strict")
        for tag in loaded(engine, tmp_path, load_module_strict=False):
            assert engine.optimizer.fresh_states == {}
            assert_equal_states(values(engine), expected, tag)

    def test_another_shape_is_refused(self, tmp_path):
        save(Plus(), tmp_path)
        module = Plus()
        module._modules["extra"] = nn.Linear(12, 6)
        assert_refused(start(module, ds_config()), tmp_path, r"extra\.weight is \(5, 12\).*\(6, 12\) in the model")


class TestNames(DistributedTest):
    @pytest.mark.parametrize("stage, wrapped", [(1, "now"), (3, "now"), (2, "before")])
    def test_the_entry_in_the_error_is_the_one_to_write(self, stage, wrapped, tmp_path):
        """A module that torch.compile has wrapped has longer names."""
        def net(is_wrapped):
            module = Net(frozen=True)
            if is_wrapped:
                module.square = nn.Sequential(OrderedDict(_orig_mod=module.square))
            return module

        saved = save(net(wrapped == "before"), tmp_path, stage=stage)
        expected = {(name, key): value for (name, key), value in whole_states(saved).items()}
        values = [whole(param) for param in saved.module.parameters()]
        for tag in ("saved", "saved_universal"):
            engine = start(net(wrapped == "now"), ds_config(stage=stage))
            with pytest.raises(LayerWiseError, match='set "layerwise"') as caught:
                engine.load_checkpoint(tmp_path, tag=tag)
            entries = json.loads(re.search(r'"layerwise": (\{.*\}); what differs', str(caught.value))[1])
            assert entries == {"rename": {"square.*": "square._orig_mod.*"} if wrapped == "now" else
                               {"square._orig_mod.*": "square.*"}}
            engine.destroy()
            engine = start(net(wrapped == "now"), ds_config(stage=stage, layerwise=entries))
            engine.load_checkpoint(tmp_path, tag=tag)
            assert engine.optimizer.fresh_states == {}
            assert_equal_states({(name.replace("_orig_mod.", ""), key): value
                                 for (name, key), value in whole_states(engine).items()},
                                {(name.replace("_orig_mod.", ""), key): value
                                 for (name, key), value in expected.items()}, tag)
            for param, value in zip(engine.module.parameters(), values, strict=True):
                assert torch.equal(whole(param), value), tag

    def test_other_names_for_weights_and_states(self, tmp_path):
        kwargs = {"tied": True, "frozen": True, "odd": True}
        saved = save(Net(**kwargs), tmp_path, **BF16)
        expected = {(f"body.{'cube.' + name[7:] if name.startswith('square.') else name}", key): value
                    for (name, key), value in values(saved).items()}
        engine = start(Wrapped(**kwargs), ds_config(
            layerwise={"rename": {"square.*": "body.cube.*", "*": "body.*"}}, **BF16))
        for tag in loaded(engine, tmp_path):
            assert engine.optimizer.fresh_states == {}
            assert_equal_states(values(engine), expected, tag)

    def test_maps_that_cannot_be_meant(self, tmp_path):
        save(Net(), tmp_path)
        for rename, message in [
            ({"squire.*": "square.*"}, r"layerwise\.rename\['squire\.\*'\] matches no name in the checkpoint"),
            ({"square.*": "flat.*"}, r"(square|flat)\.(\w+) and (square|flat)\.\2 .* after layerwise.rename, flat\.\2"),
        ]:
            assert_refused(start(Net(), ds_config(layerwise={"rename": rename})), tmp_path, message)
        assert_refused(start(Wrapped(), ds_config()), tmp_path, r"body\.\S+.*load_module_strict")


class TestDtypes(DistributedTest):
    SECTIONS = {"fp32": {}, "bf16": BF16, "fp16": {"fp16": {"enabled": True, "loss_scale": 8}},
                "fp16, dynamic": {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}}}

    @pytest.mark.parametrize("before, now, dtype, scales", [
        ("fp32", "bf16", torch.bfloat16, (1, 1, 1)),
        ("bf16", "fp32", torch.float32, (1, 1, 1)),
        ("fp16", "bf16", torch.bfloat16, (1, 1, 1)),
        ("bf16", "fp16", torch.float16, (8, 8, 8)),
        ("fp16, dynamic", "fp32", torch.float32, (1, 1, 1)),
        # It doubles with every step but the first, and one step is taken before each load.
        ("bf16", "fp16, dynamic", torch.float16, (16, 32, 64))])
    def test_masters_and_states_are_exact(self, before, now, dtype, scales, tmp_path):
        allow_fp16()
        saved = save(Net(tied=True, odd=True), tmp_path, steps=3, **self.SECTIONS[before])
        assert saved.optimizer.loss_scale == {"fp16": 8, "fp16, dynamic": 64}.get(before, 1)
        expected = whole_states(saved)
        engine = start(Net(tied=True, odd=True), ds_config(**self.SECTIONS[now]))
        own_scale = iter(scales)
        for tag in loaded(engine, tmp_path):
            # The scale that another dtype needed is none for this one.
            assert engine.optimizer.loss_scale == next(own_scale), tag
            assert engine.optimizer.fresh_states == {}
            assert_equal_states(whole_states(engine), expected, tag)
            assert_model_is_rounded_masters(engine)
            assert {p.dtype for p in engine.module.parameters()} == {dtype}


class TestScalarOptimizers(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("before, now, policy, kept", [
        ("adamw", "lion", "reset", False), ("adamw", "lion", "keep_shared", True),
        ("lion", "adamw", "keep_shared", False), ("sgd", "lion", "keep_shared", False)])
    def test_states_that_another_optimizer_keeps(self, before, now, policy, kept, tmp_path):
        saved = save(Net(), tmp_path, params={"scalar_optimizer": before})
        expected = whole_states(saved)
        engine = start(Net(), ds_config(params={"scalar_optimizer": now}, layerwise={"on_optimizer_change": policy}))
        # All others are Muon's.
        scalars = {name for name in internals.trained(engine) if name not in MATRICES}
        assert scalars >= {"embed.weight", "norm.bias", "head.weight"}
        family = {"adamw": "adam"}
        why = f"{family.get(before, before)} before, {family.get(now, now)} now"
        why += "; exp_avg goes on from exp_avg" * kept
        for tag in loaded(engine, tmp_path):
            found = whole_states(engine)
            assert_equal_states(without(found, scalars), without(expected, scalars), tag)
            for name in scalars:
                assert torch.equal(found[name, "fp32"], expected[name, "fp32"]), (tag, name)
                assert expected[name, "momentum_buffer" if before == "sgd" else "exp_avg"].any()
                if kept:
                    assert torch.equal(found[name, "exp_avg"], expected[name, "exp_avg"]), (tag, name)
            if not kept:
                assert_fresh(found, scalars)
            assert engine.optimizer.fresh_states == dict.fromkeys(scalars, why), tag

    def test_adam_goes_on_from_adamw(self, tmp_path):
        expected = whole_states(save(Net(), tmp_path))
        engine = start(Net(), ds_config(params={"scalar_optimizer": "adam"}))
        for tag in loaded(engine, tmp_path):
            assert engine.optimizer.fresh_states == {}
            assert_equal_states(whole_states(engine), expected, tag)
