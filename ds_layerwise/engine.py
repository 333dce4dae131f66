"""The hook: how DeepSpeed's engine comes to build this backend, and how to undo it.

Note: what is wrapped, and why there
    ``_do_sanity_check`` is the first thing that an engine does with its config, so a mistake is found before memory
    is spent. ``_broadcast_model`` is the first collective on the model: ranks whose models differ must find out
    before it. ``_configure_basic_optimizer`` builds the optimizer that the config names; ``_do_optimizer_sanity_check``
    would pick another wrapper class for bf16 with float32 accumulation; ``_configure_zero_optimizer`` builds the
    wrapper. ``zero_use_cpu_optimizer`` would keep ``engine.offload_states`` from moving what ``offload_optimizer``
    left on the device. One function is no method: ``get_zero_config`` parses ``zero_optimization``, and would refuse a
    ratio below 1. :mod:`.saving` and :mod:`.loading` have more. Every wrap asks first whether the engine at
    hand uses this backend, and else calls the original.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import deepspeed.comm as dist
from deepspeed.checkpoint.constants import (UNIVERSAL_CHECKPOINT_INFO, UNIVERSAL_CHECKPOINT_VERSION_KEY,
                                            UNIVERSAL_CHECKPOINT_VERSION_VALUE)
from deepspeed.moe.layer import MoE
from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.runtime.zero.config import get_zero_config
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank
from deepspeed.utils.timer import NoopTimer

from ds_layerwise import comm, loading, pipeline, saving, sequence_parallel
from ds_layerwise.buffers import DTYPES
from ds_layerwise.config import OPTIMIZER_TYPES, LayerwiseConfig, OptimizerConfig, is_ours, refuse_unsupported
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.param_groups import LayerwiseOptimizer
from ds_layerwise.optimizers.registry import matrix_rule
from ds_layerwise.zero_optimizer import LayerWiseZeroOptimizer, Settings, owners

_originals: dict[str, Callable[..., Any]] = {}


def register() -> None:
    """Make ``"type": "LayerWiseMuon"`` and ``"LayerWise"`` known to DeepSpeed. A second call does nothing.

    Call it in every process before ``deepspeed.initialize``. :func:`unregister` undoes it.
    """
    if _originals:
        return
    ds_config_module.DEEPSPEED_OPTIMIZERS.extend(OPTIMIZER_TYPES)
    zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(LayerwiseOptimizer)
    for name, wrap in _WRAPS.items():
        original = getattr(DeepSpeedEngine, name)
        _originals[name] = original
        setattr(DeepSpeedEngine, name, _wrapped(original, wrap))
    ds_config_module.get_zero_config = _get_zero_config


def unregister() -> None:
    """Leave DeepSpeed as it was before :func:`register`. Engines that exist already keep working.

    Raises:
        ConfigError: somebody else has wrapped the engine since; undo that first.
    """
    if not _originals:
        return
    for name in _originals:
        if not hasattr(getattr(DeepSpeedEngine, name), "_ds_layerwise"):
            raise ConfigError(f"DeepSpeedEngine.{name} was replaced after ds_layerwise.register(); undo that first")
    if ds_config_module.get_zero_config is not _get_zero_config:
        raise ConfigError("deepspeed.runtime.config.get_zero_config was replaced after ds_layerwise.register(); undo "
                          "that first")
    for name, original in _originals.items():
        setattr(DeepSpeedEngine, name, original)
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
    def method(engine: DeepSpeedEngine, *args: Any, **kwargs: Any) -> Any:
        return wrap(functools.partial(original, engine), engine, *args, **kwargs)

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


def _do_sanity_check(original: Callable[[], Any], engine: DeepSpeedEngine) -> Any:
    given = engine._config._param_dict
    if not _uses_us(engine):
        if "layerwise" in given:
            raise ConfigError(f"the layerwise section needs optimizer.type 'LayerWiseMuon' or 'LayerWise', got "
                              f"{engine._config.optimizer_name!r}; change it, or remove the section")
        return original()
    matrix_rule(_sections(engine)[0])
    refuse_unsupported(given)
    _refuse_what_is_not_read(engine._config, given)
    if engine.client_optimizer is not None:
        raise ConfigError("the optimizer is given twice: deepspeed.initialize(optimizer=...) and optimizer.type "
                          f"{given['optimizer']['type']!r} in the config; remove one")
    if engine.mpu is None and engine.mesh_device is not None:
        engine.mpu = sequence_parallel.MeshGroups(engine.mesh_device)
    if not isinstance(engine.mpu, PipelineParallelGrid | None) and not sequence_parallel.is_ulysses(engine.mpu):
        raise ConfigError("model parallelism (mpu) is not supported by this optimizer: a slice of a matrix cannot be "
                          "orthogonalised as a whole")
    return original()


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
        if not dist.is_initialized():
            _check_model(engine)
        else:
            with comm.Alike(None):
                sequence_parallel.check(engine)
                _check_model(engine)
                if pipeline.is_pipeline(engine.module):
                    pipeline.check(engine, engine.module, _sections(engine)[1])
            described = [f"{name} {tuple(param.shape)} {param.dtype}{'' if param.requires_grad else ' (frozen)'}"
                         for name, param in engine.module.named_parameters()]
            with comm.Alike(None):
                comm.check_alike("the model", comm.digest_of(described), described,
                                 group=engine.seq_data_parallel_group)
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
    if any(isinstance(module, MoE) for module in model.modules()) and (
            engine.mpu is not None or engine.sequence_parallel_size > 1):
        raise ConfigError("deepspeed.moe layers together with model or sequence parallelism are not supported by this "
                          "optimizer: it knows no order of experts for that")
    if taken := [name for name, param in model.named_parameters() if param in owners]:
        raise ConfigError(f"{taken[0]} belongs to another engine, whose hooks would take its gradients; call destroy() "
                          "on that engine first")


def _configure_basic_optimizer(original: Callable[[Any], Any], engine: DeepSpeedEngine, model_parameters: Any) -> Any:
    if not _uses_us(engine):
        return original(model_parameters)
    return LayerwiseOptimizer(model_parameters, _sections(engine)[0])


def _do_optimizer_sanity_check(original: Callable[[Any], Any], engine: DeepSpeedEngine, basic_optimizer: Any) -> Any:
    if isinstance(basic_optimizer, LayerwiseOptimizer):
        return "zero_optimization"
    return original(basic_optimizer)


def _configure_zero_optimizer(original: Callable[[Any], Any], engine: DeepSpeedEngine, optimizer: Any) -> Any:
    if not isinstance(optimizer, LayerwiseOptimizer):
        return original(optimizer)
    built = LayerWiseZeroOptimizer(optimizer, engine.module, _sections(engine)[1], _settings(engine), engine)
    # DeepSpeed's converter to universal checkpoints wants this in the model's file, which the engine copies it into.
    if not hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO):
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


_WRAPS: dict[str, Callable[..., Any]] = {
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


def _settings(engine: DeepSpeedEngine) -> Settings:
    config = engine._config
    model_dtype, accumulation = engine.get_data_types()
    for key, dtype in (("communication_data_type", config.communication_data_type),
                       ("data_types.grad_accum_dtype", accumulation)):
        if dtype is not None and dtype not in DTYPES.values():
            raise ConfigError(f"{key} must be fp32, bf16 or fp16 with this optimizer, got {dtype}")
    check_overflow = engine.fp16_enabled() or (engine.bfloat16_enabled() and config.bfloat16_config.check_grad_overflow)
    group, mpu = engine.seq_data_parallel_group, None if sequence_parallel.is_ulysses(engine.mpu) else engine.mpu
    offload = config.zero_config.offload_optimizer
    on_host = offload is not None and offload.device == "cpu"
    return Settings(
        stage=engine.zero_optimization_stage(),
        group=group,
        expert_groups=(engine.expert_data_parallel_group or {}) if engine.has_moe_layers else {},
        model_group=None if mpu is None else mpu.get_model_parallel_group(),
        part=0 if mpu is None else mpu.get_model_parallel_rank(),
        tensor_rank=bwc_tensor_model_parallel_rank(mpu),
        model_dtype=model_dtype,
        accumulation_dtype=None if config.grad_accum_dtype is None else accumulation,
        # With sequence parallelism the engine has put seq_parallel_communication_data_type here.
        wire_dtype=config.communication_data_type,
        divide_by=sequence_parallel.num_sequences(engine) if engine.gradient_average else 1.0,
        bucket_numel=engine.zero_reduce_bucket_size(),
        overlap_comm=bool(engine.zero_overlap_comm()),
        clip_grad=engine.gradient_clipping(),
        check_overflow=check_overflow,
        # 0.18.9 has no such key and always computes the norm.
        compute_grad_norm=getattr(config.zero_config, "compute_grad_norm", True),
        dynamic_loss_scale=engine.dynamic_loss_scale(),
        static_loss_scale=engine.loss_scale(),
        loss_scale_args=engine.dynamic_loss_scale_args(),
        host_ratio=offload.ratio if on_host else 0.0,
        pin_memory=on_host and offload.pin_memory,
        timers=engine.timers if engine.wall_clock_breakdown() else NoopTimer(),
    )
