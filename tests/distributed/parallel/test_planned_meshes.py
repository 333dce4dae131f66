"""``ds-layerwise plan`` of a mesh against the run that it speaks of: every number, and the bytes that travel."""

import copy

import deepspeed.comm as dist
import pytest
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_layerwise.tools.dry_run import DryRun
from tests.distributed.parallel import test_auto_ep, test_experts, test_pipeline
from tests.distributed.parallel.test_sequence_parallel import sequence_groups
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu, Net
from tests.support.training import BF16, ds_config, start

pytestmark = [*rooms("mesh", "dry_run", "forecast", "sent", "pipeline"), pytest.mark.filterwarnings("ignore:c10d")]

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 16}


def plan_of(model, config, **mesh):
    """The plan for as many ranks as there are, of sums as on the host."""
    config = {**config, "layerwise": {**config.get("layerwise", {}), "reduction": "ordered"}}
    return DryRun.of(model, config, [dist.get_world_size()], mesh=mesh)


def assert_planned(engine, plan):
    """Check that ``plan`` says what ``engine`` says: layout, memory, work, bytes, and all routes."""
    forecast, = plan.forecasts
    assert forecast == engine.optimizer.forecast()
    assert plan.listed(forecast) == engine.optimizer.listed()
    return forecast


class TestAgainstTheEngine(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_experts(self, stage):
        model, config = test_auto_ep.StackNet(), ds_config(stage=stage, bucket_numel=500, **BF16)
        config["expert_parallel"] = test_auto_ep.section(2)
        plans = [plan_of(copy.deepcopy(model).to("meta"), config, ep=ep) for ep in (None, 2)]
        config["expert_parallel"].pop("autoep_size")
        config["expert_parallel"]["enabled"] = False
        plans.append(plan_of(copy.deepcopy(model).to("meta"), config, ep=2))
        config["expert_parallel"].update(enabled=True, autoep_size=2)
        engine = start(model, config)
        for plan in plans:
            axes = assert_planned(engine, plan).sent_by_axis
            assert axes["data"] and axes["expert-data"] and not axes["tensor"] + axes["pipeline ties"]

    @pytest.mark.parametrize("stage", [1, 2])
    def test_experts_and_sequences(self, stage):
        """The bytes at the interface of such ranks are measured in examples/benchmarks/mesh_bytes.py."""
        model, config = test_experts.ExpertNet(2), ds_config(stage=stage, bucket_numel=500)
        plans = [plan_of(test_experts.ExpertNet(2), config, ep=ep, sp=2) for ep in (None, 2)]
        config.update(sequence_parallel_size=2, data_parallel_size=2)
        plans.append(plan_of(test_experts.ExpertNet(2), config))
        engine = start(model, config, **sequence_groups("config"))
        for plan in plans:
            assert assert_planned(engine, plan).sent_by_axis["expert-data"]

    @pytest.mark.parametrize("stage, tied, mode",
                             [(1, False, "duplicated"), (2, True, "distributed"), (1, True, "auto")])
    def test_tensor_shards(self, stage, tied, mode):
        model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))
        config = ds_config(stage=stage, params={"muon_tp_mode": mode}, **BF16)
        by_option = plan_of(copy.deepcopy(model), config, tp=2)
        config["tensor_parallel"] = {"autotp_size": 2}
        plan = plan_of(copy.deepcopy(model), config)
        engine = start(model, config)
        assert assert_planned(engine, plan).sent_by_axis["tensor"] > 0
        assert_planned(engine, by_option)

    def test_shards_that_a_model_marks(self):
        mpu = Mpu(2)
        model, config = Net(mpu), ds_config()
        shapes = plan_of(Net(), config).specs
        plan = plan_of(Net(mpu), config, tp=2)
        assert sum(spec.numel for spec in plan.specs) < sum(spec.numel for spec in shapes)
        assert_planned(start(model, config, mpu=mpu), plan)

    @pytest.mark.parametrize("tied", [False, True])
    def test_pipelines(self, tied):
        config = ds_config(params={"eps": 1e-4})
        first, *blocks, last = test_pipeline.layers(False)
        whole = test_pipeline.InOnePiece(False)
        if tied:
            first = TiedLayerSpec("embed", nn.Embedding, test_pipeline.VOCAB, test_pipeline.WIDTH)
            last = TiedLayerSpec("embed", nn.Embedding, test_pipeline.VOCAB, test_pipeline.WIDTH,
                                 forward_fn=test_pipeline.logits)
            whole = nn.ModuleDict({"tied_modules": nn.ModuleDict({"embed": whole.get_submodule("0")}),
                                   **{name: whole.get_submodule(name) for name in "123"}})
            whole["4"] = whole["tied_modules"]["embed"]
        module = PipelineModule([first, *blocks, last], num_stages=2, loss_fn=test_pipeline.token_loss,
                                partition_method="parameters")
        plan = plan_of(whole, config, pp=2)
        engine = start(module, config)
        forecast = assert_planned(engine, plan.stages[engine.grid.get_stage_id()])
        assert forecast.sent_by_axis["pipeline ties"] == tied * 4 * test_pipeline.VOCAB * test_pipeline.WIDTH
        assert plan.forecasts[0].needed == max(each.forecasts[0].needed for each in plan.stages)
