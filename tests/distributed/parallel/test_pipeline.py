"""Pipelines against the same model in one piece."""

import json
import shutil
from importlib.util import find_spec

import deepspeed.comm as dist
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from safetensors.torch import load_file
from torch import nn

import ds_layerwise
from ds_layerwise.errors import ConfigError, LayerWiseError, LayoutError, RoutingError
from tests.support import auto_ep, internals
from tests.support.checkpoints import assert_equal_states, on_rank_0
from tests.support.cli import assert_refused, run
from tests.support.harness import DistributedTest, made_once
from tests.support.models import Block
from tests.support.reference import Recipe, train, train_on_gradients, whole_number_gradients
from tests.support.rooms import rooms
from tests.support.training import BF16, allow_fp16, ds_config, from_all_ranks, reduced_gradients, relative_error, start
from tests.support.universal import convert
from tests.support.versions import needs

#: DeepSpeed sends tied weights through torch's autograd, which that cannot follow and need not.
pytestmark = [*rooms("pipeline"),
              pytest.mark.filterwarnings("ignore:c10d")]

VOCAB, LENGTH, WIDTH, GAS, STEPS = 24, 8, 16, 2, 5

#: The gradient of a key's bias is nothing but rounding, which Adam would make as large as every other.
EPS = 1e-4


class Embedding(nn.Module):
    """Token and position embeddings; with ``weight`` tied, also what turns activations into logits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.1)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens):
        return F.embedding(tokens, self.weight) + self.positions.weight


def logits(embedding, x):
    return F.linear(x, embedding.weight)


def layers(tied):
    """The layers of a language model, with weights that depend on their place alone."""
    if tied:
        first, last = TiedLayerSpec("embed", Embedding), TiedLayerSpec("embed", Embedding, forward_fn=logits)
    else:
        first, last = LayerSpec(nn.Embedding, VOCAB, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCAB, bias=False)
    return [first, LayerSpec(Block, WIDTH, 2), LayerSpec(Block, WIDTH, 2), LayerSpec(nn.LayerNorm, WIDTH), last]


def token_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten())


def pipeline(stages, *, tied=True, more=(), **options):
    return PipelineModule([*layers(tied), *more], num_stages=stages, loss_fn=token_loss, seed_layers=True,
                          partition_method="uniform", **options)


def batch(step, micro, pipe):
    """Tokens to read, and to predict, of one of the pipelines."""
    generator = torch.Generator().manual_seed(1 + pipe + 100 * micro + 10_000 * step)
    tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


class InOnePiece(nn.Module):
    """The same layers by the same names, on one rank."""

    def __init__(self, tied):
        super().__init__()
        self.tied = tied
        specs = layers(tied)
        if tied:
            self.tied_modules = nn.ModuleDict()
        for index, spec in enumerate(specs):
            torch.manual_seed(1234 + index)
            if not tied or 0 < index < 4:
                self.add_module(str(index), spec.build())
            elif index == 0:
                self.tied_modules["embed"] = spec.build()

    def forward(self, x):
        modules = dict(self.named_children())
        embed = self.tied_modules["embed"] if self.tied else None
        x = embed(x) if self.tied else modules["0"](x)
        for index in "123":
            x = modules[index](x)
        return logits(embed, x) if self.tied else modules["4"](x)


#: Linear layers of the blocks, as (batch, rows, cols).
MATRICES = {f"{i}.{name}.weight": (1, rows, cols) for i in (1, 2)
            for name, rows, cols in (("qkv", 48, 16), ("proj", 16, 16), ("up", 64, 16), ("down", 16, 64))}


def oracle(tied, pipes, num_steps=STEPS, **kwargs):
    recipe = Recipe(matrices=MATRICES, world_size=pipes, gas=GAS, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1,
                    eps=EPS, **kwargs)
    return train(lambda: InOnePiece(tied), batch, lambda module, data: token_loss(module(data[0]), data[1]), recipe,
                 num_steps)


def config(**changes):
    return ds_config(gas=GAS, params={"eps": EPS}, **changes)


def train_pipeline(engine, num_steps, *, first=0):
    """Returns the losses."""
    pipe = engine.grid.get_data_parallel_id()
    return [float(engine.train_batch(iter([batch(step, micro, pipe) for micro in range(GAS)])))
            for step in range(first, first + num_steps)]


#: The last stage has it, too, and has no use for it.
UNUSED = "tied_modules.embed.positions.weight"


def of_all_stages(mine):
    """Tensors by key, those of the first rank that has a key; all ranks have the same, bit for bit."""
    everyone = from_all_ranks(mine)
    whole = {}
    for theirs in everyone:
        for key, value in theirs.items():
            if UNUSED not in key:
                assert torch.equal(whole.setdefault(key, value), value), key
            whole.setdefault(key, value)
    return whole


def whole_weights(engine):
    """Every parameter of every stage, by name."""
    engine.optimizer.wait_for_params()
    return of_all_stages({name: p.detach().clone() for name, p in engine.module.named_parameters()})


def whole_states(engine):
    """Every master and state of every stage, by parameter and key, whole and 1-D."""
    mine = {}
    for piece in internals.records(engine):
        for key, value in {"fp32": piece.master, **piece.state}.items():
            mine[piece.name, key] = (piece.param_start, value.clone())
    everyone = from_all_ranks(mine, engine.optimizer.dp_process_group)
    whole = {}
    for name, key in {k for theirs in everyone for k in theirs}:
        parts = sorted((theirs[name, key] for theirs in everyone if (name, key) in theirs), key=lambda part: part[0])
        whole[name, key] = parts[0][1] if key == "step" else torch.cat([value for _, value in parts])
    return of_all_stages(whole)


class TestAgainstOnePiece(DistributedTest):
    thorough_on = (2,)

    @pytest.mark.world_size([2, 4])
    def test_two_stages(self):
        compare(2, True, clip=0.3)

    @pytest.mark.world_size(2)
    def test_a_single_stage_and_two_without_tied_weights(self):
        compare(1, True, clip=0.3)
        compare(2, False, clip=0.3, layerwise={"overlap_param_gather": True})

    @needs("deepspeed>=0.19.8", "its activation checkpointing asks a CPU for a stream")
    @pytest.mark.world_size(2)
    def test_activation_checkpointing(self):
        compare(2, True, clip=0.3, pipeline={"activation_checkpoint_interval": 1},
                module_options={"checkpointable_layers": ["Block"]})
        compare(2, True, clip=0.3, pipeline={"activation_checkpoint_interval": 2, "use_reentrant": False})


def compare(stages, tied, *, clip, module_options=None, **changes):
    """Train a pipeline and the oracle: losses, norms and weights."""
    pipes = dist.get_world_size() // stages
    expected = oracle(tied, pipes, clip=clip)
    assert expected.steps[0].clip_factor > 1.5
    engine = start(pipeline(stages, tied=tied, **(module_options or {})), config(clip=clip, **changes))
    assert (engine.grid.pipe_parallel_size, engine.optimizer.layout.world_size) == (stages, pipes)
    for step in range(STEPS):
        loss, = train_pipeline(engine, 1, first=step)
        assert loss == pytest.approx(expected.steps[step].loss, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(expected.steps[step].norm, rel=1e-5)
    found = whole_weights(engine)
    assert found.keys() == expected.params.keys()
    for name, value in expected.params.items():
        assert relative_error(found[name], value) < 1e-5, name
    engine.destroy()


class Numbers(nn.Module):
    """Adds to a sum what gives its weight whole numbers for a gradient: others in every micro-batch and pipeline."""

    def __init__(self, rows, cols):
        super().__init__()
        torch.manual_seed(7)
        self.weight = nn.Parameter(torch.randn(rows, cols))

    def forward(self, x, place="first"):
        numbers = whole_number_gradients(place, self.weight.shape, *(int(n) for n in x[0, :3]))
        return torch.cat([x[:, :3].detach(), x[:, 3:] + (self.weight * numbers).sum()], dim=1)


def at_the_end(module, x):
    return module(x, "last")


class TestGradients(DistributedTest):
    """Whole numbers add up exactly. Muon and Adam forget the scale of a gradient, and what is added twice."""

    @pytest.mark.world_size(4)
    def test_sums_norm_and_updates(self):
        bf16, on_host = BF16, {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        for changes in ({}, bf16, {**bf16, "data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": on_host}):
            specs = [TiedLayerSpec("tied", Numbers, 7, 9), LayerSpec(Numbers, 12, 5), LayerSpec(Numbers, 6, 30),
                     TiedLayerSpec("tied", Numbers, 7, 9, forward_fn=at_the_end)]
            engine = start(PipelineModule(specs, num_stages=2, partition_method="uniform",
                                          loss_fn=lambda x, _: x[:, 3].sum()), ds_config(gas=2, clip=5.0, **changes))
            expected = self.oracle(torch.bfloat16 if changes else torch.float32)
            assert expected.steps[0].clip_factor > 2
            optimizer, found = engine.optimizer, {}
            take_step = optimizer.step

            def step():
                found.update(reduced_gradients(engine))
                take_step()

            optimizer.step = step
            pipe = engine.grid.get_data_parallel_id()
            for index, wanted in enumerate(expected.steps):
                engine.train_batch(iter([(torch.tensor([[index, micro, pipe, 0.0]]).requires_grad_(), torch.zeros(1))
                                         for micro in range(2)]))
                for name, (first, values) in found.items():
                    assert torch.equal(values, wanted.grads[name].flatten()[first:first + values.numel()]), name
                assert engine.get_global_grad_norm() == torch.tensor(wanted.norm, dtype=torch.float32)
            states = whole_states(engine)
            for name, value in expected.params.items():
                assert relative_error(states[name, "fp32"], value.flatten()) < 1e-5, name
            whole_weights(engine)
            engine.destroy()

    def oracle(self, dtype):
        def gradient(name, shape, *place):
            return sum(whole_number_gradients(where, shape, *place)
                       for where in (["first", "last"] if "tied" in name else ["first"]))

        shapes = {"1.weight": (12, 5), "2.weight": (6, 30), "tied_modules.tied.weight": (7, 9)}
        recipe = Recipe(matrices={name: (1, *shape) for name, shape in shapes.items() if "tied" not in name}, gas=2,
                        world_size=2, clip=5.0, muon_lr=0.02, adam_lr=0.003, weight_decay=0.1, param_dtype=dtype)
        return train_on_gradients({name: Numbers(*shape).weight for name, shape in shapes.items()}, gradient, recipe, 3)

    @pytest.mark.world_size(4)
    def test_an_overflow_on_one_rank_skips_the_step_on_all(self):
        allow_fp16()
        for bad in (1, 2):
            engine = start(pipeline(2), config(fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}))
            train_pipeline(engine, 1)
            before = whole_states(engine)
            spoil = next(p for name, p in engine.module.named_parameters() if name in ("1.qkv.bias", "3.bias"))
            hook = spoil.register_hook(lambda grad: grad * (float("inf") if dist.get_rank() == bad else 1))
            train_pipeline(engine, 1, first=1)
            assert (engine.skipped_steps, engine.optimizer.loss_scale) == (1, 128)
            assert_equal_states(whole_states(engine), before)
            hook.remove()
            train_pipeline(engine, 1, first=2)
            assert (engine.skipped_steps, engine.optimizer.step_count) == (1, 2)
            whole_weights(engine)
            engine.destroy()


class Projected(nn.Module):
    """A layer of which each stage has one, with the name of a head."""

    def __init__(self):
        super().__init__()
        self.proj_out = nn.Linear(8, 8)


class TestRouting(DistributedTest):
    @pytest.mark.parametrize("matrix", ["muon", "torch.optim:Adafactor"])
    def test_a_stage_decides_as_the_whole_model_would(self, matrix):
        """The last linear layer is a head if it has an embedding's shape, wherever that embedding is."""
        specs = [LayerSpec(nn.Embedding, 12, 8), LayerSpec(nn.Linear, 8, 12), LayerSpec(nn.Linear, 12, 8),
                 LayerSpec(nn.Linear, 8, 12)]
        found = []
        for stages in (1, 2):
            engine = start(PipelineModule(specs, num_stages=stages, partition_method="uniform", loss_fn=token_loss),
                           ds_config(layerwise={"overrides": [{"name": "2.weight", "lr_scale": 0.5}]}, optimizer={
                               "type": "LayerWise", "params": {"matrix_optimizer": matrix, "muon_lr": 0.02}}))
            everyone = from_all_ranks({name: (route.recipe, route.reason, route.lr_scale)
                                      for name, route in engine.optimizer.routes.items()})
            found.append({name: route for routes in everyone for name, route in routes.items()})
            engine.destroy()
        assert found[0] == found[1]
        assert {name for name, route in found[0].items() if route[0].whole} == {"1.weight", "2.weight"}

    def test_a_name_that_repeats_on_other_stages_is_no_heads(self):
        specs = [LayerSpec(nn.Embedding, 12, 8), *[LayerSpec(Projected)] * 2, LayerSpec(nn.Linear, 8, 12)]
        engine = start(PipelineModule(specs, num_stages=2, partition_method="uniform", loss_fn=token_loss), config())
        reasons = {name: route.reason for name, route in engine.optimizer.routes.items() if "weight" in name}
        assert reasons == [{"0.weight": "embedding", "1.proj_out.weight": "matrix"},
                           {"2.proj_out.weight": "matrix",
                            "3.weight": "output head (last linear layer, shaped like an embedding)"}][dist.get_rank()]

    def test_conditions_are_for_the_whole_model_and_its_map_has_all_stages(self, tmp_path):
        # Which stage has a parameter makes no difference, neither to what is set nor to what is missed.
        overrides = [{"module": "LayerNorm", "regex": "3[.].*", "weight_decay": 0.5}, {"attr": "is_first", "lr": 0.5},
                     {"shape": [48, None], "min_elements": 768, "momentum": 0.5}, {"ndim": 1, "name": "2.*", "lr": 0.1}]
        rows = []
        for stages in (1, 2):
            path, module = tmp_path / f"{stages}.json", pipeline(stages, tied=False)
            for name, param in module.named_parameters():
                param.is_first = name == "0.weight"
            start(module, config(layerwise={"overrides": overrides, "dump_param_map": str(path)}))
            dist.barrier()
            plans = json.loads(path.read_text())
            assert len(plans) == stages
            rows.append({row["name"]: (row["weight_decay"], row["lr_ratio"], row["reason"]) for plan in plans
                         for row in plan["parameters"]})
        assert rows[0] == rows[1]
        assert [rows[1][name][:2] for name in ("0.weight", "2.up.bias", "3.weight", "1.norm1.weight", "4.weight")] == [
            (0.1, 0.5 / 0.003), (0.1, 0.1 / 0.003), (0.5, 1), (0.1, 1), (0.1, 1)]
        with pytest.raises(RoutingError, match=r"overrides\[0\] \(module 'Conv\*'\) matches no trainable parameter"):
            start(pipeline(2), config(layerwise={"overrides": [{"module": "Conv*", "lr": 2.0}]}))

    def test_overrides_are_for_the_names_of_the_whole_model(self):
        overrides = [{"name": "1.qkv.weight", "num_heads": 3, "momentum": 0.5}, {"name": "2.up.*", "lr_scale": 0.5},
                     {"name": "tied_modules.embed.*", "betas": [0.5, 0.75]}, {"name": "2.down.weight",
                                                                             "optimizer": "lion"}]
        found = []
        for stages in (1, 2):
            engine = start(pipeline(stages), config(layerwise={"overrides": overrides}))
            everyone = from_all_ranks({name: (route.described(), route.matrix_shape)
                                      for name, route in engine.optimizer.routes.items()})
            found.append({name: route for routes in everyone for name, route in routes.items()})
            held = engine.optimizer.forecast().memory[dist.get_rank(engine.optimizer.settings.group)]
            assert held.states == sum(value.nbytes for state in internals.states(engine).values()
                                      for key, value in state.items() if key != "step")
            engine.destroy()
        whole, staged = found
        assert staged == whole
        assert staged["1.qkv.weight"][1] == (3, 16, 16) and "lion" in staged["2.down.weight"][0]

    def test_no_matrix_and_no_match_in_any_stage(self):
        norms = [LayerSpec(nn.LayerNorm, 8), LayerSpec(nn.LayerNorm, 8)]
        with pytest.raises(RoutingError, match="no parameter goes to the matrix optimizer, of 4 trainable ones"):
            start(PipelineModule(norms, num_stages=2, loss_fn=token_loss), ds_config())
        with pytest.raises(RoutingError, match=r"overrides\[0\] \('7.weight'\) matches no trainable parameter"):
            start(pipeline(2), config(layerwise={"overrides": [{"name": "7.weight", "lr_scale": 2.0}]}))

    def test_parameters_that_stages_share_are_trained_alike(self):
        module = pipeline(2)
        groups = [{"params": list(module.parameters()), "weight_decay": 0.1 * dist.get_rank()}]
        with pytest.raises(LayoutError, match="tied_modules.embed.weight is shared by stages 0 and 1 of the pipeline"):
            ds_layerwise.initialize(model=module, model_parameters=groups, config=config())

        def with_positions(embedding, x):
            return logits(embedding, x + embedding.positions.weight)

        specs = layers(True)[:-1] + [TiedLayerSpec("embed", Embedding, forward_fn=with_positions)]
        engine = start(PipelineModule(specs, num_stages=2, loss_fn=token_loss), config())
        with pytest.raises(LayerWiseError, match="tied_modules.embed.positions.weight got a gradient on a later stage"):
            train_pipeline(engine, 1)


REFUSED = {
    "stage 2": ({"stage": 2}, "zero_optimization.stage must be 1 with a PipelineModule, got 2"),
    "rename": ({"layerwise": {"rename": {"a": "b"}}}, "layerwise.rename is not supported with a PipelineModule"),
    "own disks": ({"checkpoint": {"use_node_local_storage": True}}, "use_node_local_storage is not supported with a P"),
}


class TestRefused(DistributedTest):
    def test_at_start(self):
        for changes, message in REFUSED.values():
            with pytest.raises(ConfigError, match=message):
                start(pipeline(2), config(**changes))
        functions = [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8), torch.relu, torch.relu]
        with pytest.raises(LayerWiseError, match="stage 1 of the pipeline has nothing to train"):
            start(PipelineModule(functions, num_stages=2, partition_method="uniform", loss_fn=token_loss), config())
        if find_spec("deepspeed.runtime.pipe.dualpipev"):
            from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
            with pytest.raises(ConfigError, match="DualPipeVModule is not supported by this optimizer"):
                start(DualPipeVModule(layers(False), num_stages=2, loss_fn=token_loss), config())

    @pytest.mark.world_size(4)
    def test_experts_that_auto_ep_spreads(self):
        with pytest.raises(ConfigError, match="expert_parallel.enabled is true, together with a pipeline"):
            start(PipelineModule([LayerSpec(auto_ep.Routed)] * 2, num_stages=2, loss_fn=token_loss),
                  config(expert_parallel=auto_ep.section(2, moe_layer_pattern=r"\d+")))


def with_frozen(stages, **options):
    """A pipeline with a parameter that is not trained, and a buffer."""
    module = pipeline(stages, **options)
    for name, layer in module.named_children():
        if name == "3":
            layer.bias.requires_grad_(False)
            layer.register_buffer("seen", torch.tensor([1.0, 2.0]))
    return module


def not_trained(engine):
    """Frozen parameters and buffers of all stages."""
    trained = {f"{name}" for name in internals.trained(engine)}
    return of_all_stages({name: value.clone() for name, value in engine.module.state_dict().items()
                          if name not in trained})


class TestCheckpoints(DistributedTest):
    """Two pipelines of two stages save; others read it."""

    thorough_on = (1, 2)

    @pytest.fixture
    def run_of_4(self, class_tmpdir):
        """A checkpoint, what was saved in it, and what comes of the steps after it."""
        return made_once(class_tmpdir / "run", [4], self.save)

    def save(self, folder):
        engine = self.start_4()
        train_pipeline(engine, 3)
        # DeepSpeed's count of passes does not come down again on the first stages.
        assert engine.optimizer.checkpointing.header().repeats == ""
        engine.save_checkpoint(folder, client_state={"key": "value"})
        saved = {"states": whole_states(engine), "others": not_trained(engine)}
        on_rank_0(lambda: torch.save(saved, folder / "saved.pt"))
        later = self.go_on(engine)
        on_rank_0(lambda: torch.save(later, folder / "later.pt"))

    def start_4(self):
        return start(with_frozen(2), config(layerwise={"save_universal": True}, bf16={
            "enabled": True}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 9}}))

    def go_on(self, engine):
        """Train for three steps; their losses, and what the last one leaves."""
        losses = train_pipeline(engine, 3, first=3)
        return {"losses": losses, "lr": engine.get_lr(), "states": whole_states(engine),
                "weights": whole_weights(engine)}

    @pytest.mark.world_size(4)
    def test_resume_bit_for_bit(self, run_of_4, tmp_path):
        resumed = self.start_4()
        train_pipeline(resumed, 2, first=70)
        # A folder whose name means something else to glob.
        folder = tmp_path / "run [1]*"
        on_rank_0(lambda: folder.symlink_to(run_of_4))
        assert resumed.load_checkpoint(folder)[1]["key"] == "value"
        assert (resumed.global_steps, resumed.optimizer.step_count) == (3, 3)
        found, expected = self.go_on(resumed), torch.load(run_of_4 / "later.pt")
        assert found["losses"] == expected["losses"] and found["lr"] == expected["lr"]
        assert_equal_states(found["states"], expected["states"])
        assert_equal_states(found["weights"], expected["weights"])

    @pytest.mark.world_size([1, 2, 4])
    def test_any_number_of_stages_and_pipelines(self, run_of_4):
        """Every weight and state is found by its name."""
        for stages in {1: [1], 2: [2, 1], 4: [4]}[dist.get_world_size()]:
            engine = start(with_frozen(stages), config(bf16={"enabled": True}))
            expected = torch.load(run_of_4 / "saved.pt")
            for tag in ("global_step3", "global_step3_universal"):
                self.load(engine, run_of_4, tag, expected)
                assert engine.optimizer.step_count == engine.global_steps == 3
            self.load(engine, run_of_4, "global_step3", expected, load_module_only=True, states=False)

    @pytest.mark.world_size([1, 2])
    def test_weights_alone_need_no_file_of_the_optimizer(self, run_of_4, tmp_path):
        on_rank_0(lambda: shutil.copytree(run_of_4 / "global_step3", tmp_path / "weights",
                                          ignore=shutil.ignore_patterns("*optim*", "layerwise_manifest.json")))
        engine = start(with_frozen(dist.get_world_size()), config(bf16={"enabled": True}))
        expected = torch.load(run_of_4 / "saved.pt")
        self.load(engine, tmp_path, "weights", expected, load_optimizer_states=False, states=False)

    @pytest.mark.world_size(2)
    def test_deepspeeds_converter(self, run_of_4, tmp_path):
        convert(run_of_4 / "global_step3", tmp_path / "converted")
        engine = start(with_frozen(2), config(bf16={"enabled": True}))
        with pytest.raises(LayerWiseError, match="converted lacks 3.bias, 3.seen, which the model has; load wh"):
            engine.load_checkpoint(tmp_path, tag="converted")
        expected = torch.load(run_of_4 / "saved.pt")
        self.load(engine, tmp_path, "converted", expected, load_module_strict=False, others=False)

    def load(self, engine, folder, tag, expected, *, states=True, others=True, **options):
        """Load over other values, and compare with what was saved."""
        train_pipeline(engine, 1, first=70)
        for name, value in engine.module.state_dict().items():
            if name not in internals.trained(engine):
                value.fill_(7)
        engine.load_checkpoint(folder, tag=tag, **options)
        for name, value in whole_weights(engine).items():
            if (name, "fp32") in expected["states"]:
                assert torch.equal(value.flatten(), expected["states"][name, "fp32"].bfloat16()), name
        if states:
            assert_equal_states(whole_states(engine), expected["states"])
        if others:
            assert_equal_states(not_trained(engine), expected["others"])

    @pytest.mark.world_size(2)
    def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(self, run_of_4, tmp_path):
        engine = start(with_frozen(2), config(bf16={"enabled": True}))
        before = whole_states(engine)
        for module, message in (
                (with_frozen(2, more=[LayerSpec(nn.LayerNorm, VOCAB)]), "has 0 files of layer 5, and needs 1;"),
                (pipeline(2), "layer 3 of the checkpoint has seen, which the model lacks; load what fits with load_")):
            other = start(module, config())
            for states in (True, False):
                with pytest.raises(LayerWiseError, match=message):
                    other.load_checkpoint(run_of_4, tag="global_step3", load_optimizer_states=states)
            other.destroy()
        layer = tmp_path / "global_step3" / "layer_03-model_states.pt"
        on_rank_0(lambda: shutil.copytree(run_of_4 / "global_step3", tmp_path / "global_step3"))
        on_rank_0(lambda: layer.write_bytes(layer.read_bytes()[:-1]))
        for states in (True, False):
            with pytest.raises(LayerWiseError, match="layer_03-model_states.pt"):
                engine.load_checkpoint(tmp_path, tag="global_step3", load_optimizer_states=states)
        assert_equal_states(whole_states(engine), before)

    @pytest.mark.world_size(1)
    def test_without_an_engine(self, run_of_4, tmp_path):
        folder = run_of_4 / "global_step3"
        expected = torch.load(run_of_4 / "saved.pt")
        for command in (["verify", folder], ["to-universal", folder, tmp_path / "out"],
                        ["consolidate", folder, tmp_path / "out"]):
            assert_refused("was saved by a pipeline, which only a pipeline reads", *command)
        code, out, _ = run("verify", f"{folder}_universal")
        assert code == 0 and "tensor-parallel part" not in out, out
        code, *_ = run("consolidate", f"{folder}_universal", tmp_path / "out.safetensors")
        found = load_file(tmp_path / "out.safetensors")
        assert code == 0 and found.keys() == expected["others"].keys() | {name for name, _ in expected["states"]}
        for (name, key), value in expected["states"].items():
            if key == "fp32":
                assert torch.equal(found[name].flatten(), value), name
