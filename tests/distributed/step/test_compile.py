"""torch.compile of the model, which changes no gradient, and no name but where DeepSpeed's own changes, too."""

import functools
import os
import warnings

import deepspeed.comm as dist
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_layerwise.errors import ConfigError, StepError
from tests.support import internals
from tests.support.checkpoints import loaded
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import arrive_late, assert_same_on_all_ranks, ds_config, start, weights
from tests.support.versions import needs

pytestmark = rooms("grad_sync", "param_sync")

STEPS = 3


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 7, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(self.norm(x)).square().mean()


def new_counter():
    """A backend that compiles nothing and counts what it is given; dynamo works, which the tests' environment stops."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    import torch._dynamo.testing
    torch._dynamo.config.disable = False
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    warnings.simplefilter("ignore")  # dynamo looks at the gradient of tensors that are no leaves
    return torch._dynamo.testing.CompileCounter()


def train(engine, *, gas=1, direct=False, steps=STEPS, wait=True):
    for step in range(steps):
        for micro in range(gas):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            loss = engine(torch.randint(0, 7, (4, ), generator=generator))
            loss.backward() if direct else engine.backward(loss)
            engine.step()
    if not wait:
        return None
    engine.optimizer.wait_for_params()
    assert_same_on_all_ranks(engine.module)
    return weights(engine.module)


class TestCompiled(DistributedTest):
    @pytest.mark.parametrize("who, stage, gas, overlap, late", [
        ("engine", 1, 1, True, False), ("module", 2, 2, False, True),
        pytest.param("module", 3, 1, True, False, marks=pytest.mark.thorough),
        ("user", 1, 2, True, True)])
    def test_it_changes_no_bit(self, who, stage, gas, overlap, late):
        config = ds_config(stage=stage, gas=gas, overlap=overlap, bucket_numel=1, clip=1.0,
                           layerwise={"overlap_param_gather": late})
        plain = start(Layers(), config)
        expected, counter = train(plain, gas=gas), new_counter()
        engine = start(torch.compile(Layers(), backend=counter) if who == "user" else Layers(), config)
        if who == "engine":
            engine.compile(backend=counter)
        elif who == "module":
            engine.module.compile(backend=counter)
        assert torch.equal(train(engine, gas=gas, direct=who == "module"), expected)
        assert counter.frame_count >= 1
        prefix = "_orig_mod." if who == "user" else ""
        assert [spec.name for spec in internals.specs(engine)] == [
            prefix + spec.name for spec in internals.specs(plain)]
        assert [r.recipe for r in engine.optimizer.routes.values()] == [
            r.recipe for r in plain.optimizer.routes.values()]

    @pytest.mark.parametrize("stage", [
        pytest.param(1, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)])
    @pytest.mark.world_size(1)
    def test_a_compiled_train_step_changes_no_bit(self, stage, tmp_path):
        saves = stage != 2

        def train_step(engine, tokens):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            if saves:
                engine.save_checkpoint(tmp_path, tag="step")
                engine.load_checkpoint(tmp_path, tag="step")
            engine.zero_grad()

        def trained(compiles):
            engine = start(Layers(), ds_config(stage=stage, clip=1.0))
            step = compiles(functools.partial(train_step, engine))
            for tokens in torch.arange(2 * 4).view(2, 4) % 7:
                step(tokens)
            return weights(engine.module)

        expected, counter = trained(lambda call: call), new_counter()
        assert torch.equal(trained(functools.partial(torch.compile, backend=counter)), expected)
        assert counter.frame_count

    @pytest.mark.parametrize("part", ["the model", "layers.1"])
    def test_a_compiled_module_at_stage_3_is_refused_with_the_way_out(self, part):
        model, counter = Layers(), new_counter()
        if part == "the model":
            model = torch.compile(model, backend=counter)
        else:
            model.layers[1] = torch.compile(model.layers[1], backend=counter)
        with pytest.raises(ConfigError, match=rf"^{part} is what torch.compile.*call module.compile\(\) instead"):
            start(model, ds_config(stage=3))

    @pytest.mark.parametrize("who", ["engine", pytest.param("torch", marks=pytest.mark.thorough)])
    @pytest.mark.world_size(1)
    def test_the_backward_pass_too(self, who):
        config = ds_config(bucket_numel=1, clip=1.0)
        expected, counter = train(start(Layers(), config), steps=2), new_counter()
        engine = start(Layers(), config)
        get_accelerator().set_compile_backend("eager")
        if who == "engine":
            engine.compile(backend=counter, compiled_autograd_enabled=True)
            assert torch.equal(train(engine, steps=2), expected)
        else:
            with torch._dynamo.config.patch(compiled_autograd=True):
                assert torch.equal(torch.compile(train, backend=counter)(engine, steps=2), expected)
        assert torch._dynamo.utils.counters["compiled_autograd"]["captures"] >= 1

    @pytest.mark.parametrize("traced", [True, False])
    @pytest.mark.world_size(1)
    def test_compiled_autograd_around_the_loop(self, traced):
        config, counter = ds_config(bucket_numel=1, clip=1.0), new_counter()
        expected, engine = train(start(Layers(), config)), start(Layers(), config)
        compiler = torch.compile(backend=counter) if traced else lambda graph: graph
        with torch._dynamo.compiled_autograd._enable(compiler):
            with pytest.raises(StepError, match="did not go through the engine; .* then engine.backward"):
                train(engine, direct=True)
            engine.zero_grad()
            assert torch.equal(train(engine), expected)

    def test_a_checkpoint_of_a_module_that_the_user_compiled(self, class_tmpdir):
        """The names have the prefix, as in stock DeepSpeed; ``layerwise.rename`` takes it off."""
        new_counter()
        config = ds_config()
        engine = start(torch.compile(Layers(), backend="eager"), config)
        train(engine)
        engine.save_checkpoint(str(class_tmpdir))
        for rename, module in (({}, torch.compile(Layers(), backend="eager")), ({"_orig_mod.*": "*"}, Layers())):
            other = loaded(start(module, {**config, "layerwise": {"rename": rename}}), str(class_tmpdir))
            assert torch.equal(weights(other.module), weights(engine.module))
            assert not other.optimizer.fresh_states
        assert torch.equal(train(other), train(engine))

    @needs("torch>=2.13", "its compiler breaks the graph at every hook")
    @pytest.mark.parametrize("what, after", [
        pytest.param(what, after, id=f"{what} {when}", marks=[pytest.mark.thorough] * (what == "layer" or not after))
        for after, when in enumerate(["from the start", "while parameters are under way"])
        for what in ["model", "layer", "layer in one graph", "function"]])
    def test_overlap_param_gather_breaks_no_graph_and_hides_no_weight(self, what, after, monkeypatch):
        arrive_late(monkeypatch)
        config = ds_config(bucket_numel=1, layerwise={"overlap_param_gather": True})
        plain = start(Layers(), config)
        expected = [train(plain, steps=steps) for steps in (after, STEPS)][-1]
        counter = new_counter()
        engine = start(Layers(), config)
        train(engine, steps=after, wait=False)
        assert bool(internals.gathers_under_way(engine)) == bool(after)
        layers = engine.module.layers
        if what == "model":
            engine.compile(backend=counter)
        elif what == "layer":
            layers[1].compile(backend=counter)
        elif what == "layer in one graph":
            engine.optimizer.wait_for_params()
            layers[1].compile(backend=counter, fullgraph=True)
        else:
            layers[1].forward = torch.compile(functools.partial(nn.Linear.forward, layers[1]), backend=counter)
        assert torch.equal(train(engine), expected)
        assert not sum(torch._dynamo.utils.counters["graph_break"].values()) or after
        assert counter.frame_count == 1 or after
        assert not internals.gathers_under_way(engine)
