"""``ds-layerwise plan`` against the engine that it speaks of: the layout, every number and the printed table."""

import json

import deepspeed.comm as dist
import pytest
import yaml

from ds_layerwise.plan.report import as_json
from tests.support.cli import run
from tests.support.harness import DistributedTest
from tests.support.models import TINY_GPT_MATRICES, tiny_gpt
from tests.support.rooms import rooms
from tests.support.training import allow_fp16, ds_config, start

pytestmark = rooms("forecast", "cost", "report", "dry_run")

BF16 = {"bf16": {"enabled": True}}
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
            assert (code, err) == (0, ""), case
            plan, = json.loads(out)
            assert plan["digest"] == engine.optimizer.layout.digest(), case
            # What a step takes on some links is no engine's business.
            assert plan.pop("predicted")["reduction"] == "ordered"
            assert plan == as_json(engine.optimizer.forecast()), case
            costs = run(*arguments)[1].partition("layout ")[2].partition("predicted a step")[0]
            assert costs.strip() == engine.optimizer.describe().partition("layout ")[2].strip(), case
            engine.destroy()

    @pytest.mark.world_size(2)
    def test_what_the_engine_leaves_at_its_default_is_the_plans_default(self):
        engine = start(tiny_gpt(), ds_config(bucket_numel="auto"))
        assert engine.optimizer.settings.bucket_numel == 500_000_000
