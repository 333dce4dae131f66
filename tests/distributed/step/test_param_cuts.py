"""ZeRO stage 3: against stage 2 bit for bit, and against the oracle; what scripts read and write; memory."""

import gc
import weakref
from itertools import product

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as Kind
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from pytorch_optimizer import SOAP
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.utils.checkpoint import checkpoint

import ds_layerwise
from ds_layerwise.errors import ConfigError, LayerWiseError, StepError
from tests.support import internals
from tests.support.attention import Attends, entry_of, model_of
from tests.support.checkpoints import assert_equal_states, assert_same_run, whole_states
from tests.support.expected import assert_gradients_equal, by_the_oracle
from tests.support.harness import DistributedTest
from tests.support.models import TinyGpt, tiny_gpt, token_batch, token_loss
from tests.support.rooms import rooms
from tests.support.training import (
    BF16,
    PRECISIONS,
    VARIANTS,
    Net,
    allow_fp16,
    ds_config,
    reduced_gradients,
    relative_error,
    start,
    train_engine,
    weights,
    whole,
)
from tests.support.versions import needs

pytestmark = rooms("cut_sync", "param_cuts", "state_access", "run_state")

#: Makes stage 3 compute linear layers as other stages do.
PLAIN = {"memory_efficient_linear": False}

WHOLE = (safe_get_full_fp32_param, safe_set_full_fp32_param, safe_get_full_optimizer_state,
         safe_set_full_optimizer_state, safe_get_full_grad, safe_set_full_grad)
LOCAL = (safe_get_local_fp32_param, safe_set_local_fp32_param, safe_get_local_optimizer_state,
         safe_set_local_optimizer_state, safe_get_local_grad, safe_set_local_grad)


def config_of(stage, *, zero=None, offload_optimizer=None, **changes):
    config = ds_config(stage=stage, **changes)
    if offload_optimizer:
        config["zero_optimization"]["offload_optimizer"] = offload_optimizer
    if stage == 3:
        config["zero_optimization"] |= PLAIN | (zero or {})
    return config


def both(make, num_steps=3, *, gas=1, zero=None, **changes):
    """Engines at stages 2 and 3 after the same steps, and the norms of these."""
    engines = []
    for stage in (2, 3):
        engine = start(make(), config_of(stage, zero=zero, gas=gas, **changes))
        norms = []
        for step in range(num_steps):
            train_engine(engine, 1, gas=gas, first=step)
            norms.append(engine.get_global_grad_norm())
        engines.append((engine, torch.tensor([float(norm) for norm in norms])))
    return engines


def assert_same(engines):
    (two, norms), (three, others) = engines
    assert torch.equal(norms, others)
    assert_same_run(three, two)


def net(**options):
    """A :class:`Net` without the parameter of no elements, which DeepSpeed cannot make whole."""
    made = Net(**options)
    if options.get("odd"):
        del made.empty
    return made


class Gpt(nn.Module):
    """A language model with its loss, which may compute its blocks once more in the backward pass."""

    def __init__(self, *, tied=True, frozen=False, again=False, reentrant=False):
        super().__init__()
        self.inner, self.again, self.reentrant = tiny_gpt(tied=tied), again, reentrant
        if frozen:
            self.inner.blocks[0].requires_grad_(False)

    def forward(self, place):
        tokens = token_batch(*place)
        if not self.again:
            return token_loss(self.inner, tokens)
        model = self.inner
        x = model.tokens(tokens[:, :-1]) + model.positions.weight[:tokens.shape[1] - 1]
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits = model.head(model.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class TestAgainstStage2(DistributedTest):
    world_size = [2, 3]
    thorough_on = (3, )

    @pytest.mark.parametrize("gas", [pytest.param(1, marks=pytest.mark.thorough), 3])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_same_bits(self, precision, variant, gas):
        assert_same(both(lambda: net(**VARIANTS[variant]), gas=gas, clip=5.0, **PRECISIONS[precision]))

    @pytest.mark.parametrize("kind, kept_whole, precision", [
        ({}, 100, "bf16"), ({"tied": False}, 0, "fp32"), ({"frozen": True}, 10**9, "bf16"),
        ({"again": True}, 100, "fp32"), ({"again": True, "reentrant": True}, 0, "bf16"),
        *(pytest.param(*each, marks=pytest.mark.thorough) for each in (
            ({}, 100, "fp32"), ({"tied": False}, 0, "bf16"), ({"frozen": True}, 10**9, "fp32"),
            ({"again": True}, 100, "bf16"), ({"again": True, "reentrant": True}, 0, "fp32")))], ids=str)
    def test_a_language_model(self, precision, kept_whole, kind):
        zero = {"stage3_param_persistence_threshold": kept_whole}
        assert_same(both(lambda: Gpt(**kind), 4, gas=2, clip=0.5, zero=zero, **PRECISIONS[precision]))

    def test_the_same_steps_are_skipped_in_fp16(self):
        allow_fp16()
        fp16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}}
        engines = both(lambda: Gpt(), 6, **fp16)
        assert 0 < engines[0][0].skipped_steps < 6
        assert engines[1][0].skipped_steps == engines[0][0].skipped_steps
        assert_same_run(engines[1][0], engines[0][0])

    @pytest.mark.parametrize("dtype, gas, kept_whole", [("bfloat16", 1, 0), ("bfloat16", 3, 100), ("float16", 2, 0)])
    def test_autocast(self, dtype, gas, kept_whole):
        allow_fp16()
        autocast = {"torch_autocast": {"enabled": True, "dtype": dtype}}
        zero = {"stage3_param_persistence_threshold": kept_whole}
        assert_same(both(lambda: Gpt(tied=False), 4, gas=gas, clip=0.5, zero=zero, **autocast))

    def test_parameters_without_dimensions(self):
        def make():
            model = net()
            model.norm.scale = nn.Parameter(torch.tensor(2.0))
            return model

        assert_same(both(make))

    @pytest.mark.parametrize("changes", [
        *({"layerwise": layerwise, **BF16} for layerwise in (
            {"layout": "lpt"}, {"reduction": "native"}, {"master_dtype": "bfloat16+remainder"})),
        *({"optimizer": {"type": "LayerWise", "params": {"lr": 0.003, "muon_lr": 0.02, **params}}} for params in (
            {"matrix_optimizer": "soap"}, {"matrix_optimizer": "normuon", "ns_dtype": "fp32"},
            {"scalar_optimizer": "lion", "ns_dtype": "fp32"})),
        {"gas": 2, "clip": 5.0, "offload_optimizer": {"device": "cpu", "ratio": 1.0}},
        {"gas": 2, "clip": 5.0, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, **BF16}], ids=str)
    def test_with_other_settings_and_optimizers_and_on_the_host(self, changes):
        assert_same(both(lambda: net(tied=True), **changes))

    def test_with_cuts_on_the_host(self, precision):
        zero = {"offload_param": {"device": "cpu", "pin_memory": True}}
        assert_same(both(lambda: Gpt(frozen=True), gas=2, clip=5.0, zero=zero, **PRECISIONS[precision]))

    @pytest.mark.parametrize("clips, kind", [
        (True, "grouped, with biases"), (True, "fused, transposed"), (True, "latent"), (False, "fused, transposed")])
    def test_attention_logits(self, clips, kind):
        layerwise = {"qk_clip": {"threshold": 0.01, "attention": [entry_of(kind)]}} if clips else {
            "log_max_attention_logit": True}
        engines = both(lambda: Attends(model_of(kind)), layerwise=layerwise)
        assert_same(engines)
        two, three = (engine.optimizer.max_attention_logits for engine, _ in engines)
        assert two == three != {}


class TestOptimizersOfScripts(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("make", [
        lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1), lambda params: SOAP(params, lr=0.02),
        pytest.param(lambda params: torch.optim.Adagrad(params, lr=0.02, initial_accumulator_value=0.5), marks=needs(
            "torch>=2.13", "its Adagrad makes states when it is made, not in its first step"))],
        ids=["AdamW", "SOAP", "Adagrad"])
    def test_the_same_bits(self, precision, make):
        engines = []
        for stage in (2, 3):
            config = config_of(stage, gas=2, clip=5.0, **PRECISIONS[precision])
            del config["optimizer"]
            net = Net()
            engine, *_ = ds_layerwise.initialize(model=net, optimizer=make, config=config,
                                                 model_parameters=list(net.parameters()))
            engines.append(train_engine(engine, 3, gas=2))
        assert_same_run(*engines)

    def test_a_function_sees_the_shapes_of_what_zero_init_has_cut(self):
        def make(params):
            params = list(params)
            return torch.optim.AdamW([
                {"params": [p for p in params if p.dim() > 1]},
                {"params": [p for p in params if p.dim() < 2], "lr": 0.001}], lr=0.02)

        config = config_of(3)
        del config["optimizer"]
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = TinyGpt()
        engine, *_ = ds_layerwise.initialize(model=model, optimizer=make, model_parameters=list(model.parameters()),
                                             config=config)
        vectors = [param for param in model.parameters() if len(param.ds_shape) == 1]
        assert [len(group["params"]) for group in engine.optimizer.param_groups][1] == len(vectors) > 0


class TestAgainstTheOracle(DistributedTest):
    world_size = 3

    def test_gradients_are_exact_and_masters_within_rounding(self, precision):
        expected = by_the_oracle(lambda: Net().to(torch.bfloat16 if precision == "bf16" else torch.float32), 2)
        engine = start(Net(), config_of(3, **PRECISIONS[precision]))
        for step in range(2):
            engine.backward(engine((step, 0, dist.get_rank())))
            assert_gradients_equal(reduced_gradients(engine), expected.steps[step].grads)
            engine.step()
        for (name, key), master in whole_states(engine).items():
            if key == "fp32":
                assert relative_error(master, expected.params[name].flatten()) < 1e-5, name


class Routed(nn.Module):
    """A model that computes in the dtypes that its weights have before they are fetched."""

    def __init__(self):
        super().__init__()
        self.inp, self.router, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, place):
        x = torch.full((2, 16), float(sum(place)))
        h = torch.tanh(self.inp(x.to(self.inp.weight.dtype)))
        return self.out(h * self.router(h.to(self.router.weight.dtype)).to(h.dtype)).float().square().mean()


class TestModelsThatZeroInitHasCut(DistributedTest):
    world_size = [2, 3]

    def test_the_same_bits(self, precision):
        config = config_of(3, **PRECISIONS[precision])
        plain = tiny_gpt()
        with deepspeed.zero.Init(config_dict_or_path=config):
            cut = TinyGpt()
        for param, value in zip(cut.parameters(), plain.parameters(), strict=True):
            assert not param.numel()
            with deepspeed.zero.GatheredParameters(param, modifier_rank=1):
                if dist.get_rank() == 1:
                    param.data.copy_(value)
        runs = []
        for inner in (plain, cut):
            model = Gpt()
            model.inner = inner
            runs.append(train_engine(start(model, config), 2))
        assert_same_run(*runs)

    @pytest.mark.parametrize("frozen", [True, False])
    def test_parts_converted_later_are_trained_as_they_were_cut(self, frozen, capsys):
        runs = []
        for converts in (False, True):
            config = config_of(3, **PRECISIONS["bf16"])
            with deepspeed.zero.Init(config_dict_or_path=config):
                model = Routed().requires_grad_(True)
            model.router.requires_grad_(not frozen)
            for param in model.parameters():
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                    param.data.copy_(torch.arange(param.numel()).view(param.shape) % 5 / 8)
            if converts:
                model.router.float()
            runs.append(train_engine(start(model, config), 2))
        assert_same_run(*runs)
        said = "converted router.weight from torch.bfloat16 to torch.float32, router.bias from"
        assert capsys.readouterr().out.count(said) == (dist.get_rank() == 0)


class TestWrittenByScripts(DistributedTest):
    world_size = [2, 3]

    def test_masters_follow_what_one_rank_writes(self, precision, capsys):
        engines = []
        for stage in (2, 3):
            # Every update searches for writes that would be lost.
            config = config_of(stage, layerwise={"check_writes": 1}, **PRECISIONS[precision])
            engine = train_engine(start(Net(), config), 1)
            for param in map(engine.module.get_parameter, ("square.weight", "embed.weight", "norm.bias")):
                new = torch.arange(param.numel() if stage == 2 else param.ds_numel).view(
                    param.shape if stage == 2 else param.ds_shape) % 7 / 4
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0, enabled=stage == 3):
                    if stage == 2 or dist.get_rank() == 0:
                        param.data.copy_(new)
            engines.append(train_engine(engine, 2, first=1))
        assert_same_run(engines[1], engines[0])
        said = capsys.readouterr().out.count("weights were written between two steps")
        assert said == (dist.get_rank() == 0) * 2 * (precision == "bf16")

    @pytest.mark.parametrize("way", ["gathered", "stays whole"])
    def test_writes_are_there_before_the_next_step(self, precision, way, tmp_path):
        """A frozen parameter, tall.weight, is among them."""
        engines = []
        for stage in (2, 3):
            zero = {"stage3_param_persistence_threshold": 10**6 * (way == "stays whole")}
            config = config_of(stage, zero=zero, **PRECISIONS[precision])
            engine = train_engine(start(Net(frozen=True), config), 1)
            gathered = way == "gathered" and stage == 3
            for param in map(engine.module.get_parameter, ("square.weight", "embed.weight", "tall.weight")):
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0, enabled=gathered):
                    param.data.mul_(2)
            if way == "stays whole":
                engine.optimizer.empty_partition_cache()
            engine.save_checkpoint(tmp_path, tag=f"of_{stage}")
            other = start(Net(frozen=True), config)
            other.load_checkpoint(tmp_path, tag=f"of_{stage}")
            assert torch.equal(weights(engine.module), weights(other.module))
            engines += [train_engine(each, 1, first=1) for each in (engine, other)]
        for engine in engines[1:]:
            assert_same_run(engine, engines[0])

    @pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.thorough), "bf16"])
    def test_writes_into_persistent_parameters_stay_after_each_event(self, precision, tmp_path):
        """Frozen parameters are among them."""
        def save(engine, folder):
            engine.save_checkpoint(folder, tag="t")

        def fails(event):
            with pytest.raises(LayerWiseError):
                event()

        def offload(engine, folder):
            engine.module.square.weight.data.mul_(2)
            engine.offload_states()
            engine.reload_states()

        events = {
            "load the weights": lambda e, d: (save(e, d), e.load_checkpoint(d, tag="t", load_module_only=True)),
            "load universal": lambda e, d: (save(e, d), e.load_checkpoint(d, tag="t_universal")),
            "one file": lambda e, d: (e.optimizer.save_state_dict_to_file(d / "f"),
                                      e.optimizer.load_state_dict_from_file(d / "f")),
            "save one file": lambda e, d: e.optimizer.save_state_dict_to_file(d / "f"),
            "sharded": lambda e, d: dcp.save(e.optimizer.sharded_state_dict(), checkpoint_id=str(d / "dcp")),
            "load sharded": lambda e, d: e.optimizer.load_sharded_state_dict(str(d / "dcp")),
            "masters from weights": lambda e, d: e.optimizer.refresh_fp32_params(),
            "weights from masters": lambda e, d: e.optimizer.update_lp_params(),
            "a save that fails": lambda e, d: fails(lambda: e.save_checkpoint(d, client_state={"f": lambda: 0})),
            "no file": lambda e, d: fails(lambda: e.optimizer.load_state_dict_from_file(d / "nothing")),
            "offload": offload,
        }
        zero = {"stage3_param_persistence_threshold": 10**6}
        engines = []
        for stage in (2, 3):
            config = config_of(stage, zero=zero, layerwise={"save_universal": True}, **PRECISIONS[precision])
            engines.append(train_engine(start(Net(frozen=True), config), 1))
        for step, (what, event) in enumerate(events.items(), 1):
            for stage, engine in zip((2, 3), engines, strict=True):
                event(engine, tmp_path / f"{stage}")
                for param in engine.module.parameters():
                    param.data.mul_(0.5 if step % 2 else 2)
                train_engine(engine, 1, first=step)
            assert_equal_states(*map(whole_states, engines), what)
        assert_same_run(engines[1], engines[0])

    def test_writes_into_a_cut_stay_where_the_parameter_is_whole(self, precision):
        engines = []
        for kept_whole in (0, 10**6):
            zero = {"stage3_param_persistence_threshold": kept_whole}
            engine = train_engine(start(Net(), config_of(3, zero=zero, **PRECISIONS[precision])), 1)
            with torch.no_grad():
                for name in ("square.weight", "embed.weight"):
                    engine.module.get_parameter(name).ds_tensor.mul_(2)
            engines.append(train_engine(engine, 2, first=1))
        assert_same_run(*engines)

    def test_writes_that_show_nowhere_are_found_and_reloaded(self, precision):
        engines = []
        for shows in (True, False):
            config = config_of(3, zero={"stage3_param_persistence_threshold": 0}, layerwise={"check_writes": 2},
                               **PRECISIONS[precision])
            engine = train_engine(start(Net(), config), 2)
            for name in ("square.weight", "tall.weight"):
                cut = engine.module.get_parameter(name).ds_tensor
                with torch.no_grad():
                    (cut if shows else cut.data).mul_(2)
            if not shows:
                engine.optimizer.reload_weights()
            engines.append(train_engine(engine, 3, first=2))
        assert_same_run(*engines)
        engine.module.square.weight.ds_tensor.data[:1] += 1
        with pytest.raises(StepError, match="^square.weight was written into the cuts .* engine.optimizer.reload_weig"):
            train_engine(engine, 2, first=5)
        engine.optimizer.reload_weights()
        engine.zero_grad()
        train_engine(engine, 2, first=5)

    def test_reloaded_weights_are_those_of_the_next_forward_pass(self):
        engine = train_engine(start(Net(), config_of(3, zero={"stage3_param_persistence_threshold": 10**6})), 1)
        params = engine.module.square.weight, engine.module.norm.bias
        expected = [param.detach() * 2 for param in params]
        for param in params:
            param.ds_tensor.data.mul_(2)
        engine.optimizer.reload_weights()
        assert all(map(torch.equal, params, expected))
        train_engine(engine, 1, first=1)

    @pytest.mark.parametrize("name", ["square.weight", "norm.bias"])
    def test_different_writes_of_ranks_into_persistent_parameters_are_errors(self, name):
        zero = {"stage3_param_persistence_threshold": 10**6}
        engine = train_engine(start(Net(), config_of(3, zero=zero)), 1)
        engine.module.get_parameter(name).data.view(-1)[0] = dist.get_rank()
        engine.backward(engine((1, 0, dist.get_rank())))
        with pytest.raises(StepError, match=f"^{name} was written since the last step, and is not the same on ranks 0"):
            engine.step()

    def test_getters_see_what_is_written(self, precision):
        for stays in (True, False):
            zero = {"stage3_param_persistence_threshold": 10**6 * stays}
            engine = train_engine(start(Net(), config_of(3, zero=zero, **PRECISIONS[precision])), 1)
            for param in (engine.module.square.weight, engine.module.embed.weight):
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0, enabled=not stays):
                    param.data.mul_(2)
                assert torch.equal(safe_get_full_fp32_param(param), whole(param).float())
            engine.optimizer.refresh_fp32_params()
            for param in engine.module.parameters():
                assert torch.equal(safe_get_full_fp32_param(param), whole(param).float())

    def test_masters_stay_where_an_average_is_tried(self, tmp_path):
        engines = [train_engine(start(Net(), config_of(3, **PRECISIONS["bf16"])), 2) for _ in range(2)]
        param = engines[0].module.square.weight
        for factor, tag in ((2, "tried"), (0.5, "back")):
            with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                param.data.mul_(factor)
            read = safe_get_full_fp32_param(param)
            assert torch.equal(read, whole(param).float()) == (factor == 2)
            own = [piece.name for piece in internals.pieces(engines[0]) if piece.name == "square.weight"]
            for look in (lambda: None, lambda tag=tag: engines[0].save_checkpoint(tmp_path, tag=tag)):
                look()
                assert internals.written_weights(engines[0]) == (own if factor == 2 else [])
            other = start(Net(), config_of(3, **PRECISIONS["bf16"]))
            other.load_checkpoint(tmp_path, tag=tag)
            assert torch.equal(safe_get_full_fp32_param(other.module.square.weight), read)
            assert not internals.written_weights(other)
        assert_same_run(*(train_engine(engine, 2, first=2) for engine in engines))

    def test_a_master_that_is_set_holds_whatever_was_written_before(self, tmp_path):
        engines = []
        for writes in (True, False):
            # What stays whole would show the new value as a write.
            config = config_of(3, zero={"stage3_param_persistence_threshold": 0}, **BF16)
            engine = train_engine(start(Net(), config), 1)
            param = engine.module.square.weight
            if writes:
                with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
                    param.data.mul_(2)
                engine.save_checkpoint(tmp_path)
            safe_set_full_fp32_param(param, torch.ones(param.ds_shape) / 3)
            engines.append(train_engine(engine, 1, first=1))
        assert_same_run(*engines)

    def test_nothing_is_fetched_where_nobody_writes(self):
        engine = start(Net(), config_of(3, **PRECISIONS["bf16"]))
        fetches = internals.seen_at(internals.param_sync(engine), "fetch", lambda: 1)
        train_engine(engine, 3)
        assert not fetches


class TestAccess(DistributedTest):
    world_size = [2, 3]

    def test_whole_values_are_read_and_written(self, precision):
        engines = [start(Net(), config_of(stage, **PRECISIONS[precision])) for stage in (2, 3)]
        for engine in engines:
            train_engine(engine, 1)
            for param in engine.module.parameters():
                safe_set_full_fp32_param(param, new := safe_get_full_fp32_param(param) * 2 + 1)
                assert torch.equal(whole(param), new.to(param.dtype))
                key = "exp_avg"
                safe_set_full_optimizer_state(param, safe_get_full_optimizer_state(param, key) / 2, key)
            engine.backward(engine((1, 0, dist.get_rank())))
            for param in engine.module.parameters():
                safe_set_full_grad(param, safe_get_full_grad(param) * 4)
            if engine is engines[1]:
                safe_update_full_grad_vectorized(list(engine.module.parameters()), lambda grad, _: grad / 4)
            else:
                for param in engine.module.parameters():
                    safe_set_full_grad(param, safe_get_full_grad(param) / 4)
            engine.step()
        assert_same_run(engines[1], engines[0])

    def test_frozen_parameters_have_no_master_state_or_gradient(self):
        for stage in (2, 3):
            engine = train_engine(start(Net(frozen=True), config_of(stage)), 1)
            param = engine.module.tall.weight
            assert safe_get_full_fp32_param(param) is safe_get_full_optimizer_state(param, "exp_avg") is None
            assert safe_get_full_grad(param) is None
            assert stage == 2 or safe_get_local_fp32_param(param) is safe_get_local_grad(param) is None
            safe_set_full_fp32_param(param, torch.ones(40, 12))
            engine.destroy()
            assert not hasattr(param, "_z3_optimizer")

    def test_cuts_are_read_and_written(self, precision):
        """Local functions change a run as those for whole parameters do, from cuts that hold what DeepSpeed's do."""
        engines = [start(Net(), config_of(3, **PRECISIONS[precision])) for _ in range(2)]
        for engine, (get, set_, get_state, set_state, get_grad, set_grad) in zip(engines, (WHOLE, LOCAL), strict=True):
            train_engine(engine, 1)
            for param in engine.module.parameters():
                set_(param, (get(param) * 2 + 1).requires_grad_())
                set_state(param, get_state(param, "exp_avg") / 2, "exp_avg")
            embed = engine.module.embed.weight
            set_state(embed, get_state(embed, "step") + 3, "step")
            engine.backward(engine((1, 0, dist.get_rank())))
            for param in engine.module.parameters():
                set_grad(param, get_grad(param) * 4)
            engine.step()
        assert_same_run(engines[1], engines[0])
        for param in engines[1].module.parameters():
            assert torch.equal(safe_get_local_fp32_param(param).to(param.ds_tensor.dtype), param.ds_tensor)

    def test_a_cut_of_another_size_is_refused(self):
        engine = start(Net(), config_of(3))
        param = engine.module.square.weight
        numel = param.ds_tensor.numel()
        value = torch.zeros(numel + (dist.get_rank() == 1))
        with pytest.raises(LayerWiseError, match=f"square.weight: this rank's cut has {numel} elements, got a value "
                                                 f"of {numel + 1}; pass a tensor of the size"):
            safe_set_local_fp32_param(param, value)

    def test_parameter_offload_is_there_for_others(self):
        engine = start(Net(), config_of(3))
        offload = engine.optimizer.parameter_offload
        assert offload.get_param_coordinator() is not None
        engine.empty_partition_cache()
        assert all(not param.numel() for param in engine.module.parameters())
        assert start(Net(), config_of(2)).optimizer.parameter_offload is None


class Stream:
    """A stream that counts how often it waits for another."""

    waits = 0

    def wait_stream(self, other):
        self.waits += 1


class TestBetweenSteps(DistributedTest):
    world_size = 2

    def test_evaluation_and_16_bit_weights(self, tmp_path):
        engine = start(Gpt(), config_of(3, zero={"stage3_gather_16bit_weights_on_model_save": True},
                                        **PRECISIONS["bf16"]))
        train_engine(engine, 2)
        with torch.no_grad():
            before = engine((0, 0, 0))
            assert torch.equal(engine((0, 0, 0)), before)
        assert engine.save_16bit_model(str(tmp_path))
        dist.barrier()
        saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
        for name, param in engine.module.named_parameters():
            assert torch.equal(saved[name], whole(param).cpu()), name
        assert_same_run(train_engine(engine, 1, first=2), train_engine(
            start(Gpt(), config_of(3, **PRECISIONS["bf16"])), 3))

    def test_the_table_is_the_same_later(self):
        engine = start(Net(), config_of(3))
        before, listed = engine.optimizer.describe(), engine.optimizer.listed()
        train_engine(engine, 1)
        assert (engine.optimizer.describe(), engine.optimizer.listed()) == (before, listed)
        assert {row["name"]: tuple(row["shape"]) for row in listed} == internals.shapes(engine)

    def test_a_reference_model_has_no_optimizer(self, capsys):
        config = config_of(3)
        engine, optimizer, *_ = ds_layerwise.initialize(model=Gpt(), config=config)
        with torch.no_grad():
            assert torch.equal(engine((0, 0, 0)), Gpt()((0, 0, 0)))
        with pytest.raises(StepError):
            engine.step()
        assert ("stage is 3, and neither model_parameters" in capsys.readouterr().out) == (dist.get_rank() == 0)

    def test_settings_of_deepspeeds_fetches_change_nothing(self):
        plain = train_engine(start(Gpt(), config_of(3, **PRECISIONS["bf16"])), 3)
        for zero in ({"overlap_comm": False}, {"stage3_module_granularity_threshold": 10**6},
                     {"stage3_max_live_parameters": 1}, {"stage3_prefetch_bucket_size": 0},
                     {"leaf_module": {"classes": ["tests.support.models.Block"]}}):
            engine = train_engine(start(Gpt(), config_of(3, zero=zero, **PRECISIONS["bf16"])), 3)
            assert_same_run(engine, plain, zero)
            engine.destroy()

    def test_fetches_wait_for_what_a_step_and_a_load_write(self, tmp_path):
        """A CPU has no streams, so the one that DeepSpeed fetches on is played."""
        engine = start(Net(), config_of(3, zero={"stage3_param_persistence_threshold": 0}))
        fetches = Stream()
        internals.fetch_on(engine, fetches)
        train_engine(engine, 1)
        waited = [fetches.waits]
        engine.save_checkpoint(tmp_path, tag="one")
        waited.append(fetches.waits)
        engine.load_checkpoint(tmp_path, tag="one")
        waited.append(fetches.waits)
        assert waited[0] > 0 and waited[1] == waited[0] and waited[2] > waited[1], waited

    def test_nothing_is_whole_after_a_backward_pass(self):
        model = Gpt(again=True)
        for embedding in (model.inner.tokens, model.inner.positions):
            # No gradient comes to the first block, and so no hook of DeepSpeed's ends it.
            embedding.requires_grad_(False)
        model.inner.head.weight = nn.Parameter(model.inner.head.weight.detach().clone())
        engine = start(model, config_of(3, zero={"stage3_param_persistence_threshold": 0}))
        engine.backward(engine((0, 0, dist.get_rank())))
        left = [name for name, param in engine.module.named_parameters() if param.numel()]
        assert not left, left

    @pytest.mark.parametrize("between", [
        "save", "read", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("16 bits", "nothing"))])
    def test_a_resumed_run_saves_and_goes_on(self, between, tmp_path):
        """Gpt reads its positions itself, which DeepSpeed has to notice in the first forward pass."""
        config = config_of(3, zero={"stage3_gather_16bit_weights_on_model_save": True})
        plain = train_engine(start(Gpt(), config), 5)
        engine = train_engine(start(Gpt(), config), 2)
        engine.save_checkpoint(str(tmp_path), tag="t")
        engine = start(Gpt(), config)
        engine.load_checkpoint(str(tmp_path), tag="t")
        train_engine(engine, 2, first=2)
        if between == "save":
            stays = [name for name, param in engine.module.named_parameters() if param.numel()]
            engine.save_checkpoint(str(tmp_path), tag="u")
            assert stays == [name for name, param in engine.module.named_parameters() if param.numel()] != []
        elif between == "16 bits":
            engine.save_16bit_model(str(tmp_path))
        elif between == "read":
            weights(engine.module)
        assert_same_run(train_engine(engine, 1, first=4), plain)

    def test_a_destroyed_engine_is_let_go_and_a_second_one_takes_the_model_over(self):
        engine = train_engine(start(Net(), config_of(3)), 1)
        model, first, held = engine.module, weights(engine.module), [weakref.ref(engine), weakref.ref(engine.optimizer)]
        engine.destroy()
        engine.destroy()
        del engine
        gc.collect()
        assert not [each() for each in held if each() is not None]
        second = start(model, config_of(3))
        assert torch.equal(weights(model), first)
        train_engine(second, 1, first=1)
        assert not torch.equal(weights(model), first)

    def test_an_exception_in_a_pass_leaves_the_next_one_whole(self):
        engines = [train_engine(start(Net(), config_of(3)), 1) for _ in range(2)]
        with pytest.raises(ZeroDivisionError):
            loss = engines[0]((1, 0, dist.get_rank()))
            loss.register_hook(lambda _: 1 / 0)
            engines[0].backward(loss)
        engines[0].zero_grad()
        for engine in engines:
            train_engine(engine, 2, first=1)
        assert_same_run(*engines)


class TestOffloadedByHand(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize("kept_whole", [pytest.param(0, marks=pytest.mark.thorough), 100])
    def test_away_and_back_changes_nothing(self, precision, kept_whole):
        zero = {"stage3_param_persistence_threshold": kept_whole}
        config = config_of(3, clip=5.0, zero=zero, **PRECISIONS[precision])
        engine, plain = (train_engine(start(Net(), config), 2) for _ in range(2))
        included = (None, [Kind.optim_states], [Kind.hp_params, Kind.lp_params], [Kind.lp_grads])
        for step, include in enumerate(included, 2):
            before = internals.memory_by_kind(engine)
            kinds = list(Kind) if include is None else include
            engine.offload_states(include=include)
            assert internals.memory_by_kind(engine) == {
                kind: 0 if kind in kinds else size for kind, size in before.items()}
            if Kind.lp_params in kinds:
                with pytest.raises(StepError, match="parameters are offloaded; call engine.reload_states"):
                    engine((0, 0, 0))
                with pytest.raises(StepError, match="parameters are offloaded; call engine.reload_states"):
                    weights(engine.module)
            engine.reload_states()
            assert internals.memory_by_kind(engine) == before
            assert_same_run(engine, plain)
            for each in (engine, plain):
                train_engine(each, 1, first=step)
            assert_same_run(engine, plain)


class TestMemory(DistributedTest):
    world_size = [1, 2, 4]

    def test_it_is_what_the_plan_says(self, precision):
        for host, offload_param in product((None, {"device": "cpu", "ratio": 0.5}),
                                           (None, {"device": "cpu", "pin_memory": True})):
            self.compare(precision, host, offload_param)

    def compare(self, precision, host, offload_param):
        config = config_of(3, gas=2, offload_optimizer=host, **PRECISIONS[precision])
        if offload_param:
            config["zero_optimization"]["offload_param"] = offload_param
        engine = train_engine(start(net(odd=True), config), 2, gas=2)
        optimizer = engine.optimizer
        tensors = [*internals.values_of_shards(engine), *internals.cuts(engine)]
        tensors += [*internals.masters(engine), *internals.owned(engine).reduced.tensors]
        for state in internals.states(engine).values():
            tensors += [value for key, value in state.items() if key != "step"]
        for bucket in optimizer.layout.buckets:
            tensors += [internals.trained(engine)[slot.name].ds_tensor for slot in bucket.slots]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
        planned = optimizer.forecast().memory[optimizer.rank]
        # Without the elements by which DeepSpeed fills up what it gathers.
        whole = sum(t.nbytes for t in internals.persistent(engine))
        assert whole and sum(held.values()) + whole == planned.total + planned.host
        cuts = [each.untyped_storage().nbytes() for each in internals.param_cuts(engine)]
        assert bool(planned.host) == bool(host or offload_param)
        assert not offload_param or planned.host >= sum(cuts)
        if precision == "bf16" and not host:
            # Owners of matrices have masters alone; what is cut by element is updated where its cuts are.
            split = sum(2 * numel for bucket in optimizer.layout.buckets if not bucket.whole
                        for owner, numel in bucket.non_empty_shards() if owner == optimizer.rank)
            assert planned.params == split + whole + (0 if offload_param else sum(cuts))
        engine.destroy()


class TestRefused(DistributedTest):
    world_size = 2

    def test_parameters_without_elements(self):
        with pytest.raises(ConfigError, match="^empty has no elements"):
            start(Net(odd=True), config_of(3))

    def test_second_cuts_of_zero_init(self):
        config = config_of(3, zero={"zero_hpz_partition_size": 2})
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = TinyGpt()
        with pytest.raises(ConfigError, match="^tokens.weight has second cuts over 2 rank.*; give zero.Init"):
            start(model, config_of(3))

    def test_ranks_that_freeze_different_blocks(self):
        model = Gpt(tied=False)
        blocks = model.inner.blocks
        engine = start(model, config_of(3))
        for name, param in model.named_parameters():
            param.requires_grad_("block" in name)
        for step in range(2):
            for index, block in enumerate(blocks):
                # In the second step, rank 0 trains the first block, and rank 1 the last.
                block.requires_grad_(index == (len(blocks) - 1) * (dist.get_rank() or not step))
            engine.backward(engine((step, 0, dist.get_rank())))
            if step:
                with pytest.raises(StepError, match=r"^\S+ is whole on only one of ranks 0 and 1: they do not freeze"):
                    engine.step()
            else:
                engine.step()

    def test_modules_that_were_added_uncut(self):
        engine = train_engine(start(Net(), config_of(3)), 1)
        engine.module.probe = nn.Linear(2, 2).requires_grad_(False)
        engine.backward(engine((1, 0, dist.get_rank())))
        with pytest.raises(StepError, match="^probe.bias was added after .* build it under deepspeed.zero.Init"):
            engine.step()
        del engine.module.probe
        engine.step()

    def test_a_cut_model_at_stage_2(self):
        with deepspeed.zero.Init(config_dict_or_path=config_of(3)):
            model = TinyGpt()
        with pytest.raises(ConfigError, match="^tokens.weight is cut over the ranks .* zero_optimization.stage is 2"):
            start(model, config_of(2))

    def test_cuts_over_other_ranks(self):
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        with deepspeed.zero.Init(config_dict_or_path=config_of(3), data_parallel_group=alone):
            model = TinyGpt()
        with pytest.raises(ConfigError, match="is cut over the ranks .* and its gradients are averaged over"):
            start(model, config_of(3))

    def test_a_cut_that_has_moved(self):
        engine = train_engine(start(Net(), config_of(3)), 1)
        param = engine.module.embed.weight
        param.ds_tensor.data = param.ds_tensor.data.clone()
        engine.backward(engine((1, 0, dist.get_rank())))
        with pytest.raises(StepError, match="embed.weight"):
            engine.step()
