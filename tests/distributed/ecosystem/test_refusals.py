"""Bad configs and bad models: a clear error on every rank, at once, before anything could hang."""

import deepspeed
import deepspeed.comm as dist
import pytest
import torch
from deepspeed.moe.layer import MoE
from torch import nn

import ds_layerwise
from ds_layerwise.errors import ConfigError, LayerWiseError, LayoutError, RoutingError
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.tensor_parallel import Mpu
from tests.support.training import BF16

pytestmark = rooms("ds_config", "engine_hooks", "param_guard", "shared_storage")


def config(**changes):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "LayerWiseMuon", "params": {"lr": 0.01, "muon_lr": 0.02}},
        **changes,
    }


def model(*layers):
    return nn.Sequential(*(layers or (nn.Linear(8, 8), nn.LayerNorm(8))))


def initialize(module=None, ds_config=None, groups=None, **kwargs):
    module = module or model()
    return ds_layerwise.initialize(model=module, model_parameters=groups or module.parameters(),
                                   config=ds_config or config(), **kwargs)


def muon(**params):
    return config(optimizer={"type": "LayerWiseMuon", "params": params})


BAD_CONFIGS = {
    "typo in params": (muon(momentun=0.9), "did you mean 'momentum'"),
    "typo in layerwise": (config(layerwise={"layuot": "lpt"}), "did you mean 'layout'"),
    "value out of bounds": (muon(momentum=1.5), r"momentum must be in \[0, 1\), got 1.5"),
    "a misspelt section": (config(layer_wise={}), "mean 'layerwise' at"),
    "a section inside another": (config(zero_optimization={"stage": 1, "layerwise": {}}), "mean 'layerwise' at"),
    "a key of a section outside": (config(overrides=[]), "overrides is not read; did you mean layerwise.over"),
    "a misspelt type": (config(optimizer={"type": "LayerWise_Muon"}), "did you mean 'LayerWiseMuon'"),
    "another peak": (config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.665}}),
                     "warmup_max_lr is 0.665, and optimizer.params.lr is 0.01.* muon_lr would become 1.33 inst"),
    "AdamW's rate alone": (muon(lr=3e-4), "lr is 0.0003 without muon_lr.*give muon_lr.*or set scale_mode"),
    "left on auto": (muon(muon_lr="auto"), "muon_lr is 'auto'"),
    **{f"{key} left on auto": (config(**{key: "auto"}), f"{key} is 'auto', which only Hugging Face")
       for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")},
    "unknown coefficients": (muon(ns_coefficients="quintc"), "quintic"),
    "stage 4": (config(zero_optimization={"stage": 4}), "stage must be 1 .* got 4"),
    "stage 0": (config(zero_optimization={"stage": 0}), "stage must be 1 or 2 .* got 0"),
    "stage 2 and bf16 sums": (config(zero_optimization={"stage": 2}, data_types={"grad_accum_dtype": "bf16"}),
                              "grad_accum_dtype must be 'fp32' at ZeRO stage 2, got 'bf16'"),
    "no stage": (config(zero_optimization={}), "stage must be 1 .* is not set"),
    "offload to NVMe": (config(zero_optimization={"stage": 1, "offload_optimizer": {"device": "nvme",
                                                                                    "nvme_path": "/tmp"}}),
                        "offload_optimizer.device must be 'none' or 'cpu'"),
    "more than all to the host": (config(zero_optimization={"stage": 2, "offload_optimizer": {
        "device": "cpu", "ratio": 1.5}}), r"offload_optimizer.ratio must be a number in \[0, 1\], got 1.5"),
    "a bound without a norm": (config(zero_optimization={"stage": 1, "compute_grad_norm": False}),
                               "gradient_clipping needs the norm"),
    "section without the type": (config(optimizer={"type": "AdamW", "params": {"torch_adam": True}}, layerwise={}),
                                 "the layerwise section needs optimizer.type"),
    "override that matches nothing": (config(layerwise={"overrides": [{"name": "nothing", "lr_scale": 2.0}]}),
                                      "matches no trainable parameter"),
}


class TestBadConfigs(DistributedTest):
    # A refusal waits for no rank: the test fails before a collective would give up.
    collective_timeout = 2 * DistributedTest.exec_timeout

    def test_a_bad_config_is_refused_by_name(self):
        for ds_config, message in BAD_CONFIGS.values():
            with pytest.raises((ConfigError, RoutingError), match=message):
                initialize(ds_config=ds_config)

    def test_the_optimizer_given_twice(self):
        module = model()
        with pytest.raises(ConfigError, match="the optimizer is given twice"):
            initialize(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))

    def test_without_registration_the_type_is_unknown(self):
        ds_layerwise.unregister()
        module = model()
        with pytest.raises(AssertionError, match="not a supported DeepSpeed Optimizer"):
            deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config())


def tie_by_data(module):
    module[2].weight.data = module[0].weight.data


def tie_to_frozen(module):
    module[0].requires_grad_(False)
    tie_by_data(module)


def view_of_part(module):
    module[1].weight.data = module[0].weight.data[1:7]


def rows_as_columns(module):
    module[1].weight.data = module[0].weight.data[:6].t()


def buffer_of_part(module):
    module[1].register_buffer("seen", module[0].weight.data[7, :2])


def tie(module):
    module[2].weight = module[0].weight


def tie_what_is_frozen(module):
    module[0].requires_grad_(False)
    module[2].requires_grad_(False)
    tie_by_data(module)


def flatten(module):
    flat = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(flat, module.parameters())


def columns_of_one(module):
    both = torch.randn(8, 12)
    module[0].weight.data, module[2].weight.data = both[:, :6], both[:, 6:]


#: What makes tensors share memory, and what is said of it; None where they share no element.
SHARED = {
    tie_by_data: "0.weight and 2.weight are different parameters that share memory.*one parameter, 2.weight = 0.weight,"
                 " or give one of them memory of its own: 0.weight.data = 0.weight.data.clone",
    tie_to_frozen: "0.weight and 2.weight are different parameters that share memory",
    view_of_part: "0.weight and 1.weight are different parameters that share memory.*; make one parameter, and take bo",
    rows_as_columns: "0.weight and 1.weight are different parameters that share memory.*; make one parameter",
    buffer_of_part: "the buffer 1.seen shares memory with the parameter 0.weight.*1.seen.data = 1.seen.data.clone",
    tie: None, tie_what_is_frozen: None, flatten: None, columns_of_one: None}


class TestBadModels(DistributedTest):
    def test_a_model_that_no_rank_could_train_is_refused(self):
        not_real = model()
        not_real.phase = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
        for module, groups, message in ((model(nn.LayerNorm(8)), None, "no parameter goes to the matrix optimizer"),
                                        (not_real, None, "phase is torch.complex64"),
                                        (model(), [nn.Parameter(torch.zeros(3, 3))], "the model does not have")):
            with pytest.raises(RoutingError, match=message):
                initialize(module, groups=groups)

    def test_no_matrix_where_an_override_chose_for_all(self):
        # DeepSpeed's own test_boundary_microbatch_grad_is_reduced has such a model.
        module = nn.LayerNorm(8, elementwise_affine=True, bias=False)
        engine, *_ = initialize(module, config(layerwise={"overrides": [{"name": "*", "optimizer": "scalar"}]}))
        before = module.weight.detach().clone()
        engine.backward(engine(torch.arange(8.0)).square().sum())
        engine.step()
        assert not torch.equal(module.weight.detach(), before)

    @pytest.mark.parametrize("sections", [{}, BF16], ids=["float32", "bf16"])
    def test_weights_that_are_one_by_their_memory(self, sections):
        """Also where DeepSpeed's cast would take them apart first. Plain torch trains both through the same memory."""
        for case, message in SHARED.items():
            module = model(nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 8, bias=False))
            case(module)
            if message is None:
                initialize(module, config(**sections))[0].destroy()
                continue
            # One rank is enough, and says it to all.
            if dist.get_rank() == 0:
                module[2].weight.data, module[1].weight.data = torch.randn(8, 6), torch.randn(6, 6)
                module[1]._buffers.pop("seen", None)
            with pytest.raises(LayerWiseError, match=message if dist.get_rank() else f"rank 1 failed: .*{message}"):
                initialize(module, config(**sections))

    @pytest.mark.world_size(3)
    def test_models_that_differ_between_ranks(self):
        width = 16 if dist.get_rank() == 2 else 8
        with pytest.raises(LayoutError, match=r"the model differs between ranks: rank 0 has 1.weight \(8, 8\).*rank 2 "
                                              r"has 1.weight \(16, 8\)"):
            initialize(model(nn.Linear(8, 8), nn.Linear(8, width)))

    def test_a_group_with_matrices_and_adamws_rate_alone(self):
        module = model()
        groups = [{"params": [p for p in module.parameters() if p.dim() > 1], "lr": 3e-4},
                  {"params": [p for p in module.parameters() if p.dim() < 2], "lr": 3e-4}]
        with pytest.raises(ConfigError, match=r"param_groups\[0\].lr is 0.0003 without muon_lr, the group has matrices "
                           r"\(0.weight\)"):
            initialize(module, groups=groups)
        initialize(module, muon(lr=3e-3, scale_mode="match_rms_adamw"), groups)

    def test_layers_that_differ_on_one_rank(self):
        for change, message in (
                (lambda one, module: one.bfloat16(),
                 r"rank 0 has 1.weight \(8, 8\) torch.float32, rank 1 has 1.weight \(8, 8\) torch.bfloat16"),
                (lambda one, module: one.weight.requires_grad_(False),
                 r"rank 0 has 1.weight \(8, 8\) torch.float32, rank 1 has 1.weight .* \(frozen\)"),
                (lambda one, module: setattr(module, "_modules", {"0": module[0], "second": one}),
                 r"rank 0 has 1.weight .*, rank 1 has second.weight"),
                (lambda one, module: setattr(one, "_parameters", dict(reversed(one._parameters.items()))),
                 r"rank 0 has 1.weight .*, rank 1 has 1.bias"),
                (lambda one, module: module.append(nn.Linear(8, 8)), "only rank 1 has 2.weight"),
                (lambda one, module: setattr(one.weight, "use_muon", False),
                 "1.weight .* by the matrix optimizer.*by the scalar optimizer")):
            module = model(nn.Linear(8, 8), nn.Linear(8, 8))
            module[1].weight.use_muon = True
            if dist.get_rank() == 1:
                change(module[1], module)
            with pytest.raises(LayoutError, match=f"the (model|layout) differs between ranks: .*{message}"):
                initialize(module)

    def test_groups_that_differ_on_one_rank(self):
        module = model(nn.Linear(8, 8), nn.LayerNorm(8))
        first, second = ([*layer.parameters()] for layer in module)
        for own, message in (
                ([first + second, []], r"rank 0 has 1.weight .* group 1,.*rank 1 has 1.weight .* group 0"),
                ([first, second, []], r"only rank 1 has param_groups\[2\]"),
                ([first, second[:1]], r"only rank 0 has 1.bias")):
            groups = own if dist.get_rank() else [first, second]
            with pytest.raises(LayoutError, match=message):
                initialize(module, groups=[{"params": group} for group in groups])
        groups = [{"params": first + second, "lr": 0.1 * (1 + dist.get_rank()), "muon_lr": 0.1}]
        with pytest.raises(LayoutError, match=r"param_groups\[0\] with {'lr': 0.1.*param_groups\[0\] with {'lr': 0.2"):
            initialize(module, groups=groups)

    def test_an_error_on_one_rank_reaches_all(self):
        module = model()
        for ds_config, groups, own, kind in (
                (muon(momentun=0.9), None, "did you mean 'momentum'", "ConfigError"),
                (config(), [{"params": [*module.parameters()], "weight_decay": -1}],
                 r"param_groups\[0\].weight_decay must be .* got -1", "ConfigError"),
                (config(), [{"params": [*module.parameters()]}, {"params": [module[1].weight]}],
                 "some parameters appear in more than one parameter group", "ValueError"),
                ("route", None, "was sent to the matrix optimizer", "RoutingError")):
            if dist.get_rank() == 0:
                ds_config, groups = config(), None
            elif ds_config == "route":
                ds_config, module[1].weight.use_muon = config(), True
            with pytest.raises(ValueError if dist.get_rank() == 1 else LayerWiseError,
                               match=own if dist.get_rank() == 1 else f"rank 1 failed: {kind}"):
                initialize(module, ds_config, groups)


#: Sections that rank 1 has and rank 0 has not, and what is said about the first difference.
DIFFERENT_CONFIGS = {
    "bucket size": ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 600}},
                    "zero_optimization.reduce_bucket_size = 600"),
    "stage": ({"zero_optimization": {"stage": 2}},
              "rank 0 has zero_optimization.stage = 1, rank 1 has zero_optimization.stage = 2"),
    "disks": ({"checkpoint": {"use_node_local_storage": True}}, "checkpoint.use_node_local_storage = True"),
    "layout": ({"layerwise": {"layout": "lpt"}}, "layerwise.layout = 'lpt'"),
    "reduction": ({"layerwise": {"reduction": "native"}}, "only rank 1 has layerwise.reduction = 'native'"),
    "alignment": ({"layerwise": {"alignment": 128}}, "only rank 1 has layerwise.alignment = 128"),
    "override": ({"layerwise": {"overrides": [{"name": "0.weight", "lr_scale": 2.0}]}}, "layerwise.overrides = "),
    "what a matrix's owner alone needs": (muon(lr=0.01, muon_lr=0.02, ns_steps=4), "optimizer.params.ns_steps = 4"),
    "learning rate": (muon(lr=0.02, muon_lr=0.02), "optimizer.params.lr = 0.01, rank 1 has optimizer.params.lr = 0.02"),
    "schedule": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, "scheduler.params.warmup"),
    "clipping": ({"gradient_clipping": 0.5}, "gradient_clipping = 0.5"),
    "wire": ({"communication_data_type": "bf16"}, "communication_data_type = 'bf16'"),
    "precision": (BF16, "bf16.enabled = True"),
    "accumulation": ({"gradient_accumulation_steps": 2},
                     "rank 0 has gradient_accumulation_steps = 1, rank 1 has gradient_accumulation_steps = 2"),
}


class TestConfigsThatDiffer(DistributedTest):
    def test_they_are_refused_by_the_first_difference(self):
        for changes, message in DIFFERENT_CONFIGS.values():
            with pytest.raises(LayoutError, match=f"the configuration differs between ranks: .*{message}"):
                initialize(ds_config=config(**(changes if dist.get_rank() else {})))

    def test_keys_that_each_rank_may_set_for_itself(self):
        """Reports, and the size of a micro-batch: an average over ranks does not ask how many samples each had."""
        alone = {"steps_per_print": 5, "wall_clock_breakdown": True, "train_micro_batch_size_per_gpu": 3}
        initialize(ds_config=config(**(alone if dist.get_rank() else {})))


class TestRefusedParallelism(DistributedTest):
    def test_experts(self):
        def experts(ep_size):
            return model(nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=ep_size))

        for changes, message in (
                ({"use_data_before_expert_parallelism": True},
                 "use_data_before_expert_parallelism must be False .*, got True"),
                ({"checkpoint": {"use_node_local_storage": True}},
                 "use_node_local_storage is not supported with experts")):
            with pytest.raises(ConfigError, match=message):
                initialize(experts(1), config(**changes))
        in_no_list = experts(2)
        own = in_no_list[0].weight
        own.allreduce, own.group_name = False, "ep_size_2"
        with pytest.raises(LayerWiseError, match="0.weight is a different parameter on each of 2 ranks"):
            initialize(in_no_list)

    def test_an_mpu_that_says_too_little_or_too_much(self):
        for change, message in (
                ({"get_model_parallel_group": None}, r"mpu has no get_model_parallel_group\(\); it must have the "),
                ({"get_pipeline_model_parallel_world_size": lambda: 2}, "mpu has 2 pipeline stages"),
                ({"get_context_parallel_world_size": lambda: 2}, r"context parallelism \(mpu\) is not supported"),
                ({"initialize_sequence_parallel": None}, r"sequence parallelism \(mpu\) is not supported")):
            mpu = Mpu(1)
            for name, value in change.items():
                setattr(mpu, name, value)
            with pytest.raises(ConfigError, match=message):
                initialize(mpu=mpu)
        with pytest.raises(ConfigError, match=r"get_model_parallel_group\(\) has ranks \[[01]\] on rank .*"
                           r"tensor_parallel.autotp_size 2 makes a group of ranks \[0, 1\]; leave mpu out"):
            initialize(ds_config=config(tensor_parallel={"autotp_size": 2}), mpu=Mpu(1))

    def test_parts_that_do_not_fit(self):
        mpu, module = Mpu(2), model()
        module[0].weight = nn.Parameter(torch.zeros(8 + dist.get_rank(), 8))
        wanted = (r"0.weight has shapes \(8, 8\), \(9, 8\) on tensor-parallel ranks; set param.tensor_model_parallel "
                  "= True and param.partition_dim to the axis that is cut, along which alone they may differ, or ")
        for marks in ({}, {"tensor_model_parallel": True, "partition_dim": 1}):
            vars(module[0].weight).update(marks)
            with pytest.raises(LayoutError, match=wanted):
                initialize(module, mpu=mpu)
        module[0].weight = nn.Parameter(torch.zeros(8 * dist.get_rank(), 8))
        vars(module[0].weight).update(tensor_model_parallel=True, partition_dim=0)
        with pytest.raises(LayoutError, match=r"shapes \(0, 8\), \(8, 8\) on .* that leaves elements to each"):
            initialize(module, mpu=mpu)
        torch.manual_seed(dist.get_rank())
        with pytest.raises(LayoutError, match=r"0.weight \(8, 8\) has other values on tensor-parallel rank 1 than on "
                                              "rank 0, and no mark .* set param.tensor_model_parallel = True"):
            initialize(mpu=mpu)
        torch.manual_seed(0)
        module = model()
        if dist.get_rank():
            module[0].weight.tensor_model_parallel, module[0].weight.partition_dim = True, 0
        with pytest.raises(LayoutError, match=r"the layout of tensor-parallel parts differs .* rank 1 has .*axis -2"):
            initialize(module, mpu=mpu)
