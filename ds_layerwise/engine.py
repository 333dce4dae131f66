"""The hook: how DeepSpeed's engine comes to build this backend, and how to undo it.

Note: what is wrapped, and why there
    ``_do_sanity_check`` is the first thing that an engine does with its config, so a mistake is found before memory
    is spent; only the config's own ``_configure_train_batch_size`` computes before. ``_broadcast_model`` is the first
    collective on the model: ranks whose models differ must find out before it. ``_configure_basic_optimizer`` builds
    the optimizer that the config names; ``_do_optimizer_sanity_check`` would pick another wrapper class for bf16 with
    float32 accumulation; ``_configure_zero_optimizer`` builds the wrapper. ``zero_use_cpu_optimizer`` would keep
    ``engine.offload_states`` from moving what ``offload_optimizer`` left on the device. One function is no method:
    ``get_zero_config`` parses ``zero_optimization``, and would refuse a ratio below 1. :mod:`.saving` and
    :mod:`.loading` have more. Every wrap asks first whether the engine or config at hand uses this backend, and else
    calls the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.checkpoint.constants import (UNIVERSAL_CHECKPOINT_INFO, UNIVERSAL_CHECKPOINT_VERSION_KEY,
                                            UNIVERSAL_CHECKPOINT_VERSION_VALUE)
from deepspeed.moe.layer import MoE
from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.utils.timer import NoopTimer

from ds_layerwise import autocast, comm, loading, pipeline, saving, sequence_parallel
from ds_layerwise.buffers import DTYPES
from ds_layerwise.config import OPTIMIZER_TYPES, LayerwiseConfig, OptimizerConfig, is_ours, refuse_unsupported
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.param_groups import LayerwiseOptimizer
from ds_layerwise.optimizers.registry import matrix_rule
from ds_layerwise.settings import Settings
from ds_layerwise.tensor_parallel import check_mpu, tensor_group
from ds_layerwise.zero_optimizer import LayerWiseZeroOptimizer, owners

_originals: dict[tuple[type, str], Callable[..., Any]] = {}


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` and ``"LayerWise"`` known to DeepSpeed. A second call does nothing.

    Call it in every process before ``deepspeed.initialize``. :func:`unregister` undoes it.
    """
    if _originals:
        return
    ds_config_module.DEEPSPEED_OPTIMIZERS.extend(OPTIMIZER_TYPES)
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(LayerwiseOptimizer)
    for (owner, name), wrap in _WRAPS.items():
        original = getattr(owner, name)
        _originals[owner, name] = original
        setattr(owner, name, _wrapped(original, wrap))
    ds_config_module.get_zero_config = _get_zero_config


def unregister() -> None:
    """Leave DeepSpeed as it was before :func:`register`. Engines that exist already keep working.

    Raises:
        ConfigError: somebody else has wrapped the engine since; undo that first.
    """
    if not _originals:
        return
    for owner, name in _originals:
        if not hasattr(getattr(owner, name), "_ds_layerwise"):
            raise ConfigError(f"{owner.__name__}.{name} was replaced after ds_layerwise.register(); undo that first")
    if ds_config_module.get_zero_config is not _get_zero_config:
        raise ConfigError("deepspeed.runtime.config.get_zero_config was replaced after ds_layerwise.register(); undo "
                          "that first")
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()
    ds_config_module.get_zero_config = get_zero_config
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.remove(LayerwiseOptimizer)
    for optimizer_type in OPTIMIZER_TYPES:
        ds_config_module.DEEPSPEED_OPTIMIZERS.remove(optimizer_type)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, same arguments and results, after :func:`register`."""
    register()
    return deepspeed.initialize(*args, **kwargs)


def _wrapped(original: Callable[..., Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(functools.partial(original, owner), owner, *args, **kwargs)

    method._ds_layerwise = True  # type: ignore[attr-defined]
    return method


def _uses_us(engine: DeepSpeedEngine) -> bool:
    # The engine's own optimizer_name() is the class of the client's optimizer where one is given.
    return is_ours(engine._config.optimizer_name)


def _get_zero_config(given: Any) -> Any:
    """DeepSpeed's reading of ``zero_optimization``, which takes a ratio of offloading below 1 at stage 3 alone.

    Raises:
        ConfigError: the ratio is not in [0, 1].
    """
    zero = given.get("zero_optimization")
    offload = zero.get("offload_optimizer") if isinstance(zero, dict) else None
    if not isinstance(offload, dict) or not is_ours((given.get("optimizer") or {}).get("type")):
        return get_zero_config(given)
    ratio = offload.get("ratio", "auto")
    if ratio == "auto":
        return get_zero_config(given)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise ConfigError(f"zero_optimization.offload_optimizer.ratio must be a number in [0, 1], got {ratio!r}")
    rest = {**given["zero_optimization"], "offload_optimizer": {k: v for k, v in offload.items() if k != "ratio"}}
    config = get_zero_config({**given, "zero_optimization": rest})
    config.offload_optimizer.ratio = ratio
    return config


def _sections(engine: DeepSpeedEngine) -> tuple[OptimizerConfig, LayerwiseConfig]:
    given = engine._config._param_dict
    return (OptimizerConfig.from_section(given["optimizer"]), LayerwiseConfig.from_section(given.get("layerwise", {})))


def _configure_train_batch_size(original: Callable[[], Any], config: ds_config_module.DeepSpeedConfig) -> Any:
    if is_ours(config.optimizer_name):
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if config._param_dict.get(key) == "auto":
                raise ConfigError(f"{key} is 'auto', and nothing filled it in, as Hugging Face's Trainer and "
                                  "Accelerate do; give it a whole number, or remove it")
    return original()


def _do_sanity_check(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    given = engine._config._param_dict
    if not _uses_us(engine):
        if "layerwise" in given:
            raise ConfigError(f"the layerwise section needs optimizer.type 'LayerWiseMuon' or 'LayerWise', got "
                              f"{engine._config.optimizer_name!r}; change it, or remove the section")
        return original()
    if engine.mpu is None and engine.mesh_device is not None:
        engine.mpu = sequence_parallel.MeshGroups(engine.mesh_device)
    with _alike():
        _check_config(engine, given)
    if dist.is_initialized():
        described = _described(given) + [f"gradient_accumulation_steps = {engine._config.gradient_accumulation_steps}"]
        comm.check_alike("the configuration", comm.digest_of(described), described, group=None)
    return original()


def _alike() -> AbstractContextManager[None]:
    """What one rank refuses, all refuse; DeepSpeed can be told to work without a process group."""
    return comm.Alike(None) if dist.is_initialized() else nullcontext()


#: Sections and keys of a config that ranks must agree on: by what they differ in here, they would train differently.
_SAME_ON_ALL_RANKS = ("optimizer", "layerwise", "zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast",
                      "data_types", "communication_data_type", "seq_parallel_communication_data_type",
                      "gradient_clipping", "gradient_allreduce_op", "managed_gradient_accumulation", "tensor_parallel",
                      "sequence_parallel_size")


def _described(given: Mapping[str, Any]) -> list[str]:
    """One line for each key that ranks must agree on, nested ones with dots, in the order of their names."""
    lines: list[str] = []

    def add(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value):
                add(f"{path}.{key}", value[key])
        else:
            lines.append(f"{path} = {value!r}")

    for key in _SAME_ON_ALL_RANKS:
        if key in given:
            add(key, given[key])
    return lines


def _check_config(engine: DeepSpeedEngine, given: dict[str, Any]) -> None:
    """Refuse what one rank can see to be wrong with its config.

    Raises:
        ConfigError: names the key.
    """
    matrix_rule(_sections(engine)[0])
    refuse_unsupported(given)
    autocast.check_section(given)
    _refuse_what_is_not_read(engine._config, given)
    if engine.client_optimizer is not None:
        raise ConfigError("the optimizer is given twice: deepspeed.initialize(optimizer=...) and optimizer.type "
                          f"{given['optimizer']['type']!r} in the config; remove one")
    if not isinstance(engine.mpu, PipelineParallelGrid | None) and not sequence_parallel.is_ulysses(engine.mpu):
        check_mpu(engine.mpu, autotp_size=engine.autotp_size())
    elif engine.mpu is not None and engine.autotp_size() > 1:
        raise ConfigError(f"tensor_parallel.autotp_size is {engine.autotp_size()}, together with a pipeline or "
                          "sequence parallelism, which this optimizer does not support; remove one of the two")


#: Keys that the newest supported DeepSpeed reads and the oldest does not, and what they say by default.
_NOT_IN_EVERY_RELEASE = {"gradient_allreduce_op": "mean", "managed_gradient_accumulation": True,
                         "data_types.param_dtype": None, "data_types.buffer_dtype": None,
                         "data_types.keep_in_fp32_modules": "auto"}


def _refuse_what_is_not_read(config: Any, given: dict[str, Any]) -> None:
    for path, default in _NOT_IN_EVERY_RELEASE.items():
        *sections, key = path.split(".")
        section = given.get(sections[0]) or {} if sections else given
        if section.get(key, default) != default and not hasattr(config, key):
            raise ConfigError(f"{path} is not known to DeepSpeed {deepspeed.__version__}, which would ignore it; "
                              "remove it, or install a newer DeepSpeed")


def _broadcast_model(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    if _uses_us(engine):
        with _alike():
            _check_model(engine)
            sequence_parallel.check(engine)
            if pipeline.is_pipeline(engine.module):
                pipeline.check(engine, engine.module, _sections(engine)[1])
        if dist.is_initialized():
            described = [f"{name} {tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' (frozen)'}"
                         for name, param in engine.module.named_parameters()]
            what = "the model, of which parts have to be of equal size," if engine.mp_world_size > 1 else "the model"
            staged = pipeline.is_pipeline(engine.module)
            with comm.Alike(None):
                comm.check_alike("the model" if staged else what, comm.digest_of(described), described,
                                 group=engine.seq_data_parallel_group if staged else None)
        for param in engine.module.parameters():
            # Broadcasting views parameters as bytes, which only contiguous ones allow.
            if not param.data.is_contiguous():
                param.data = param.data.contiguous()
    return original()


def _check_model(engine: DeepSpeedEngine) -> None:
    """Refuse what one rank can see to be wrong with the model.

    Raises:
        ConfigError: its gradients go to another engine, or it has experts and is cut over ranks otherwise, too.
    """
    model = engine.module
    is_cut = engine.mpu is not None and not sequence_parallel.is_ulysses(engine.mpu)
    if (is_cut or engine.sequence_parallel_size > 1) and any(isinstance(module, MoE) for module in model.modules()):
        raise ConfigError("deepspeed.moe layers together with model or sequence parallelism are not supported by this "
                          "optimizer: it knows no order of experts for that")
    if taken := [name for name, param in model.named_parameters() if param in owners]:
        raise ConfigError(f"{taken[0]} belongs to another engine, whose hooks would take its gradients; call destroy() "
                          "on that engine first")


def _configure_basic_optimizer(original: Callable[[Any], Any], engine: DeepSpeedEngine, model_parameters: Any) -> Any:
    if not _uses_us(engine):
        return original(model_parameters)
    with _alike():
        return LayerwiseOptimizer(model_parameters, _sections(engine)[0])


def _do_optimizer_sanity_check(original: Callable[[Any], Any], engine: DeepSpeedEngine, basic_optimizer: Any) -> Any:
    if isinstance(basic_optimizer, LayerwiseOptimizer):
        return "zero_optimization"
    return original(basic_optimizer)


def _configure_zero_optimizer(original: Callable[[Any], Any], engine: DeepSpeedEngine, optimizer: Any) -> Any:
    if not isinstance(optimizer, LayerwiseOptimizer):
        return original(optimizer)
    optimizer.restore_groups()
    settings, layerwise = _settings(engine), _sections(engine)[1]
    if settings.tensor_group is not None and layerwise.save_universal:
        raise ConfigError("layerwise.save_universal is true, and tensor parallelism has cut the model into "
                          f"{engine.mp_world_size} parts, which the universal format would have whole; remove it")
    built = LayerWiseZeroOptimizer(optimizer, engine.module, layerwise, settings, engine)
    # DeepSpeed's converter to universal checkpoints wants this in the model's file, which the engine copies it into. Of
    # a model that is cut it would say that nothing is.
    if not hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO) and settings.tensor_group is None:
        setattr(engine.module, UNIVERSAL_CHECKPOINT_INFO, {UNIVERSAL_CHECKPOINT_VERSION_KEY:
                                                           UNIVERSAL_CHECKPOINT_VERSION_VALUE})
    if pipeline.is_pipeline(engine.module):
        if built.rank == 0:
            print(f"stage {engine.mpu.get_stage_id()} of the pipeline: {built.describe()}", flush=True)
    elif dist.get_rank() == 0:
        # DeepSpeed's logger is silent below warnings by default, and this must not be missed.
        print(built.describe(), flush=True)
    return built


def _zero_grad(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    # Gradients do not stay on the parameters, where the original looks for them.
    if isinstance(engine.optimizer, LayerWiseZeroOptimizer):
        engine.optimizer.zero_grad()
    return original()


def _zero_use_cpu_optimizer(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    return False if _uses_us(engine) else original()


_ENGINE_WRAPS: dict[str, Callable[..., Any]] = {
    "_do_sanity_check": _do_sanity_check,
    "_broadcast_model": _broadcast_model,
    "_configure_basic_optimizer": _configure_basic_optimizer,
    "_do_optimizer_sanity_check": _do_optimizer_sanity_check,
    "_configure_zero_optimizer": _configure_zero_optimizer,
    "zero_grad": _zero_grad,
    "zero_use_cpu_optimizer": _zero_use_cpu_optimizer,
    **saving.WRAPS,
    **loading.WRAPS,
}
_WRAPS: dict[tuple[type, str], Callable[..., Any]] = {
    (ds_config_module.DeepSpeedConfig, "_configure_train_batch_size"): _configure_train_batch_size,
    **{(DeepSpeedEngine, name): wrap for name, wrap in _ENGINE_WRAPS.items()},
}


def _autotp_group(engine: DeepSpeedEngine) -> comm.Group | None:
    return engine.tensor_parallel_config().tensor_parallel.tp_group if engine.autotp_size() > 1 else None


def _settings(engine: DeepSpeedEngine) -> Settings:
    config = engine._config
    model_dtype, accumulation = engine.get_data_types()
    for key, dtype in (("communication_data_type", config.communication_data_type),
                       ("data_types.grad_accum_dtype", accumulation)):
        if dtype is not None and dtype not in DTYPES.values():
            raise ConfigError(f"{key} must be fp32, bf16 or fp16 with this optimizer, got {dtype}")
    autocast_dtype = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None
    compute_dtype = autocast_dtype or model_dtype
    loss_scale = engine.dynamic_loss_scale_args() if autocast_dtype is None else autocast.LOSS_SCALE
    # 0.18.9 has no such key and always computes the norm.
    compute_grad_norm = getattr(config.zero_config, "compute_grad_norm", True)
    # As DeepSpeed decides: in fp16 always, in bf16 where asked to, in fp32 where there is a norm to look at.
    check_overflow = (config.bfloat16_config.check_grad_overflow if engine.bfloat16_enabled()
                      else compute_dtype == torch.float16 or compute_grad_norm)
    group, mpu = engine.seq_data_parallel_group, None if sequence_parallel.is_ulysses(engine.mpu) else engine.mpu
    model_group = None if mpu is None else mpu.get_model_parallel_group()
    expert_groups = (engine.expert_data_parallel_group or {}) if engine.has_moe_layers else {}
    for made_by_deepspeed in (group, model_group, *expert_groups.values()):
        comm.take_over_timeout(made_by_deepspeed)
    offload = config.zero_config.offload_optimizer
    on_host = offload is not None and offload.device == "cpu"
    return Settings(
        stage=engine.zero_optimization_stage(),
        group=group,
        expert_groups=expert_groups,
        model_group=model_group,
        part=0 if mpu is None else mpu.get_model_parallel_rank(),
        tensor_group=None if pipeline.is_pipeline(engine.module) else tensor_group(
            mpu, autotp_group=_autotp_group(engine)),
        compute_dtype=compute_dtype,
        accumulation_dtype=None if config.grad_accum_dtype is None else accumulation,
        # With sequence parallelism the engine has put seq_parallel_communication_data_type here.
        wire_dtype=config.communication_data_type,
        autocast=autocast_dtype is not None,
        divide_by=sequence_parallel.num_sequences(engine) if engine.gradient_average else 1.0,
        bucket_numel=engine.zero_reduce_bucket_size(),
        overlap_comm=bool(engine.zero_overlap_comm()),
        clip_grad=engine.gradient_clipping(),
        check_overflow=check_overflow,
        compute_grad_norm=compute_grad_norm,
        dynamic_loss_scale=autocast_dtype is not None or engine.dynamic_loss_scale(),
        static_loss_scale=engine.loss_scale(),
        loss_scale_args=loss_scale,
        host_ratio=offload.ratio if on_host else 0.0,
        pin_memory=on_host and offload.pin_memory,
        timers=engine.timers if engine.wall_clock_breakdown() else NoopTimer(),
    )
