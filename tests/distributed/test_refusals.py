"""Bad configs and bad models: a clear error on every rank, at once, before anything could hang."""

import os
import subprocess
import sys
import time
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from torch import nn

import ds_layerwise
from ds_layerwise.errors import ConfigError, LayerwiseError, LayoutError, RoutingError
from tests.harness import DistributedTest, free_port

ROOT = Path(__file__).parents[2]


def config(**changes):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 0.01}},
        **changes,
    }


def model(*layers):
    return nn.Sequential(*(layers or (nn.Linear(8, 8), nn.LayerNorm(8))))


def initialize(module=None, ds_config=None, **kwargs):
    module = module or model()
    return ds_layerwise.initialize(model=module, model_parameters=module.parameters(), config=ds_config or config(),
                                   **kwargs)


def muon(**params):
    return config(optimizer={"type": "LayerWiseMuon", "params": params})


BAD_CONFIGS = {
    "typo in params": (muon(momentun=0.9), "did you mean 'momentum'"),
    "typo in layerwise": (config(layerwise={"layuot": "lpt"}), "did you mean 'layout'"),
    "value out of bounds": (muon(momentum=1.5), r"momentum must be in \[0, 1\), got 1.5"),
    "left on auto": (muon(muon_lr="auto"), "muon_lr is 'auto'"),
    "unknown coefficients": (muon(ns_coefficients="quintc"), "quintic"),
    "stage 3": (config(zero_optimization={"stage": 3}), "stage must be 1 .* got 3"),
    "stage 0": (config(zero_optimization={"stage": 0}), "stage must be 1 or 2 .* got 0"),
    "stage 2 and bf16 sums": (config(zero_optimization={"stage": 2}, data_types={"grad_accum_dtype": "bf16"}),
                              "grad_accum_dtype must be 'fp32' at ZeRO stage 2, got 'bf16'"),
    "no stage": (config(zero_optimization={}), "stage must be 1 .* is not set"),
    "offload to NVMe": (config(zero_optimization={"stage": 1, "offload_optimizer": {"device": "nvme",
                                                                                    "nvme_path": "/tmp"}}),
                        "offload_optimizer.device must be 'none' or 'cpu'"),
    "more than all to the host": (config(zero_optimization={"stage": 2, "offload_optimizer": {
        "device": "cpu", "ratio": 1.5}}), r"offload_optimizer.ratio must be a number in \[0, 1\], got 1.5"),
    "unused parameters": (config(zero_optimization={"stage": 1, "ignore_unused_parameters": False}),
                          "ignore_unused_parameters must be True"),
    "a bound without a norm": (config(zero_optimization={"stage": 1, "compute_grad_norm": False}),
                               "gradient_clipping needs the norm"),
    "prescale": (config(prescale_gradients=True), "prescale_gradients must be False"),
    "section without the type": (config(optimizer={"type": "AdamW", "params": {"torch_adam": True}}, layerwise={}),
                                 "the layerwise section needs optimizer.type"),
    "override that matches nothing": (config(layerwise={"overrides": [{"name": "nothing", "lr_scale": 2.0}]}),
                                      "matches no trainable parameter"),
}


class TestBadConfigs(DistributedTest):
    world_size = 2
    exec_timeout = 60

    @pytest.mark.parametrize("case", BAD_CONFIGS)
    def test_a_bad_config_is_refused_by_name(self, case):
        ds_config, message = BAD_CONFIGS[case]
        start = time.monotonic()
        with pytest.raises((ConfigError, RoutingError), match=message):
            initialize(ds_config=ds_config)
        assert time.monotonic() - start < 30
        dist.barrier()

    def test_the_optimizer_given_twice(self):
        module = model()
        with pytest.raises(ConfigError, match="the optimizer is given twice"):
            initialize(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))

    def test_without_registration_the_type_is_unknown(self):
        ds_layerwise.unregister()
        module = model()
        with pytest.raises(AssertionError, match="not a supported DeepSpeed Optimizer"):
            deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config())


class TestBadModels(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_no_matrix(self):
        with pytest.raises(RoutingError, match="no parameter goes to the matrix optimizer"):
            initialize(model(nn.LayerNorm(8)))

    def test_a_parameter_that_is_no_float(self):
        module = model()
        module.phase = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
        with pytest.raises(RoutingError, match="phase is torch.complex64"):
            initialize(module)

    def test_a_parameter_of_another_model(self):
        module = model()
        with pytest.raises(RoutingError, match="the model does not have"):
            ds_layerwise.initialize(model=module, model_parameters=[nn.Parameter(torch.zeros(3, 3))], config=config())

    @pytest.mark.world_size(3)
    def test_models_that_differ_between_ranks(self):
        width = 16 if dist.get_rank() == 2 else 8
        with pytest.raises(LayoutError, match=r"the model differs between ranks: rank 0 has 1.weight \(8, 8\).*rank 2 "
                                              r"has 1.weight \(16, 8\)"):
            initialize(model(nn.Linear(8, 8), nn.Linear(8, width)))

    def test_a_layer_more_on_one_rank(self):
        layers = [nn.Linear(8, 8) for _ in range(1 + dist.get_rank())]
        with pytest.raises(LayoutError, match="only rank 1 has 1.weight"):
            initialize(model(*layers))

    def test_routes_that_differ_between_ranks(self):
        module = model(nn.Linear(8, 8), nn.Linear(8, 8))
        module[1].weight.use_muon = dist.get_rank() == 0
        with pytest.raises(LayoutError, match="1.weight .* by the matrix optimizer.*by the scalar optimizer"):
            initialize(module)

    def test_groups_that_differ_between_ranks(self):
        module = model(nn.Linear(8, 8), nn.LayerNorm(8))
        groups = [{"params": list(module.parameters()), "lr": 0.1 * (1 + dist.get_rank())}]
        with pytest.raises(LayoutError, match=r"param_groups\[0\] with {'lr': 0.1.*param_groups\[0\] with {'lr': 0.2"):
            ds_layerwise.initialize(model=module, model_parameters=groups, config=config())

    def test_an_error_on_one_rank_reaches_all(self):
        module = model()
        if dist.get_rank() == 1:
            module[1].weight.use_muon = True
        expected = r"was sent to the matrix optimizer" if dist.get_rank() == 1 else "rank 1 failed: RoutingError"
        with pytest.raises(LayerwiseError, match=expected):
            initialize(module)


class TestRefusedParallelism(DistributedTest):
    world_size = 2
    exec_timeout = 60

    def test_experts_placed_in_another_order(self):
        from deepspeed.moe.layer import MoE
        dist.barrier()
        experts = model(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=1))
        with pytest.raises(ConfigError, match="use_data_before_expert_parallelism must be False .*, got True"):
            initialize(experts, config(use_data_before_expert_parallelism=True))

    def test_experts_that_are_in_no_list(self):
        from deepspeed.moe.layer import MoE
        dist.barrier()
        experts = model(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2))
        own = experts[0].weight
        own.allreduce, own.group_name = False, "ep_size_2"
        with pytest.raises(LayerwiseError, match="0.weight is another parameter on every one of 2 ranks"):
            initialize(experts)

    def test_model_parallelism(self):
        class Mpu:
            def __getattr__(self, name):
                if "sequence" in name:
                    raise AttributeError(name)
                return lambda *_, **__: 1 if "world_size" in name else 0 if "rank" in name else None

        with pytest.raises(ConfigError, match=r"model parallelism \(mpu\) is not supported"):
            initialize(mpu=Mpu())


SCRIPT = """
import sys, torch, deepspeed
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
deepspeed.init_distributed()
if sys.argv[-1] == "model" and deepspeed.comm.get_rank() == 1:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 9))
params = {"momentun": 0.9} if sys.argv[-1] == "typo" else {}
deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "LayerWiseMuon", "params": params}})
"""


@pytest.mark.parametrize("case, message", [("typo", "did you mean 'momentum'"), ("model", "the model differs")])
def test_the_launcher_ends_with_an_error(case, message, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = Path(sys.executable).parent / "deepspeed"
    done = subprocess.run(
        [sys.executable, str(launcher), "--num_accelerators", "2", "--master_port", str(free_port()), "--module",
         "ds_layerwise.run", str(tmp_path / "script.py"), case],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert output.count(message) >= 2, output
