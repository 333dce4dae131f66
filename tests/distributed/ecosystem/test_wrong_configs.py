"""Mistakes in a config are told in the same words by ``ds-layerwise plan`` and by training.

A new mistake is one more line of WRONG: where it is, the wrong value, and how the message of both begins.
"""

import copy

import pytest
from deepspeed.runtime.config import DeepSpeedConfigError

from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError, RoutingError
from ds_layerwise.tools.dry_run import DryRun
from tests.support.harness import DistributedTest
from tests.support.rooms import rooms
from tests.support.training import Net, ds_config, start
from tests.support.versions import needs

pytestmark = rooms("sections", "run_config", "ds_config", "config_hook")

PARAMS = "optimizer.params"
ZERO = "zero_optimization"


def with_value(path, value):
    """A config that trains, but for ``value`` at ``path``."""
    config = copy.deepcopy(ds_config())
    *sections, key = path.split(".")
    section = config
    for name in sections:
        section = section.setdefault(name, {})
    section[key] = value
    return config


#: Path, value, and what the error says of it.
WRONG = [
    # Our sections: types and bounds.
    (f"{PARAMS}.momentum", 1.0, "optimizer.params.momentum must be in [0, 1), got 1.0"),
    (f"{PARAMS}.momentum", "0.9", "optimizer.params.momentum must be a number, got '0.9'"),
    (f"{PARAMS}.momentum", "auto", "optimizer.params.momentum is 'auto', which only Hugging Face"),
    (f"{PARAMS}.momentum", None, "optimizer.params.momentum must be a number, got None"),
    (f"{PARAMS}.lr", -1, "optimizer.params.lr must be in [0, inf), got -1"),
    (f"{PARAMS}.lr", 0, "optimizer.params.lr must be greater than 0"),
    (f"{PARAMS}.lr", True, "optimizer.params.lr must be a number, got True"),
    (f"{PARAMS}.lr", float("nan"), "optimizer.params.lr must be in [0, inf), got nan"),
    (f"{PARAMS}.muon_lr", float("inf"), "optimizer.params.muon_lr must be in [0, inf), got inf"),
    (f"{PARAMS}.weight_decay", [0.1], "optimizer.params.weight_decay must be a number, got [0.1]"),
    (f"{PARAMS}.betas", [0.9], "optimizer.params.betas must be two numbers, got [0.9]"),
    (f"{PARAMS}.betas", [0.9, 1.0], "optimizer.params.betas[1] must be in [0, 1), got 1.0"),
    (f"{PARAMS}.betas", "auto", "optimizer.params.betas is 'auto'"),
    (f"{PARAMS}.eps", -1e-8, "optimizer.params.eps must be in [0, inf)"),
    (f"{PARAMS}.ns_steps", 0, "optimizer.params.ns_steps must be a whole number of at least 1, got 0"),
    (f"{PARAMS}.ns_steps", 10**6, "optimizer.params.ns_steps must be a whole number of at most 1000, got 1000000"),
    (f"{PARAMS}.ns_steps", 2.5, "optimizer.params.ns_steps must be a whole number"),
    (f"{PARAMS}.ns_method", "grem", "optimizer.params.ns_method must be one of 'gram', 'standard', got 'grem'"),
    (f"{PARAMS}.ns_dtype", "int8", "optimizer.params.ns_dtype must be one of 'auto', 'bf16', 'fp16', 'fp32'"),
    (f"{PARAMS}.ns_coefficients", [[1, 2]], "optimizer.params.ns_coefficients[0] must be three numbers, got [1, 2]"),
    (f"{PARAMS}.ns_coefficients", "canz", "ns_coefficients 'canz' is not known; did you mean 'cans'"),
    (f"{PARAMS}.scale_mode", "none", "optimizer.params.scale_mode must be one of 'original', 'spectral'"),
    (f"{PARAMS}.extra_scale_factor", 0, "optimizer.params.extra_scale_factor must be in (0, inf), got 0"),
    (f"{PARAMS}.nesterov", 1, "optimizer.params.nesterov must be true or false, got 1"),
    (f"{PARAMS}.per_head_muon", "yes", "optimizer.params.per_head_muon must be true or false, got 'yes'"),
    (f"{PARAMS}.muon_tp_mode", "split", "optimizer.params.muon_tp_mode must be one of 'duplicated', 'distributed'"),
    (f"{PARAMS}.scalar_optimizer", "adm", "optimizer.params.scalar_optimizer must be one of 'adamw', 'adam', 'lion'"),
    (f"{PARAMS}.torch_adam", False, "optimizer.params.torch_adam must be true, got false"),
    (f"{PARAMS}.max_grad_norm", 1.0, "optimizer.params.max_grad_norm is not supported; set gradient_clipping"),
    # Our sections: keys and places.
    (f"{PARAMS}.momentun", 0.9, "optimizer.params.momentun is not an option; did you mean 'momentum'?"),
    (f"{PARAMS}.overrides", [], "optimizer.params.overrides is not an option; did you mean layerwise.overrides?"),
    ("optimizer.params", [1], "optimizer.params must be an object, got [1]"),
    ("optimizer.param", {}, "optimizer.param is not an option; did you mean 'params'?"),
    ("optimizer.legacy_fusion", True, "optimizer.legacy_fusion is not supported by this backend; remove it"),
    ("optimizer", "LayerWiseMuon", "optimizer must be an object, got 'LayerWiseMuon'"),
    ("layerwise", "balanced", "layerwise must be an object, got 'balanced'"),
    ("layerwise.layuot", "lpt", "layerwise.layuot is not an option; did you mean 'layout'?"),
    ("layerwise.layout", "best", "layerwise.layout must be one of 'balanced', 'lpt', 'size_matching', got 'best'"),
    ("layerwise.links", "tcp",
     "layerwise.links is no longer an option: transports are chosen by counting bytes; leave it out"),
    ("layerwise.reduction", "sum", "layerwise.reduction must be one of 'auto', 'ordered', 'native', got 'sum'"),
    ("layerwise.alignment", 0, "layerwise.alignment must be a whole number of at least 1, got 0"),
    ("layerwise.fsync", "yes", "layerwise.fsync must be true or false, got 'yes'"),
    ("layerwise.rename", ["a"], "layerwise.rename must be an object of names in checkpoints to names in the model"),
    ("layerwise.overrides", {}, "layerwise.overrides must be a list, got {}"),
    ("layerwise.overrides", [{"name": "*"}], "layerwise.overrides[0] ('*') overrides nothing; add one of optimizer"),
    ("layerwise.overrides", [{"name": "*", "ns_stesp": 3}],
     "layerwise.overrides[0].ns_stesp is not an option; did you mean 'ns_steps'?"),
    ("layerwise.overrides", [{"name": "*", "ns_steps": 0}],
     "layerwise.overrides[0].ns_steps must be a whole number of at least 1, got 0"),
    (f"{PARAMS}.preset", "kimmi", "optimizer.params.preset must be one of 'kimi', 'keller_jordan', 'soap_muon_beyond'"),
    (f"{PARAMS}.decay_vectors", 1, "optimizer.params.decay_vectors must be true or false, got 1"),
    (f"{PARAMS}.scalar_weight_decay", -1, "optimizer.params.scalar_weight_decay must be in [0, inf), got -1"),
    (f"{PARAMS}.decoupled_lr", 1, "optimizer.params.decoupled_lr is not an option; did you mean layerwise.decoupled"),
    ("layerwise.decay_vectors", True, "layerwise.decay_vectors is not an option; did you mean optimizer.params.decay"),
    ("layerwise.decoupled_lr", -1, "layerwise.decoupled_lr must be in [0, inf), got -1"),
    ("layerwise.decoupled_min_lr", "auto", "layerwise.decoupled_min_lr is 'auto', which only Hugging Face"),
    ("layerwise", {"decoupled_lr": 1, "decoupled_min_lr": 2}, "layerwise.decoupled_min_lr is 2, above layerwise.dec"),
    ("layerwise.apply_wd_to_qk_layernorm", "no", "layerwise.apply_wd_to_qk_layernorm must be true or false, got 'no'"),
    ("layerwise.dump_param_map", "", "layerwise.dump_param_map must be a text, got ''"),
    ("layerwise.overrides", [{"lr": 1}], "layerwise.overrides[0] has no condition; give it one of name, regex, module"),
    ("layerwise.overrides", [{"ndim": 2}], "layerwise.overrides[0] (ndim 2) overrides nothing; add one of optimizer"),
    ("layerwise.overrides", [{"name": "*", "lr": 1, "lr_scale": 1}],
     "layerwise.overrides[0].lr is 1 and layerwise.overrides[0].lr_scale 1: the first is the learning rate itself"),
    ("layerwise.overrides", [{"name": "*", "lr": 1, "min_lr": 2}],
     "layerwise.overrides[0].min_lr is 2, above layerwise.overrides[0].lr, which is 1"),
    ("layerwise.overrides", [{"regex": "(", "lr": 1}],
     "layerwise.overrides[0].regex must be a regular expression, got '('"),
    ("layerwise.overrides", [{"shape": [None, "a"], "lr": 1}],
     "layerwise.overrides[0].shape[1] must be a size, or null for any, got 'a'"),
    ("layerwise.overrides", [{"min_elements": 5, "max_elements": 4, "lr": 1}],
     "layerwise.overrides[0].min_elements is 5, more than max_elements, which is 4"),
    ("layerwise.overrides", [{"modul": "Linear", "lr": 1}],
     "layerwise.overrides[0].modul is not an option; did you mean 'module'?"),
    ("layerwise.overrides", [{"name": "*", "optimizer": "adm"}],
     "layerwise.overrides[0].optimizer must be one of 'matrix', 'scalar', 'muon', 'normuon'"),
    ("layer_wise", {}, "layer_wise is not a section of the config; did you mean 'layerwise' at the top level?"),
    (f"{ZERO}.ns_steps", 3, "zero_optimization.ns_steps is not read; did you mean optimizer.params.ns_steps?"),
    # What DeepSpeed reads, some of which it refuses itself in other words.
    (f"{ZERO}.stage", 0, "zero_optimization.stage must be 1 or 2 or 3 with this optimizer, got 0"),
    (f"{ZERO}.stage", "two", "zero_optimization.stage must be 1 or 2 or 3 with this optimizer, got 'two'"),
    (ZERO, True, "zero_optimization must be an object, got True"),
    (f"{ZERO}.reduce_bucket_size", 0, "zero_optimization.reduce_bucket_size must be a whole number of at least 1"),
    (f"{ZERO}.reduce_bucket_size", "big", "zero_optimization.reduce_bucket_size must be a whole number"),
    (f"{ZERO}.zero_quantized_weights", True, "zero_optimization.zero_quantized_weights must be False"),
    (f"{ZERO}.offload_optimizer", {"device": "nvme", "nvme_path": "/"},
     "zero_optimization.offload_optimizer.device must be 'none' or 'cpu' with this optimizer, got 'nvme'"),
    (f"{ZERO}.offload_optimizer", {"device": "cpu", "ratio": 2},
     "zero_optimization.offload_optimizer.ratio must be a number in [0, 1], got 2"),
    *((path, value, f"{path} must be true or false, got {value!r}") for value in (0, "false") for path in (
        f"{ZERO}.compute_grad_norm", "managed_gradient_accumulation", "checkpoint.use_node_local_storage")),
    ("bf16", True, "bf16 must be an object, got True"),
    ("bf16.enabled", "yes", "bf16.enabled must be true or false, got 'yes'"),
    ("fp16", {"enabled": "auto"}, "fp16.enabled is 'auto', which only Hugging Face"),
    ("gradient_clipping", -1, "gradient_clipping must be in [0, inf), got -1"),
    ("communication_data_type", "int8", "communication_data_type must be fp32, bf16 or fp16 with this optimizer"),
    ("data_types.grad_accum_dtype", "int8", "data_types.grad_accum_dtype must be fp32, bf16 or fp16"),
    ("data_types.grad_acum_dtype", "fp32", "data_types.grad_acum_dtype is not an option; did you mean 'grad_accum_d"),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 1.0}},
     "scheduler.params.warmup_max_lr is 1, and optimizer.params.lr is"),
    ("scheduler", {"type": 5}, "scheduler.type must be a name, got 5"),
    ("torch_autocast", {"enabled": True, "dtype": "fp32"}, "torch_autocast.dtype must be 'bfloat16' or 'float16'"),
    ("scheduler", {"type": "Warmup"}, "DeepSpeed does not recognize LR scheduler Warmup"),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_step": 5}},
     "WarmupLR.__init__() got an unexpected keyword argument 'warmup_num_step'"),
    ("scheduler", {"type": "WarmupCosineLR", "params": {}}, "WarmupCosineLR.__init__() missing 1 required positional"),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": "x"}},
     "warmup_num_steps must be a positive integer, got x"),
    ("scheduler", {"type": "StepLR", "params": {}}, "StepLR.__init__() missing 1 required positional argument"),
    ("optimizer.type", "LayerWise_Muon", "optimizer.type 'LayerWise_Muon' is not known; did you mean 'LayerWiseMuon'?"),
    ("optimizer.type", "AdamW", "the layerwise section needs optimizer.type 'LayerWiseMuon' or 'LayerWise', got 'ad"),
    # Batch sizes.
    ("train_batch_size", 3, "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "),
    ("train_micro_batch_size_per_gpu", 0, "Train batch size: 0 has to be greater than 0"),
    ("train_micro_batch_size_per_gpu", None, "Either train_batch_size or train_micro_batch_size_per_gpu needs to be"),
    ("gradient_accumulation_steps", -2, "Train batch size: -2 has to be greater than 0"),
    # What DeepSpeed finds in its own sections.
    (f"{ZERO}.overlap_com", True,
     "zero_optimization.overlap_com is not a key that DeepSpeed knows; did you mean 'overlap_comm'?"),
    (f"{ZERO}.overlap_comm", "x", "zero_optimization.overlap_comm must be true or false, got 'x'"),
    (f"{ZERO}.contiguous_gradients", "x", "zero_optimization.contiguous_gradients is 'x', which DeepSpeed refuses"),
    (f"{ZERO}.allgather_bucket_size", -1, "zero_optimization.allgather_bucket_size is -1, which DeepSpeed refuses"),
    (f"{ZERO}.sub_group_size", "x", "zero_optimization.sub_group_size is 'x', which DeepSpeed refuses"),
    (f"{ZERO}.leaf_module", {"classes": 5}, "zero_optimization.leaf_module.classes is 5, which DeepSpeed refuses"),
    (f"{ZERO}.leaf_module", 5, "zero_optimization.leaf_module must be an object, got 5"),
    (f"{ZERO}.offload_optimizer", {"device": "cpu", "pin_mem": True},
     "zero_optimization.offload_optimizer.pin_mem is not a key that DeepSpeed knows"),
    (f"{ZERO}.offload_optimizer", {"device": "cpu", "buffer_count": -1},
     "zero_optimization.offload_optimizer.buffer_count is -1, which DeepSpeed refuses"),
    (ZERO, {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}},
     "Cannot provide deprecated parameter 'cpu_offload' and replacing parameter 'offload_optimizer' together"),
    (ZERO, {"stage": 3, "stage3_max_live_parameters": "x"},
     "zero_optimization.stage3_max_live_parameters must be a number, got 'x'"),
    (ZERO, {"stage": 3, "offload_param": {"device": "cpu", "devce": 1}},
     "zero_optimization.offload_param.devce is not a key that DeepSpeed knows; did you mean 'device'?"),
    (ZERO, {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/"}},
     "zero_optimization.offload_param.device must be 'none' or 'cpu' with this optimizer, got 'nvme'"),
    (f"{ZERO}.offload_param", {"device": "cpu"},
     "zero_optimization.offload_param.device is 'cpu', and stage is 1, where parameters stay on the device"),
    (f"{ZERO}.zero_hpz_partition_size", 2, "zero_optimization.zero_hpz_partition_size is 2, and only ZeRO stage 3 fet"),
    (f"{ZERO}.zenflow", {"topk_ratio": 0.1}, "zero_optimization.zenflow must be None with this optimizer, got {'topk_"),
    ("bf16.enable", True, "bf16.enable is not a key that DeepSpeed knows"),
    ("fp16", {"enabled": False, "los_scale": 1}, "fp16.los_scale is not a key that DeepSpeed knows"),
    ("fp16", {"enabled": False, "loss_scale": -1}, "fp16.loss_scale is -1, which DeepSpeed refuses"),
    ("data_types.param_dtype", "bf16", "data_types.param_dtype is 'bf16', and bf16 and fp16 make parameters float32"),
    ("data_types.keep_in_fp32_modules", 5, "data_types.keep_in_fp32_modules must be \"auto\" or a list"),
    ("gradient_allreduce_op", "max", "Invalid gradient_allreduce_op. Supported operations: ['mean', 'sum']. Got"),
    ("seq_parallel_communication_data_type", "x", "Invalid communication_data_type. Supported data types"),
    ("tensor_parallel.autotp_siz", 2, "tensor_parallel.autotp_siz is not a key that DeepSpeed knows; did"),
    ("csv_monitor", {"enabled": True, "foo": 1}, "csv_monitor.foo is not a key that DeepSpeed knows"),
    ("comms_logger", {"enabled": "x"}, "comms_logger.enabled is 'x', which DeepSpeed refuses"),
    ("hybrid_engine", {"enabled": False, "foo": 1}, "hybrid_engine.foo is not a key that DeepSpeed knows"),
    ("timers", {"throughput": {"enabled": "x"}}, "timers.throughput.enabled is 'x', which DeepSpeed refuses"),
    ("compile.deepcompil", True, "compile.deepcompil is not a key that DeepSpeed knows; did you mean 'deepcompile'?"),
    ("flops_profiler", {"enabled": "x"}, "flops_profiler.enabled must be true or false, got 'x'"),
    ("activation_checkpointing", 5, "activation_checkpointing must be an object, got 5"),
    ("nebula", {"enabled": False}, "Nebula checkpointing has been removed."),
    ("checkpoint", {"tag_validation": "Wrn"}, "Checkpoint config contains invalid tag_validation value of WRN"),
]


#: What only matching finds, with both a model and a file of shapes.
UNMET = [
    ([{"ndim": 9, "lr": 1}], "layerwise.overrides[0] (ndim 9) matches no trainable parameter; is the pattern missp"),
    ([{"ndim": 2, "weight_decay": 0}, {"ndim": [1, 2], "weight_decay": 1}],
     ": layerwise.overrides[0] sets weight_decay to 0.0 and layerwise.overrides[1] to 1.0; narrow one of the two"),
    ([{"ndim": 2, "lr": 1}, {"regex": ".*", "lr_scale": 2}],
     ": layerwise.overrides[0] sets lr to 1 and layerwise.overrides[1] sets lr_scale to 2: the first is the learning"),
    ([{"ndim": 1, "min_lr": 5}], ": min_lr is 5, above its learning rate, which is 0.003; lower min_lr, or give lr"),
]


#: What DeepSpeed and torch raise for a config, of which a run passes some on as they are.
FOREIGN = (*FOREIGN_ERRORS, DeepSpeedConfigError)


def told(run, *errors):
    with pytest.raises((ConfigError, RoutingError, *errors)) as error:
        run()
    return str(error.value)


def plan(given, ranks=1):
    return told(lambda: DryRun.of("gpt2-124m", given, [ranks]))


class TestAlike(DistributedTest):
    world_size = 1

    @needs("deepspeed>=0.19.8", "each release knows other keys")
    def test_in_a_plan_and_in_training(self, monkeypatch):
        """Plans are also made before this process has an engine, and so hooks."""
        # Nobody fills "auto" in, as in training.
        monkeypatch.setattr("ds_layerwise.tools.dry_run.fill_in", lambda given, **_: (copy.deepcopy(given), {}))
        planned = [plan(with_value(path, value)) for path, value, _ in WRONG]
        for (path, value, message), said in zip(WRONG, planned, strict=True):
            assert said.startswith(message), said
            run = told(lambda: start(Net(), with_value(path, value)), *FOREIGN)
            assert run == said == plan(with_value(path, value))

    def test_an_override_that_matches_nothing_is_told(self):
        for overrides, message in UNMET:
            given = with_value("layerwise.overrides", overrides)
            # But for the parameter, which is the first of each.
            for said in (plan(given), told(lambda: start(Net(), copy.deepcopy(given)))):
                assert message in said and (said.startswith(message) is not message.startswith(":")), said

    @pytest.mark.world_size(2)
    def test_tensor_and_sequence_parallelism_together_are_refused(self):
        given = ds_config(sequence_parallel_size=2, data_parallel_size=1, tensor_parallel={"autotp_size": 2})
        said = plan(given, 2)
        assert said.startswith("tensor_parallel.autotp_size is 2, together with a pipeline or sequence parallelism")
        assert told(lambda: start(Net(), copy.deepcopy(given))) == said
