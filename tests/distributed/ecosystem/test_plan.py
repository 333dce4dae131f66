"""``ds-layerwise plan`` against the engine that it speaks of: the layout, every number and the printed table."""

import json
import math

import deepspeed.comm as dist
import pytest
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, LlamaConfig, LlamaForCausalLM

from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.ranks.comm import nodes
from ds_layerwise.tools.dry_run import DryRun
from tests.support.cli import run
from tests.support.harness import DistributedTest
from tests.support.models import tiny_gpt
from tests.support.rooms import rooms
from tests.support.training import BF16, allow_fp16, ds_config, start

pytestmark = rooms("forecast", "memory", "report", "dry_run", "run_plan")

SPLIT = {"overrides": [{"name": "blocks.*.qkv.weight", "num_heads": 3},
                       {"name": "*.down.weight", "optimizer": "scalar"},
                       {"name": "tokens.weight", "optimizer": "matrix"}]}

CASES = {
    "fp32": {},
    "bf16": {**BF16, "bucket_numel": 1},
    "sums in fp32": {**BF16, "data_types": {"grad_accum_dtype": "torch.float32"}},
    "sent in fp32": {**BF16, "communication_data_type": "fp32", "layerwise": {"layout": "lpt", "alignment": 4}},
    "fp16 and Lion": {"fp16": {"enabled": True}, "params": {"scalar_optimizer": "lion", "ns_steps": 3}},
    "stage 2": {"stage": 2, "layerwise": {"layout": "size_matching"}},
    "stage 2, sent in bf16": {"stage": 2, "communication_data_type": "BF16", **BF16},
    "on the host": {**BF16, "zero_optimization": {
        "stage": 2, "reduce_bucket_size": 600, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "overrides": {"layerwise": SPLIT, "params": {"ns_method": "gram"}},
    "defaults": {"bucket_numel": None},
}


#: Small models of ten families of transformers. What a config does not name has the value of :data:`SIZES`.
FAMILIES = {
    "llama": {}, "qwen3": {"head_dim": 8}, "phi3": {"pad_token_id": 0},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},
    "gpt_neox": {"num_attention_heads": 2}, "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "deepseek_v3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 8,
                    "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
                    "moe_intermediate_size": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "bert": {"architectures": ["BertForSequenceClassification"]},
    "vit": {"image_size": 8, "patch_size": 4, "architectures": ["ViTForImageClassification"]},
}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}


def built(family):
    """A model of a family, and its config."""
    hf_config = AutoConfig.for_model(family, **{**({} if family == "gpt2" else SIZES), **FAMILIES[family]})
    name, = hf_config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)].__name__]
    hf_config.architectures = [name]
    return getattr(transformers, name)(hf_config), hf_config


def as_on_the_host(config):
    """The text of a config whose plan has the sums of ranks without devices."""
    return json.dumps({**config, "layerwise": {**config.get("layerwise", {}), "reduction": "ordered"}})


def assert_same(engine, model, path, told_beside=""):
    """Check that a plan says of ``model`` what the engine says: its layout, numbers, routes and table."""
    size = engine.optimizer.layout.world_size
    arguments = ["plan", "--model", model, "--config", path, "--ranks", size]
    code, out, err = run(*arguments, "--json", "--list")
    assert code == 0 and err.endswith(told_beside) and err.count("\n") == bool(told_beside)
    plan, = json.loads(out)
    assert plan["digest"] == engine.optimizer.layout.digest()
    assert plan.pop("parameters") == json.loads(json.dumps(engine.optimizer.listed()))
    assert plan == as_json(engine.optimizer.forecast())
    table, costs = run(*arguments, "--verbose")[1].removeprefix(err).split("layout ")
    run_table, run_costs = engine.optimizer.describe().split("layout ")
    assert costs.strip() == run_costs.strip()
    # An engine knows in which dtype it multiplies.
    assert table.partition("optimizer: whole")[0] == run_table.partition("optimizer: whole")[0]


@pytest.mark.usefixtures("wide_tables")
class TestAgainstTheEngine(DistributedTest):
    world_size = [1, 3]

    def test_every_number_is_the_engines(self, tmp_path):
        allow_fp16()
        path = tmp_path / f"{dist.get_rank()}.json"
        for case, changes in CASES.items():
            config = ds_config(**changes)
            if changes.get("bucket_numel", 1) is None:
                config["zero_optimization"]["reduce_bucket_size"] = "auto"
            path.write_text(as_on_the_host(config))
            engine = start(tiny_gpt(), config)
            # Nobody has filled it in, and the model says no hidden_size, so that both take DeepSpeed's default.
            assert_same(engine, "tests.support.models:tiny_gpt", path,
                        "zero_optimization.reduce_bucket_size = 500000000\n" if case == "defaults" else "")
            engine.destroy()

    @pytest.mark.world_size(2)
    def test_a_short_table_is_one_line(self):
        engine = start(tiny_gpt(), ds_config(layerwise={"table": "short"}, gradient_clipping=0.5))
        line = engine.optimizer.describe()
        rows = engine.optimizer.listed()
        numels = {rule: [math.prod(row["shape"]) for row in rows if row["optimizer"] == rule] for rule in (
            "muon", "adamw")}
        assert line.startswith(f"{sum(map(sum, numels.values())):,} elements in each rank's model: " + ", ".join(
            f"{rule} trains {sum(found):,} in {len(found)} tensors" for rule, found in numels.items()))
        assert line.endswith(" MiB a rank; gradient_clipping: 0.5") and "; 2 ranks, " in line and "\n" not in line

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("stage", [1, 3])
    def test_a_plan_of_each_of_ten_families_is_that_of_a_run(self, stage, tmp_path):
        config = ds_config(stage=stage, bucket_numel=3000, params={"weight_decay": 0.1}, **BF16)
        folder = tmp_path / str(dist.get_rank())
        folder.mkdir()
        (folder / "ds.json").write_text(as_on_the_host(config))
        for family in FAMILIES:
            model, hf_config = built(family)
            hf_config.save_pretrained(folder)
            engine = start(model, config)
            assert_same(engine, folder, folder / "ds.json")
            engine.destroy()

    @pytest.mark.world_size(2)
    def test_defaults_of_the_engine_are_those_of_the_plan(self):
        engine = start(tiny_gpt(), ds_config(bucket_numel="auto"))
        assert engine.optimizer.settings.bucket_numel == 500_000_000


def on_nodes(monkeypatch, counts):
    """Pretend that nodes have these numbers of ranks."""
    where = [node for node, count in enumerate(counts) for _ in range(count)]
    monkeypatch.setattr(nodes, "node_of_each_rank", lambda: where)


def said_at_start(capsys, model, config):
    """The engine, and what it says beside its table."""
    capsys.readouterr()
    engine = start(model, config)
    return engine, [line for line in capsys.readouterr().out.splitlines() if line.startswith("ds_layerwise: ")]


SMALL = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager",
                    architectures=["LlamaForCausalLM"])
UNEVEN = ("ds_layerwise: nodes have different numbers of ranks ({}), so sums are not made inside nodes first; start "
          "the same number on each node")


class TestNodes(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("counts, told", [
        ((3, 1), "3, 1"), ((2, 2), ""), ((4,), ""), ((1, 1, 1, 1), "")])
    def test_nodes_with_different_numbers_of_ranks_are_told_once_and_planned_alike(self, counts, told, monkeypatch,
                                                                                   capsys, tmp_path):
        on_nodes(monkeypatch, counts)
        engine, said = said_at_start(capsys, LlamaForCausalLM(SMALL), config := ds_config(bucket_numel=3000))
        assert said == ([UNEVEN.format(told)] if told and dist.get_rank() == 0 else [])
        SMALL.save_pretrained(tmp_path / str(dist.get_rank()))
        plan = DryRun.of(str(tmp_path / str(dist.get_rank())), json.loads(as_on_the_host(config)), [4])
        assert plan.forecasts[0].layout.digest() == engine.optimizer.layout.digest()
        assert plan.forecasts[0] == engine.optimizer.forecast()
        assert bool(nodes.make_levels({1: None}, nodes.node_of_each_rank())) == (counts == (2, 2))

    @pytest.mark.parametrize("counts, told", [((3, 1), "3, 1"), ((1, 3), "1, 3"), ((2, 2), ""), ((4,), "")])
    def test_parts_of_a_model_tell_it_once(self, counts, told, monkeypatch, capsys):
        on_nodes(monkeypatch, counts)
        _, said = said_at_start(capsys, LlamaForCausalLM(SMALL), ds_config(tensor_parallel={"autotp_size": 2}))
        assert said == ([UNEVEN.format(told)] if told and dist.get_rank() == 0 else [])
