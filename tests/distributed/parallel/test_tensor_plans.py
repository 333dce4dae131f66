"""``ds-layerwise plan`` of models that tensor parallelism cuts, against engines of models that it has cut."""

import json

import deepspeed.comm as dist
import pytest
import torch
import yaml
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ds_layerwise.plan.forecast.report import as_json
from tests.support.cli import run
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu, mark, part
from tests.support.training import ds_config, start

pytestmark = rooms("tensor_parallel_routes", "dry_run", "run_plan")

SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 16}


def llama(tied):
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))


def qwen3(tied):
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=4, attention_bias=True, tie_word_embeddings=tied))


def planned(module, config, folder, *more, through_file):
    """The plan that ``plan --json`` gives of the whole ``module`` on two data-parallel ranks of one node."""
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps(config))
    if through_file:
        model = folder / "model.yaml"
        model.write_text(yaml.safe_dump({
            "model": "whole", "numel": sum(p.numel() for p in module.parameters()), "params": [
                {"name": name, "shape": list(p.shape), "optimizer": "matrix" if name.endswith("proj.weight") else
                 "scalar"} for name, p in module.named_parameters()]}))
    else:
        model = folder / "config.json"
        module.config.architectures = [type(module).__name__]
        module.config.to_json_file(model)
    code, out, err = run("plan", "--model", model, "--config", folder / "ds.json", "--ranks", 2, "--links", "tcp",
                         "--ranks_per_node", 4, "--json", *more)
    assert code == 0 and err.startswith("tensor parallelism over "), err
    plan, = json.loads(out)
    assert plan.pop("predicted")["links"]["ranks_per_node"] == 2
    return plan


def axis_of(name):
    """The axis that Megatron's layers of these names cut; written down apart from the package."""
    if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
        return None
    return 1 if "o_proj" in name or "down_proj" in name else 0


def cut_like_megatron(module, mpu):
    """Parts of all parameters in their places, with Megatron's marks."""
    for name, param in list(module.named_parameters()):
        if (axis := axis_of(name)) is not None:
            cut = nn.Parameter(part(param.data, axis, mpu))
            mark(cut, axis, partition_stride=1)
            for owner in module.modules():
                for key, other in list(owner._parameters.items()):
                    if other is param:
                        setattr(owner, key, cut)
    return module


class TestAgainstTheEngine(DistributedTest):
    world_size = 4

    @pytest.mark.parametrize("made", [llama, qwen3])
    @pytest.mark.parametrize("tied", [False, True])
    def test_every_number_is_the_engines_where_autotp_cuts(self, made, tied, tmp_path):
        config = ds_config(bucket_numel=300, tensor_parallel={"autotp_size": 2})
        engine = start(made(tied), config)
        expected = as_json(engine.optimizer.forecast())
        for through_file in (False, True):
            folder = tmp_path / f"{dist.get_rank()} {through_file}"
            assert planned(made(tied), config, folder, through_file=through_file) == expected
        assert planned(made(tied), config, tmp_path / f"{dist.get_rank()} said", "--tp_size", 2,
                       through_file=True) == expected

    @pytest.mark.parametrize("tp_mode", ["duplicated", "distributed", "blockwise"])
    def test_every_number_is_the_engines_where_megatron_cuts(self, tp_mode, tmp_path):
        config = ds_config(bucket_numel=300, stage=2 if tp_mode == "distributed" else 1,
                           params={"muon_tp_mode": tp_mode})
        mpu = Mpu(2)
        engine = start(cut_like_megatron(qwen3(tied=False), mpu), config, mpu=mpu)
        assert any(route.is_cut and not route.whole for route in engine.optimizer.routes.values())
        plan = planned(qwen3(tied=False), config, tmp_path / str(dist.get_rank()), "--tp_size", 2, through_file=True)
        assert plan == as_json(engine.optimizer.forecast())
        assert plan != planned(qwen3(tied=False), config, tmp_path / f"{dist.get_rank()} whole", "--tp_size", 4,
                               "--ranks_per_node", 8, through_file=True)

    def test_a_checkpoint_has_the_parts_of_all_ranks(self, tmp_path):
        mpu, layer = Mpu(2), nn.Linear(256, 1024, bias=False)
        layer.weight = nn.Parameter(part(layer.weight.data, 0, mpu))
        mark(layer.weight, 0, partition_stride=1)
        engine = start(nn.Sequential(layer), ds_config(), mpu=mpu)
        engine.backward(engine(torch.ones(2, 256)).sum())
        engine.step()
        engine.save_checkpoint(tmp_path)
        dist.barrier()
        written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        assert written == pytest.approx(engine.optimizer.forecast().checkpoint, rel=0.04)
