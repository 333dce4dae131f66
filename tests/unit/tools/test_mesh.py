"""Plans of meshes: sizes from options and configs, what is cut, and what is refused. Small meshes are compared with
their engines in tests/distributed/parallel/test_planned_meshes.py."""

import json
import re

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ds_layerwise.parallel.mesh import Mesh
from ds_layerwise.tools.dry_run import DryRun
from tests.support import model_specs
from tests.support.cli import assert_refused, run
from tests.support.rooms import rooms

pytestmark = rooms("mesh", "dry_run", "cli", "report")

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 16}
MOE = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}))


def experts():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**MOE))


def config(stage=1, **changes):
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, "reduce_bucket_size": 2048},
            "optimizer": {"type": "LayerWiseMuon", "params": {"muon_lr": 0.02, "adam_lr": 3e-4}}, **changes}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The arguments of a plan of a model that a function builds."""
    def arguments(build, given, ranks, *more):
        monkeypatch.setattr(model_specs, "small", build)
        (tmp_path / "ds.json").write_text(json.dumps(given))
        return ["plan", "--model", "tests.support.model_specs:small", "--config", tmp_path / "ds.json", "--ranks",
                ranks, *more]

    return arguments


def plans(arguments):
    code, out, err = run(*arguments, "--json", "--list")
    assert (code, err) == (0, "")
    return json.loads(out)


AUTO_EP = {"expert_parallel": {"enabled": True, "autoep_size": 4}}


def test_sizes_are_those_of_the_config_and_of_options_and_must_not_differ():
    given = {"sequence_parallel_size": 3, **AUTO_EP}
    assert Mesh.of(given, {"pp": 5, "ep": 4, "tp": 2}) == Mesh(tp=2, ep=4, sp=3, pp=5)
    assert Mesh.of({"tensor_parallel": {"autotp_size": 2}}, {"sp": 3}) == Mesh(tp=2, ep=1, sp=3, pp=1)
    assert Mesh.of({"tensor_parallel": {"autotp_size": 0}}, {"tp": 2}) == Mesh(2, 1, 1, 1)
    # A section that is off says nothing.
    assert Mesh.of({"expert_parallel": {"autoep_size": 4}}, {}) == Mesh(1, 1, 1, 1)
    assert Mesh(tp=2, ep=1, sp=3, pp=5).sharing(60) == 6


@pytest.mark.parametrize("given, options, message", [
    (AUTO_EP, ("--ep", "2"), "--ep is 2, and expert_parallel.autoep_size in the config is 4; leave the option out"),
    ({"sequence_parallel_size": 1}, ("--sp", "2"), "--sp is 2, and sequence_parallel_size in the config is 1"),
    ({"tensor_parallel": {"autotp_size": "x"}}, (), "tensor_parallel.autotp_size"),
    ({}, ("--pp", "3"), "--ranks is 8, all ranks of a run, and pp 3 x tp 1 x sp 1 does not divide it"),
    ({}, ("--sp", "4", "--tp", "4"), "pp 1 x tp 4 x sp 4 does not divide it"),
    ({}, ("--ep", "16"), "autoep_size=16 exceeds num_experts=8 in layer 'model.layers.0.mlp'"),
    ({}, ("--tp", "4"), "with 2 heads of keys and values, cannot be cut into 4 parts of equal size along axis 0"),
    ({"tensor_parallel": {"autotp_size": 2}}, (), "unsupported partition style"),
    ({"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2}, (), "autotp_size is 2, together with a"),
    (AUTO_EP, ("--tp", "2"), "a plan does not know experts that are whole beside tensor parallelism"),
    (config(2), ("--pp", "2"), "zero_optimization.stage must be 1 with a PipelineModule, got 2"),
    (AUTO_EP, ("--pp", "2"), "expert_parallel.enabled is true, together with a pipeline"),
    (config(3), ("--tp", "2", "--ep", "2"), "zero_optimization.stage is 3, and experts of deepspeed.moe, experts"),
])
def test_sizes_and_settings_that_do_not_go_together_are_refused(given, options, message, command):
    assert_refused(message, *command(experts, {**config(), **given}, "8", *options))


def test_an_expert_that_tensor_parallelism_leaves_whole_is_refused(command):
    def build():
        model = llama()
        model.expert = nn.Linear(16, 16, bias=False)
        model.expert.weight.allreduce, model.expert.weight.group_name = False, "ep_size_2"
        return model

    assert_refused("a plan does not know experts that are whole", *command(build, config(), "8", "--tp", "2"))


@pytest.mark.parametrize("build, given", [
    (lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32)), {}),
    (llama, {"tensor_parallel": {"autotp_size": 2, "preset_model": "llama"}})])
def test_models_that_transformers_has_no_plan_for_and_plans_of_others_are_refused(build, given, command):
    assert_refused("as its class in transformers says (base_model_tp_plan), not as tensor_parallel.partition_config or",
                   *command(build, {**config(), **given}, "8", "--tp", "2"))


def test_a_part_of_a_model_has_its_share_of_what_transformers_cuts(command):
    whole, = plans(command(llama, config(), "4"))
    cut, = plans(command(llama, config(), "8", "--tp", "2"))
    assert whole["ranks"] == cut["ranks"] == 4
    for one, part in zip(whole["parameters"], cut["parameters"], strict=True):
        factors = {"embed": (1, 1), "norm": (1,), "o_proj": (1, 2), "down": (1, 2)}
        wanted = next((factors[key] for key in factors if key in one["name"]), (2, 1))
        assert one["shape"] == [size * factor for size, factor in zip(part["shape"], wanted, strict=True)], one["name"]
        cut_rows = "rows over 2 ranks" in part["reason"], "columns over 2 ranks" in part["reason"]
        assert cut_rows == ((wanted == (2, 1), wanted == (1, 2)) if part["optimizer"] == "muon" else (False, False))
    assert cut["sent_by_axis_bytes"]["tensor"] == max(cut["sent_to_tensor_peers_bytes"]) > 0
    out = run(*command(llama, config(), "8", "--tp", "2", "--gb_s", "1", "--verbose"))[1]
    assert "sent over tensor" in out
    all_axes = sum(cut["sent_by_axis_bytes"].values())
    told, = plans(command(llama, config(), "8", "--tp", "2", "--gb_s", "1"))
    assert told["sent_seconds"] == pytest.approx(all_axes / 1e9)
    assert f"{all_axes / 1000:.1f} us" in re.search(r"sent at 1 GB/s.*", out)[0]
    assert whole["sent_by_axis_bytes"] == {"data": whole["sent_by_busiest_bytes"], "expert-data": 0, "tensor": 0,
                                           "pipeline ties": 0}


def test_experts_are_stacks_of_each_ranks_own_at_every_stage(command):
    for stage in (1, 2, 3):
        plan, = plans(command(experts, config(stage), "8", "--ep", "4"))
        stacks = [row["shape"] for row in plan["parameters"] if ".experts." in row["name"]]
        assert stacks == [[2, 8, 16], [2, 16, 8], [2, 8, 16]] * 4
        axes = plan["sent_by_axis_bytes"]
        assert axes["data"] > 0 < axes["expert-data"] < plan["sent_by_busiest_bytes"] <= sum(axes.values())
    # Nobody else has the experts of a rank.
    alone, = plans(command(experts, config(), "8", "--ep", "8"))
    assert alone["sent_by_axis_bytes"]["expert-data"] == 0


def test_sequences_change_no_plan(command):
    one, other = (plans(command(llama, config(stage), "8", *more)) for stage, more in ((2, ()), (2, ("--sp", "4"))))
    assert one == other


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_of_a_pipeline_is_a_plan_of_its_layers(tied, command):
    arguments = command(lambda: llama(tie_word_embeddings=tied), config(), "8,16", "--pp", "4")
    found = plans(arguments)
    assert [plan["ranks"] for plan in found] == [2, 4] * 4
    layers = [{re.sub(r"(\.\d+)\..*|\.weight$", r"\1", row["name"]) for row in plan["parameters"]}
              for plan in found[::2]]
    everywhere = [name for names in layers for name in names]
    assert len(everywhere) == len({*everywhere}) + tied
    assert {*everywhere} >= {f"model.layers.{i}" for i in range(4)} | {"model.embed_tokens", "model.norm"}
    shared = [plan["sent_by_axis_bytes"]["pipeline ties"] for plan in found[::2]]
    # In bfloat16, and of two stages each sends half of it twice.
    assert shared == [2 * 32 * 16 * tied, 0, 0, 2 * 32 * 16 * tied]
    out = run(*arguments, "--verbose")[1]
    told = re.findall(r"stage (\d) on (\d) ranks: ([\d,.]+) elements, needs .* MiB, sends .* MiB", out)
    assert [(int(stage), int(ranks)) for stage, ranks, _ in told] == [(s, r) for s in range(4) for r in (2, 4)]
    assert [int(numel.replace(",", "")) for *_, numel in told] == [plan["elements"] for plan in found]
    assert ("sent over pipeline ties" in out) == tied


def test_a_pipeline_of_more_stages_than_layers_is_refused(command):
    assert_refused("of the pipeline has nothing to train; cut it elsewhere",
                   *command(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config(), "4", "--pp", "4"))


def test_changes_that_fit_are_tried_on_the_mesh(command):
    def rows(ranks, *more):
        code, out, err = run(*command(experts, config(), ranks, "--fit", "1", *more))
        assert (code, err) == (0, "")
        return [line for line in out.splitlines() if line.startswith("│")]

    # Stage 3 trains no tensor shards.
    assert [len(rows("8", "--ep", "4", *more)) for more in ((), ("--tp", "2"))] == [3, 2]
    assert rows("8", "--ep", "4") != rows("8")


@pytest.mark.parametrize("model, ranks, sizes, numel", [
    ("deepseek-v3", 256, {"pp": 4, "ep": 64}, 671_026_404_352), ("qwen3-30b-a3b", 64, {"ep": 8}, 30_532_122_624),
    ("kimi-k2", 1024, {"tp": 2, "pp": 16, "ep": 32}, 1_026_408_209_408)])
def test_large_meshes_hold_the_whole_model_once(model, ranks, sizes, numel):
    plan = DryRun.of(model, config(), [ranks], mesh=sizes)
    total = 0
    for stage in plan.stages:
        forecast, = stage.forecasts
        assert forecast.layout.world_size == ranks // (sizes.get("pp", 1) * sizes.get("tp", 1))
        for spec in stage.specs:
            is_cut = plan.routes[spec.name].is_cut
            total += spec.numel * spec.ep_size * (sizes.get("tp", 1) if is_cut else 1)
            assert (spec.ep_size > 1) == (".experts." in spec.name)
    assert total == numel
    assert {spec.ep_size for stage in plan.stages for spec in stage.specs} == {1, sizes["ep"]}
