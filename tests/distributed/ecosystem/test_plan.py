"""``ds-layerwise plan`` against the engine that it speaks of: the layout, every number and the printed table."""

import json

import deepspeed.comm as dist
import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_layerwise.plan.forecast.report import as_json
from ds_layerwise.plan.network.links import unlike_the_run
from ds_layerwise.ranks.comm import nodes
from ds_layerwise.tools.dry_run import DryRun
from tests.support import internals
from tests.support.cli import run
from tests.support.harness import DistributedTest
from tests.support.models import TINY_GPT_MATRICES, tiny_gpt
from tests.support.rooms import rooms
from tests.support.training import BF16, allow_fp16, ds_config, start

pytestmark = rooms("forecast", "cost", "report", "dry_run")

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


class TestAgainstTheEngine(DistributedTest):
    world_size = [1, 3]

    def test_every_number_is_the_engines(self, tmp_path):
        module, folder = tiny_gpt(tied=False), tmp_path / str(dist.get_rank())
        folder.mkdir()
        model = folder / "tiny.yaml"
        params = [(name, list(p.shape)) for name, p in module.named_parameters()]
        model.write_text(yaml.safe_dump({
            "model": "tiny", "numel": sum(p.numel() for p in module.parameters()),
            "params": [{"name": name, "shape": shape, "optimizer": "matrix" if name in TINY_GPT_MATRICES else "scalar"}
                       for name, shape in params]}))
        allow_fp16()
        for case, changes in CASES.items():
            config = ds_config(**changes)
            if changes.get("bucket_numel", 1) is None:
                config["zero_optimization"]["reduce_bucket_size"] = "auto"
            path = folder / "config.json"
            path.write_text(json.dumps(config))
            engine = start(tiny_gpt(tied=False), config)
            arguments = ["plan", "--model", model, "--config", path, "--ranks", engine.optimizer.world_size,
                         "--links", "tcp", "--ranks_per_node", engine.optimizer.world_size]
            code, out, err = run(*arguments, "--json")
            # Nobody has filled it in, and the file says no hidden_size, so that both take DeepSpeed's default.
            left = "zero_optimization.reduce_bucket_size = 500000000\n" if case == "defaults" else ""
            assert code == 0 and err.endswith(left) and err.count("\n") == bool(left), case
            plan, = json.loads(out)
            assert plan["digest"] == engine.optimizer.layout.digest(), case
            # What a step takes on some links is no engine's business.
            assert plan.pop("predicted")["reduction"] == "ordered"
            assert plan == as_json(engine.optimizer.forecast()), case
            costs = run(*arguments)[1].partition("layout ")[2].partition("predicted a step")[0]
            assert costs.strip() == engine.optimizer.describe().partition("layout ")[2].strip(), case
            engine.destroy()

    @pytest.mark.world_size(2)
    @pytest.mark.parametrize("case", [
        {}, {**BF16}, {"stage": 2, **BF16}, {"stage": 3}, {"stage": 3, **BF16},
        {**BF16, "params": {"momentum_dtype": "8bit"}}, {**BF16, "params": {"momentum_dtype": "bfloat16"}},
        {**BF16, "layerwise": {"master_dtype": "bfloat16+remainder"}}], ids=str)
    def test_a_checkpoint_is_as_large_as_is_said(self, case, tmp_path):
        engine = start(nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 512)), ds_config(**case))
        engine.backward(engine(torch.ones(2, 256, dtype=engine.module[0].weight.dtype)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path)
        dist.barrier()
        written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert written == pytest.approx(engine.optimizer.forecast().checkpoint, rel=0.02)

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
UNEVEN = ("ds_layerwise: nodes have different numbers of ranks ({}), so sums are not made inside nodes first, and "
          "transports are chosen as for one rank per node; start the same number on each node")


class TestNodesAndLinks(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("counts, per_node, told", [
        ((3, 1), 3, "3, 1"), ((2, 2), 2, ""), ((4,), 8, ""), ((1, 1, 1, 1), 1, "")])
    def test_nodes_with_different_numbers_of_ranks_are_told_once_and_planned_alike(self, counts, per_node, told,
                                                                                   monkeypatch, capsys, tmp_path):
        on_nodes(monkeypatch, counts)
        engine, said = said_at_start(capsys, LlamaForCausalLM(SMALL), config := ds_config(bucket_numel=3000))
        assert said == ([UNEVEN.format(told)] if told and dist.get_rank() == 0 else [])
        SMALL.save_pretrained(tmp_path / str(dist.get_rank()))
        (ds_json := tmp_path / f"{dist.get_rank()}.json").write_text(json.dumps(config))
        plan = DryRun.of(str(tmp_path / str(dist.get_rank())), ds_json, [4], links="tcp", ranks_per_node=per_node)
        assert plan.forecasts[0].layout.digest() == engine.optimizer.layout.digest()
        planned = internals.planned(engine).links
        if max(counts) < 4:
            assert plan.predictions[0].links == planned
        assert bool(told) == any("of which nodes of" in line for line in plan.assumed)
        assert bool(nodes.make_levels({1: None}, nodes.node_of_each_rank())) == (counts == (2, 2))

    @pytest.mark.parametrize("counts, told", [((3, 1), "3, 1"), ((1, 3), "1, 3"), ((2, 2), ""), ((4,), "")])
    def test_parts_of_a_model_tell_it_once(self, counts, told, monkeypatch, capsys):
        on_nodes(monkeypatch, counts)
        _, said = said_at_start(capsys, LlamaForCausalLM(SMALL), ds_config(tensor_parallel={"autotp_size": 2}))
        assert said == ([UNEVEN.format(told)] if told and dist.get_rank() == 0 else [])

    @pytest.mark.parametrize("links, told", [("nvlink-ib", True), ("tcp", False), ("auto", False)])
    def test_links_of_devices_are_told_where_gloo_talks_and_planned_for_gloo(self, links, told, capsys):
        engine, said = said_at_start(capsys, tiny_gpt(), ds_config(layerwise={"links": links}))
        assert internals.planned(engine).links.on_host
        line = f"ds_layerwise: {unlike_the_run(links, on_host=True)}"
        assert said == ([line] if told and dist.get_rank() == 0 else [])
