"""The rest of a DeepSpeed config, outside our two sections: the values that this backend
supports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import is_
from os.path import commonprefix
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ValidationError

from ds_layerwise.config.sections import belongs_in, only_known
from ds_layerwise.errors import ConfigError, nearest
from ds_layerwise.optimizers.fields import NonNegative, Positive, check, plain

#: The sections that must be objects in any config.
_OBJECTS = """
    optimizer optimizer.params layerwise zero_optimization zero_optimization.offload_optimizer
    zero_optimization.offload_param bf16 bfloat16 fp16 torch_autocast data_types tensor_parallel
    checkpoint scheduler scheduler.params amp compile hybrid_engine eigenvalue expert_parallel
    activation_checkpointing data_efficiency flops_profiler pipeline zero_optimization.leaf_module
""".split()

#: The switches that affect a plan or a check of the config. DeepSpeed accepts values other than
#: booleans for them.
_FLAGS = """
    bf16.enabled bfloat16.enabled fp16.enabled torch_autocast.enabled zero_optimization.cpu_offload
    zero_optimization.compute_grad_norm checkpoint.use_node_local_storage
    managed_gradient_accumulation
""".split()

#: Those that may be 0 or 1, too, as in DeepSpeed.
_NUMBERS_OR_FLAGS = """
    zero_optimization.overlap_comm flops_profiler.enabled wall_clock_breakdown
""".split()


def config_of(given: object) -> Mapping[str, Any]:
    """Return ``given`` if it is an object whose sections are objects and whose switches are
    booleans.

    Raises:
        ConfigError: names the wrong value.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"a DeepSpeed config must be an object, got {given!r}")
    for path in _OBJECTS:
        value = at(given, path)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{path} must be an object, got {value!r}")
    for path, wanted in (
        ("optimizer.type", "'LayerWiseMuon' or 'LayerWise'"),
        ("scheduler.type", "a name"),
    ):
        value = at(given, path)
        if not isinstance(value, str | None):
            raise ConfigError(f"{path} must be {wanted}, got {value!r}")
    for path in (*_FLAGS, *_NUMBERS_OR_FLAGS):
        value = at(given, path)
        is_flag = isinstance(value, bool) or (path in _NUMBERS_OR_FLAGS and value in (0, 1))
        if value is not None and value != "auto" and not is_flag:
            raise ConfigError(f"{path} must be true or false, got {value!r}")
    return given


def at(given: Mapping[str, Any], path: str) -> Any:
    """Return the value of ``given`` at a path of keys separated by dots; None if there is none. The
    empty path is that of ``given`` itself.
    """
    value: Any = given
    for key in filter(None, path.split(".")):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


#: The keys elsewhere in a DeepSpeed config that must be false with this backend, each with the way
#: out.
_MUST_BE_FALSE = {
    "zero_optimization.cpu_offload_param": "write it as zero_optimization.offload_param.device",
    "zero_optimization.legacy_stage1": "DeepSpeed has no such stage any more; remove it",
    "sparse_gradients": "sparse gradients cannot be cut into shards; remove it",
    "fp16.fp16_master_weights_and_grads": "masters are float32; remove it",
    "amp.enabled": "use the bf16 or fp16 section instead",
    "compile.deepcompile": (
        "DeepCompile takes ZeRO's buffers apart; use engine.compile() without it"
    ),
    "hybrid_engine.enabled": "remove it",
    "eigenvalue.enabled": (
        "it differentiates gradients that do not stay on the parameters; remove it"
    ),
    "use_data_before_expert_parallelism": "experts are dealt out rank after rank; remove it",
    **dict.fromkeys(
        """
    bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states
    bfloat16.bf16_master_weights_and_grads bfloat16.bf16_optimizer_states
""".split(),
        "masters and states are float32; remove it",
    ),
}

#: The stage 3 features that this backend does not support, each with the value that turns it off.
_MORE_THAN_STAGE_3 = {
    "offload_optimizer.super_offload": False,
    "pipeline_loading_checkpoint": False,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zeropp_loco_param": None,
    "zero_quantized_gradients": False,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
}

#: The keys elsewhere in a DeepSpeed config that must have one of some values: these values, and the
#: way out.
_MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.stage": (
        (1, 2, 3),
        "this backend takes the place of ZeRO stages 1 to 3; set it to one of them",
    ),
    "zero_optimization.offload_optimizer.device": (
        ("none", "cpu"),
        "nothing goes to NVMe; set it to 'cpu'",
    ),
    "zero_optimization.offload_param.device": (
        ("none", "cpu"),
        "nothing goes to NVMe; set it to 'cpu'",
    ),
    "zero_optimization.zenflow": ((None,), "remove it"),
    **{
        f"zero_optimization.{key}": ((neutral,), "it has no part in this backend; remove it")
        for key, neutral in _MORE_THAN_STAGE_3.items()
    },
    **{path: ((False,), way_out) for path, way_out in _MUST_BE_FALSE.items()},
}

#: The keys for which Hugging Face replaces "auto", and which DeepSpeed otherwise reads as text or
#: as false.
_NEVER_AUTO = """
    bf16.enabled bfloat16.enabled fp16.enabled gradient_clipping managed_gradient_accumulation
    data_types.grad_accum_dtype data_types.param_dtype data_types.buffer_dtype
""".split()


#: The keys that are accepted and have no effect, because they only affect how, how fast or in what
#: order stock DeepSpeed does its work. If these are true, they ask for what happens here anyway.
_IDLE_IF_TRUE = """
    zero_optimization.contiguous_gradients zero_optimization.reduce_scatter
    zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.allgather_partitions
    zero_optimization.memory_efficient_linear zero_optimization.override_module_apply
""".split()

#: The keys of the same kind that ask for nothing if they are false.
_IDLE_IF_FALSE = """
    zero_optimization.round_robin_gradients zero_optimization.parameter_alignment
    zero_optimization.elastic_checkpoint zero_optimization.cpu_offload_use_pin_memory
    zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks
    zero_optimization.save_muon_momentum_buffer_in_memory
    zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.offload_optimizer.pipeline_read
    zero_optimization.offload_optimizer.pipeline_write
    zero_optimization.offload_optimizer.fast_init
    zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.use_all_reduce_for_fetch_params
    zero_optimization.allgather_sequential
    zero_optimization.stage3_gather_16bit_weights_on_model_save
    zero_optimization.stage3_use_all_reduce_for_fetch_params
    zero_optimization.stage3_allgather_sequential
""".split()

#: The keys of the same kind of which every value asks for something.
_IDLE = """
    zero_optimization.allgather_bucket_size zero_optimization.sub_group_size
    zero_optimization.leaf_module.classes zero_optimization.leaf_module.names
    zero_optimization.leaf_module.name_suffixes
    zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_optimizer.buffer_count
    zero_optimization.offload_optimizer.cpuadam_cores_perc
    zero_optimization.offload_param.nvme_path zero_optimization.offload_param.buffer_count
    zero_optimization.offload_param.buffer_size zero_optimization.offload_param.max_in_cpu
    zero_optimization.offload_param.pin_memory
    zero_optimization.prefetch_bucket_size zero_optimization.param_persistence_threshold
    zero_optimization.model_persistence_threshold zero_optimization.max_live_parameters
    zero_optimization.max_reuse_distance zero_optimization.module_granularity_threshold
    zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_param_persistence_threshold
    zero_optimization.stage3_model_persistence_threshold
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_module_granularity_threshold
""".split()

#: The keys without effect in the order of the start-up table, each with the value that asks for
#: nothing.
_WITHOUT_EFFECT: dict[str, Any] = {
    **dict.fromkeys(_IDLE_IF_TRUE, True),
    **dict.fromkeys(_IDLE_IF_FALSE, False),
    **dict.fromkeys(_IDLE),
    "prescale_gradients": False,
    "gradient_predivide_factor": 1,
    "bf16.immediate_grad_update": False,
    "bfloat16.immediate_grad_update": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "disable_allgather": False,
}


#: The keys without effect that DeepSpeed reads only at stage 3, although they lack its prefix.
_OF_STAGE_3 = (
    "memory_efficient_linear",
    "override_module_apply",
    "log_trace_cache_warnings",
    "pin_memory",
)


def _acts_at_stage_3(path: str) -> bool:
    """Tell whether DeepSpeed itself reads a key without effect at ZeRO stage 3."""
    section, _, key = path.rpartition(".")
    has_prefix = f"{section}.stage3_{key.removeprefix('stage3_')}" in _WITHOUT_EFFECT
    return has_prefix or key in _OF_STAGE_3 or section.endswith("leaf_module")


def with_plain_numbers(section: Any) -> Any:
    """Return ``section`` with Python's own numbers in place of numpy's and of tensors.

    The result is ``section`` itself if it has no others, because the script may continue to use it.
    DeepSpeed writes its config as JSON at start, which supports no other numbers.
    """
    if isinstance(section, Mapping):
        changed: Any = {key: with_plain_numbers(value) for key, value in section.items()}
        if all(map(is_, changed.values(), section.values())):
            return section
        return changed
    if isinstance(section, (list, tuple)):
        changed = list(map(with_plain_numbers, section))
        if all(map(is_, changed, section)):
            return section
        return changed
    if getattr(section, "shape", ()) != () and hasattr(section, "tolist"):
        section = section.tolist()
    return plain(section)


def without_effect(ds_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of ``ds_config`` that ask for something, are accepted, and have no effect."""
    at_stage_3 = at(ds_config, "zero_optimization.stage") == 3
    return tuple(
        path.removeprefix("zero_optimization.")
        for path, neutral in _WITHOUT_EFFECT.items()
        if at(ds_config, path) not in (None, "auto", {}, neutral)
        and not (at_stage_3 and _acts_at_stage_3(path))
    )


#: The sections and keys of a config that must be equal on all ranks, because they affect training.
_SAME_ON_ALL_RANKS = """
    optimizer layerwise zero_optimization bf16 bfloat16 fp16 torch_autocast data_types
    communication_data_type seq_parallel_communication_data_type gradient_clipping
    gradient_allreduce_op managed_gradient_accumulation tensor_parallel sequence_parallel_size
    scheduler checkpoint expert_parallel
""".split()


def what_ranks_share(ds_config: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that must be equal on all ranks, nested ones with dots, sorted by
    name.
    """
    lines = []

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value):
                add(f"{path}.{key}", value[key])
        else:
            # The address of an object, such as a process group, differs.
            lines.append(f"{path} = {re.sub(' at 0x[0-9a-f]+', '', repr(value))}")

    for key in _SAME_ON_ALL_RANKS:
        if key in ds_config:
            add(key, ds_config[key])
    return lines


#: The keys of a config at the top level, and in ``checkpoint``, which nothing else checks. An
#: unknown key is refused only if it is a misspelling of one of these.
_KNOWN = {
    "": """
    activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger
    communication_data_type compile compression_training csv_monitor curriculum_learning
    data_efficiency data_types dataloader_drop_last datastates_ckpt disable_allgather
    disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler fp16
    gradient_accumulation_steps gradient_allreduce_op gradient_clipping
    gradient_predivide_factor hybrid_engine layerwise log_level
    managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients
    progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type
    sequence_parallel_size sparse_attention sparse_gradients steps_per_print tensor_parallel
    tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
    use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
    weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization
""".split(),
    "checkpoint": "load_universal parallel_write tag_validation use_node_local_storage "
    "writer".split(),
}


def _is_slip(key: str, meant: str) -> bool:
    """Tell whether ``key`` is ``meant`` with one letter added, missing, changed, or two swapped."""
    same = len(commonprefix([key, meant]))
    rest = key[same:]
    its = meant[same:]
    return its in (rest, rest[1:]) or its[1:] in (rest, rest[1:]) or its == rest[1::-1] + rest[2:]


def _flat(name: object) -> str:
    return re.sub("[-_ .]", "", str(name).lower())


def type_meant(optimizer_type: object) -> str | None:
    """Return the name of this backend that an unknown ``optimizer.type`` most likely means."""
    spelled = {"layerwisemuon": "LayerWiseMuon", "layerwise": "LayerWise"}
    return spelled.get(nearest(_flat(optimizer_type), spelled, cutoff=0.8) or "")


def refuse_misplaced(ds_config: Mapping[str, Any]) -> None:
    """Refuse a misspelt ``layerwise`` section, and keys of our sections in places where nothing
    reads them.

    Raises:
        ConfigError: says where it belongs.
    """
    for section in ("", "zero_optimization", "bf16", "fp16", "checkpoint"):
        keys = at(ds_config, section)
        known = _KNOWN.get(section, ())
        for key in map(str, keys if isinstance(keys, Mapping) else ()):
            path = f"{section}.{key}".lstrip(".")
            if path == "layerwise":
                continue
            if nearest(_flat(key), ["layerwise"], cutoff=0.8):
                raise ConfigError(
                    f"{path} is not a section of the config; did you mean 'layerwise' at the top "
                    "level?"
                )
            if home := belongs_in(key):
                raise ConfigError(f"{path} is not read; did you mean {home}?")
            for meant in known:
                if key not in known and _is_slip(_flat(key), _flat(meant)):
                    raise ConfigError(f"{path} is not read; did you mean {meant!r}?")


def refuse_unsupported(ds_config: Mapping[str, Any]) -> None:
    """Refuse everything outside our two sections that this backend does not support.

    Raises:
        ConfigError: names the key, its value, the valid values and the way out.
    """
    refuse_misplaced(ds_config)
    for path, (allowed, way_out) in _MUST_BE.items():
        value = at(ds_config, path)
        if value is not None and value not in allowed:
            raise ConfigError(
                f"{path} must be {' or '.join(map(repr, allowed))} with this optimizer, got "
                f"{value!r}: {way_out}"
            )
    hpz = at(ds_config, "zero_optimization.zero_hpz_partition_size")
    if hpz not in (None, 1) and at(ds_config, "zero_optimization.stage") != 3:
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {hpz!r}, and only ZeRO stage 3 fetches "
            "weights; set stage to 3, or remove it"
        )
    for path in _NEVER_AUTO:
        if at(ds_config, path) == "auto":
            raise ConfigError(
                f"{path} is 'auto', which only Hugging Face's Trainer and Accelerate replace; give "
                "it a value"
            )
    check(NonNegative, "gradient_clipping", ds_config.get("gradient_clipping", 1.0))
    check(Positive, "gradient_predivide_factor", ds_config.get("gradient_predivide_factor", 1.0))
    if at(ds_config, "zero_optimization.stage") is None:
        raise ConfigError(
            "zero_optimization.stage must be 1 or 2 or 3 with this optimizer, but is not set"
        )
    only_known(
        "data_types",
        ds_config.get("data_types") or {},
        ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"),
    )
    _refuse_contradictions(ds_config)


def _refuse_contradictions(ds_config: Mapping[str, Any]) -> None:
    zero = ds_config["zero_optimization"]
    at_stage_2 = zero["stage"] >= 2
    overlaps = zero.get("overlap_comm")
    if overlaps in (None, "auto"):
        overlaps = zero["stage"] == 3
    accumulated = at(ds_config, "data_types.grad_accum_dtype")
    if at_stage_2 and accumulated not in (None, "fp32", "float32", "float"):
        raise ConfigError(
            f"data_types.grad_accum_dtype must be 'fp32' at ZeRO stage {zero['stage']}, got "
            f"{accumulated!r}: owners add up averaged gradients in float32; remove it"
        )
    if zero.get("compute_grad_norm") is False:
        if ds_config.get("gradient_clipping", 1.0):
            raise ConfigError(
                "zero_optimization.compute_grad_norm is false, but gradient_clipping needs the "
                "norm; set gradient_clipping to 0"
            )
        for key in ("grad_norm_skip_threshold", "norm_groups"):
            if at(ds_config, f"layerwise.{key}"):
                raise ConfigError(
                    f"zero_optimization.compute_grad_norm is false, but layerwise.{key} needs the "
                    "norm; remove one of the two"
                )
    if not at_stage_2 and overlaps and ds_config.get("managed_gradient_accumulation") is False:
        raise ConfigError(
            "zero_optimization.overlap_comm is true, which at stage 1 sends gradients in the last "
            "backward pass of a step, but managed_gradient_accumulation is false, so it is not "
            "known which pass that is; set overlap_comm to false, or stage to 2"
        )
    is_bounded = at(ds_config, "layerwise.max_waiting_buckets") is not None
    if is_bounded and not (at_stage_2 and overlaps):
        raise ConfigError(
            "layerwise.max_waiting_buckets bounds gradients that wait at ZeRO stage 2 or 3 with "
            "overlap_comm; remove it, or set overlap_comm to true and stage to 2 or 3"
        )
    _refuse_by_stage(ds_config)
    is_local = at(ds_config, "checkpoint.use_node_local_storage")
    if is_local and at(ds_config, "layerwise.save_universal"):
        raise ConfigError(
            "layerwise.save_universal is true, which needs a disk that all ranks share, but "
            "checkpoint.use_node_local_storage is true; remove one of the two"
        )


#: The settings that ZeRO stage 3 does not support yet, each with the value that asks for nothing.
_NOT_AT_STAGE_3: dict[str, Any] = {
    "layerwise.overlap_param_gather": False,
    "tensor_parallel.autotp_size": 1,
}


def tensor_and_other(autotp_size: int) -> ConfigError:
    """Return the error for AutoTP together with a pipeline or sequence parallelism."""
    return ConfigError(
        f"tensor_parallel.autotp_size is {autotp_size}, together with a pipeline or sequence "
        "parallelism, beside which DeepSpeed lays out no ranks for AutoTP; remove one of the two "
        "(an attention that cuts sequences itself needs no mpu or mesh: parts train as data does)"
    )


def _refuse_by_stage(ds_config: Mapping[str, Any]) -> None:
    stage = at(ds_config, "zero_optimization.stage")
    for path, neutral in _NOT_AT_STAGE_3.items():
        value = at(ds_config, path)
        if stage == 3 and value not in (None, neutral, 0):
            raise ConfigError(
                f"{path} is {value!r}, which is not supported at ZeRO stage 3 yet; remove "
                "it, or set zero_optimization.stage to 2"
            )
    second = at(ds_config, "zero_optimization.zero_hpz_partition_size")
    if second not in (None, 0, 1) and at(ds_config, "expert_parallel.enabled"):
        raise ConfigError(
            f"zero_optimization.zero_hpz_partition_size is {second}, and expert_parallel.enabled "
            "is true, whose experts have no second cuts in DeepSpeed; remove one of the two"
        )
    gathers = at(ds_config, "zero_optimization.stage3_gather_16bit_weights_on_model_save") is True
    if stage == 3 and gathers and at(ds_config, "expert_parallel.enabled"):
        raise ConfigError(
            "zero_optimization.stage3_gather_16bit_weights_on_model_save is true, and "
            "expert_parallel.enabled, whose experts DeepSpeed does not gather: a Trainer's first "
            "save would end the run; remove the former, and make models of checkpoints with "
            "`ds-layerwise consolidate`"
        )
    tensors = at(ds_config, "tensor_parallel.autotp_size")
    sequences = ds_config.get("sequence_parallel_size")
    if tensors not in (None, 0, 1) and sequences not in (None, 0, 1):
        raise tensor_and_other(tensors)
    if stage < 3 and at(ds_config, "zero_optimization.offload_param.device") == "cpu":
        raise ConfigError(
            f"zero_optimization.offload_param.device is 'cpu', and stage is {stage}, where "
            "parameters stay on the device; remove it, or set zero_optimization.stage to 3"
        )


_AUTOCAST_DTYPES = ("bf16", "bfloat16", "fp16", "float16", "half")
_AUTOCAST_KEYS = ("enabled", "dtype", "lower_precision_safe_modules")


def check_autocast(ds_config: Mapping[str, Any]) -> None:
    """Check the ``torch_autocast`` section, and the keys that must agree with it.

    Raises:
        ConfigError: names the key, its value and the way out.
    """
    section = ds_config.get("torch_autocast") or {}
    only_known("torch_autocast", section, _AUTOCAST_KEYS)
    if not check(bool, "torch_autocast.enabled", section.get("enabled", False)):
        return
    if section.get("dtype") not in _AUTOCAST_DTYPES:
        raise ConfigError(
            f"torch_autocast.dtype must be 'bfloat16' or 'float16', got {section.get('dtype')!r}"
        )
    modules = section.get("lower_precision_safe_modules")
    if modules is not None and (isinstance(modules, str) or not isinstance(modules, Sequence)):
        raise ConfigError(
            "torch_autocast.lower_precision_safe_modules must be a list of names of classes, such "
            f"as 'torch.nn.Linear', got {modules!r}"
        )
    for other in ("bf16", "bfloat16", "fp16"):
        if at(ds_config, f"{other}.enabled"):
            raise ConfigError(
                f"torch_autocast.enabled and {other}.enabled are both true: the one keeps weights "
                "in float32, the other does not; remove one of the two"
            )
    if ds_config.get("communication_data_type") is not None:
        raise ConfigError(
            f"communication_data_type is {ds_config['communication_data_type']!r}, but "
            "torch_autocast decides for each parameter what its gradient travels in; remove one "
            "of the two"
        )


#: The sections that DeepSpeed checks, by their names in its errors; "" for those at the top level.
_SECTION_OF = {
    "DeepSpeedZeroConfig": "zero_optimization",
    "DeepSpeedFP16Config": "fp16",
    "DeepSpeedBF16Config": "bf16",
    "DeepSpeedMonitorConfig": "",
    "HybridEngineConfig": "hybrid_engine",
    "TPTrainingConfig": "tensor_parallel",
    "CompileConfig": "compile",
    "CommsLoggerConfig": "comms_logger",
    "DeepSpeedThroughputTimerConfig": "timers.throughput",
    "WeightQuantConfig": "weight_quantization",
}


def retell(error: Exception) -> NoReturn:
    """Raise DeepSpeed's error about a config in the form of this package's errors.

    Raises:
        ConfigError: has DeepSpeed's words, or names the first wrong key of a section and its value;
            DeepSpeed's error is its cause.
    """
    if not isinstance(error, ValidationError):
        raise ConfigError(str(error)) from error
    first = error.errors()[0]
    section = _SECTION_OF.get(error.title, error.title)
    key = ".".join(map(str, (section, *first["loc"]))).lstrip(".")
    if first["type"] != "extra_forbidden":
        raise ConfigError(
            f"{key} is {first['input']!r}, which DeepSpeed refuses: {first['msg']}"
        ) from error
    close = nearest(first["loc"][-1], _fields(error.title, first["loc"][:-1]))
    raise ConfigError(
        f"{key} is not a key that DeepSpeed knows; "
        f"{f'did you mean {close!r}?' if close else 'correct its name, or remove it'}"
    ) from error


def _fields(model: str, path: Sequence[int | str]) -> list[str]:
    """Return the keys at ``path`` in a section that DeepSpeed checks, given by its class name."""
    kinds = [BaseModel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    found = [kind for kind in kinds if kind.__name__ == model]
    for part in path:
        inner: list[Any] = []
        for kind in found:
            if part in kind.model_fields:
                annotation = kind.model_fields[part].annotation
                inner += (annotation, *get_args(annotation))
        found = [kind for kind in inner if kind in kinds]
    keys: list[str] = []
    for kind in found:
        keys += kind.model_fields
    return keys
