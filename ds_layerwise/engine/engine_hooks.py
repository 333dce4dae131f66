"""Hooks that make DeepSpeed's engine build this backend.

Note: what is wrapped, and why there
    * ``_configure_with_arguments`` tells the engine its local rank.
    * ``_do_sanity_check`` is the first use of an engine's config, so a mistake is found before
      memory is allocated; :mod:`.config_hook` runs even before.
    * ``_configure_expert_parallel`` replaces the layers of experts of a model; its errors are
      about a config, or a release of transformers.
    * ``_broadcast_model`` is the first collective on the model: ranks whose models differ must find
      out before it.
    * ``_configure_basic_optimizer`` builds the optimizer that the config names.
    * ``_do_optimizer_sanity_check`` would choose another wrapper class for bf16 with float32
      accumulation.
    * ``_configure_zero_optimizer`` builds the wrapper.
    * ``zero_use_cpu_optimizer`` would keep ``engine.offload_states`` from moving the tensors that
      ``offload_optimizer`` left on the device.
    * ``_scheduler_from_config`` passes the engine's wrapper to the scheduler that the config names.
      DeepSpeed's schedulers find their optimizer in it, but torch's accept only a
      ``torch.optim.Optimizer``.
    * ``_configure_lr_scheduler`` is the first place in which a script's scheduler is present.

    The other modules of this folder wrap more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO
from deepspeed.git_version_info import version as deepspeed_version
from deepspeed.moe import ep_tp_dispatch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import logger
from deepspeed.utils.timer import NoopTimer
from torch import nn

from ds_layerwise.checkpoint.universal import told_the_converter
from ds_layerwise.config.ds_config import at, retell, tensor_and_other, what_ranks_share
from ds_layerwise.config.overrides import given_in_python
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import is_for_us
from ds_layerwise.engine import config_hook, inference_only, operator_build
from ds_layerwise.engine.checkpoints import exit_saves, loading, saving
from ds_layerwise.engine.contract import patches
from ds_layerwise.engine.contract.patches import Method, only_ours
from ds_layerwise.engine.shared_storage import refuse_shared_memory, viewable_as_bytes
from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError
from ds_layerwise.optimizers.registry import check_recipes
from ds_layerwise.output import announce
from ds_layerwise.parallel import pipeline, sequence
from ds_layerwise.parallel.tensor import check_mpu, refuse_groups_left, tensor_group
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import dtype_name
from ds_layerwise.ranks.sync.param_cuts import make_fetcher, refuse_unfetchable, whole_shapes
from ds_layerwise.zero.optimizer import LayerWiseZeroOptimizer, uses_us
from ds_layerwise.zero.setup import param_owner
from ds_layerwise.zero.setup.client_groups import (
    ClientOptimizer,
    must_be_optimizer,
    pointing_to_ours,
)
from ds_layerwise.zero.setup.loss_scaling import AUTOCAST_SCALE, LossScaling
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.run_settings import Settings

#: The configs of engines. Several hooks need one before the engine has an optimizer, which has it
#: from then on.
_runs: WeakKeyDictionary[DeepSpeedEngine, RunConfig] = WeakKeyDictionary()


def _is_for_us(engine: DeepSpeedEngine) -> bool:
    # If a client optimizer is given, the engine's own optimizer_name() is its class.
    return is_for_us(engine._config._param_dict)


def _run(engine: DeepSpeedEngine) -> RunConfig:
    """Return the engine's config as this backend reads it. It is read once."""
    if engine not in _runs:
        run = config_hook.run_of(engine._config, engine.client_optimizer)
        overrides = (*run.layerwise.overrides, *given_in_python())
        layerwise = run.layerwise.model_copy(update={"overrides": overrides})
        _runs[engine] = replace(run, layerwise=layerwise)
    return _runs[engine]


def _configure_with_arguments(
    original: Method, engine: DeepSpeedEngine, args: Any, mpu: Any
) -> None:
    """Choose the device that DeepSpeed will choose, before anything can use the default device that
    all processes start with.
    """
    original(args, mpu)
    device_rank = getattr(args, "device_rank", engine.local_rank)
    if device_rank >= 0:
        get_accelerator().set_device(device_rank)


def _do_sanity_check(original: Method, engine: DeepSpeedEngine) -> Any:
    config = engine._config
    if not _is_for_us(engine):
        config_hook.refuse_what_others_ignore(config, engine.client_optimizer)
        return original()
    if engine.mpu is None and engine.mesh_device is not None:
        engine.mpu = sequence.MeshGroups(engine.mesh_device)
    with comm.errors_on_all_ranks_if_started():
        _check_config(engine)
    if dist.is_initialized():
        described = what_ranks_share(config._param_dict)
        described.append(f"gradient_accumulation_steps = {config.gradient_accumulation_steps}")
        for i, override in enumerate(_run(engine).layerwise.overrides):
            if override.key is not None:
                described.append(f"{override.label(i)} = {override.changes()}")
        comm.same_on_all_ranks("the configuration", described, group=None)
    try:
        return original()
    except AssertionError as error:
        retell(error)


def _check_config(engine: DeepSpeedEngine) -> None:
    """Raise an error for mistakes in the config that one rank can see.

    Raises:
        ConfigError: names the key.
    """
    run = _run(engine)
    client = engine.client_optimizer
    mpu = engine.mpu
    if client is not None:
        if not callable(client):
            must_be_optimizer(client)
        default = type(run.layerwise)()
        for key in ("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_layernorm", "mup"):
            if getattr(run.layerwise, key) != getattr(default, key):
                raise ConfigError(
                    f"layerwise.{key} has no effect with an optimizer passed to initialize(), "
                    "whose groups decide this; remove it, and put those parameters into a group "
                    "of their own"
                )
    if mpu is None and engine.autotp_size() <= 1:
        refuse_groups_left()
    elif not isinstance(mpu, PipelineParallelGrid | None) and not sequence.is_ulysses(mpu):
        check_mpu(mpu, autotp_size=engine.autotp_size())
    elif mpu is not None and engine.autotp_size() > 1:
        raise tensor_and_other(engine.autotp_size())


def _configure_expert_parallel(
    original: Method, engine: DeepSpeedEngine, model: nn.Module, *args: Any, **options: Any
) -> Any:
    mpu = engine.mpu
    with comm.errors_on_all_ranks_if_started():
        if sequence.is_ulysses(mpu):
            engine.mpu = sequence.WithoutParts(mpu)
        try:
            return original(model, *args, **options)
        except FOREIGN_ERRORS as error:
            if "_CanRecordRegistry" in str(error):
                raise ConfigError(
                    f"expert_parallel.enabled is true, and AutoEP of DeepSpeed {deepspeed_version} "
                    "does not know the registry of outputs that transformers has since 5.23 "
                    f"({error}); install 'transformers<5.23'"
                ) from error
            retell(error)
        finally:
            engine.mpu = mpu


def _configure_distributed_model(original: Method, engine: DeepSpeedEngine, model: Any) -> Any:
    with comm.errors_on_all_ranks_if_started():
        # Before the engine casts or moves it.
        refuse_shared_memory(model)
    try:
        return original(model)
    except AssertionError as error:
        if not engine.has_moe_layers:
            raise
        raise ConfigError(
            f"DeepSpeed cannot make the groups of experts ({error}); give them an ep_size that "
            "divides the data-parallel ranks, which are those of one part of the model"
        ) from error


def _broadcast_model(original: Method, engine: DeepSpeedEngine) -> Any:
    model = engine.module
    is_stage = pipeline.is_pipeline(model)
    with comm.errors_on_all_ranks_if_started():
        _check_model(engine)
        sequence.check(engine)
        if is_stage:
            pipeline.check(engine, _run(engine))
    if dist.is_initialized():
        if is_stage:
            pipeline.check_experts(engine.has_moe_layers)
        described = []
        for name, param in model.named_parameters():
            notes = " (frozen)" * (not param.requires_grad)
            if param_owner.is_trained(param):
                notes += " (trained by another engine before)"
            described.append(f"{name} {tuple(param.shape)} {param.dtype}{notes}")
        group = engine.seq_data_parallel_group if is_stage or engine.mp_world_size > 1 else None
        with comm.errors_on_all_ranks():
            comm.same_on_all_ranks("the model", described, group=group)
    with viewable_as_bytes(model.parameters()):
        return original()


def _check_model(engine: DeepSpeedEngine) -> None:
    """Raise an error for problems of the model that one rank can see.

    Raises:
        ConfigError: the model has experts, and its checkpoints are on several disks.
    """
    if engine.has_moe_layers and engine.use_node_local_storage():
        raise ConfigError(
            "checkpoint.use_node_local_storage is not supported with experts (deepspeed.moe "
            "layers, or expert_parallel): a rank reads files of experts that ranks of other nodes "
            "have saved; remove it"
        )
    if at(engine._config._param_dict, "expert_parallel.enabled") and engine.global_rank == 0:
        announce(
            "expert_parallel: what save_pretrained() and a Trainer's save_model() write has the "
            "experts of one rank alone; `ds-layerwise consolidate` makes the model of a checkpoint"
        )


def _configure_basic_optimizer(_: Method, engine: DeepSpeedEngine, model_parameters: Any) -> Any:
    with comm.errors_on_all_ranks_if_started():
        section = engine._config._param_dict.get("scheduler")
        if engine.client_lr_scheduler:
            section = None
        return LayerWiseOptimizer(model_parameters, _run(engine).optimizer, scheduler=section)


def _configure_optimizer(
    original: Method, engine: DeepSpeedEngine, client_optimizer: Any, model_parameters: Any
) -> Any:
    if client_optimizer is None:
        # DeepSpeed would give experts groups of their own, as many as their size on one rank asks
        # for, so that a run with another ep_size has another number of them. Those of deepspeed.moe
        # stay split: checkpoints have as many groups.
        if at(engine._config._param_dict, "expert_parallel.enabled"):
            if not model_parameters or not isinstance(model_parameters[0], dict):
                model_parameters = [{"params": model_parameters}]
            model_parameters = [{"moe": False, **group} for group in model_parameters]
        return original(client_optimizer, model_parameters)
    with (
        comm.errors_on_all_ranks_if_started(),
        pointing_to_ours(client_optimizer),
        whole_shapes(engine.module.parameters()),
    ):
        ours = ClientOptimizer(
            client_optimizer,
            model_parameters,
            split=_run(engine).layerwise.client_optimizer.split,
        )
        check_recipes(ours.recipes_by_group)
    result = original(ours, model_parameters)
    # The calls that get this attribute next make schedulers.
    engine.basic_optimizer = ours.client
    return result


def _do_optimizer_sanity_check(original: Method, _: DeepSpeedEngine, basic_optimizer: Any) -> Any:
    if isinstance(basic_optimizer, LayerWiseOptimizer):
        return "zero_optimization"
    # Otherwise ours would take the gradients before the other optimizer sees them.
    for group in getattr(basic_optimizer, "param_groups", ()):
        param_owner.retire_owners(group["params"])
    return original(basic_optimizer)


def _configure_zero_optimizer(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    if not isinstance(optimizer, LayerWiseOptimizer):
        return original(optimizer)
    optimizer.restore_groups()
    settings = _settings(engine)
    if (
        engine._autoep_folding_spec
        and settings.lanes > 1
        and not hasattr(ep_tp_dispatch, "average_gradient_over_tp")
    ):
        raise ConfigError(
            f"expert_parallel beside tensor_parallel, and DeepSpeed {deepspeed_version} gives the "
            "tensor-parallel ranks different gradients of what is before a layer of experts; "
            "install DeepSpeed 0.19.8, or remove one of the two"
        )
    # With it, the engine would reduce gradients itself, and refuse checkpoints of other sizes.
    engine._autoep_folding_spec = None
    is_cut = settings.model_group is not None and comm.size_of(settings.model_group) > 1
    if settings.layerwise.verify_first_step and is_cut:
        raise ConfigError(
            "layerwise.verify_first_step is true, and tensor or pipeline parallelism has cut the "
            "model: what is compared is an update of whole parameters, which no rank has; remove "
            "it, or verify the same config with a model that is not cut"
        )
    _check_stage(engine, settings.stage)
    if settings.stage == 3:
        with viewable_as_bytes(engine.module.parameters()):
            fetcher = make_fetcher(original, engine, settings.group, settings.expert_groups)
        settings = replace(settings, fetcher=fetcher)
    with whole_shapes(engine.module.parameters()):
        built = LayerWiseZeroOptimizer(optimizer, engine.module, settings, engine)
    built.checkpointing.round_weights()
    # DeepSpeed's converter to universal checkpoints needs this in the model's file; the engine
    # copies it there. It says that nothing is cut, so a model that is cut must not have it.
    if not hasattr(engine.module, UNIVERSAL_CHECKPOINT_INFO) and settings.tensor_group is None:
        setattr(
            engine.module,
            UNIVERSAL_CHECKPOINT_INFO,
            told_the_converter(built.saved_shapes),
        )
    built.write_param_map()
    patches.engines.add(engine)
    exit_saves.end_at_exit()
    # Printed, because DeepSpeed's logger shows only warnings by default, and this must not be
    # missed.
    if pipeline.is_pipeline(engine.module):
        if built.rank == 0:
            announce(f"stage {engine.mpu.get_stage_id()} of the pipeline: {built.describe()}")
    elif dist.get_rank() == 0:
        announce(built.describe())
    return built


def _check_stage(engine: DeepSpeedEngine, stage: int) -> None:
    """Refuse what is cut as at stage 3 at another, and at stage 3 a model that is spread over ranks
    in another way as well, or that DeepSpeed cannot fetch.

    Raises:
        ConfigError: names the way out.
    """
    if stage != 3:
        for name, param in engine.module.named_parameters():
            if param.requires_grad and hasattr(param, "ds_id"):
                raise ConfigError(
                    f"{name} is cut over the ranks by deepspeed.zero.Init(), or by an engine of "
                    f"ZeRO stage 3 before this one, and zero_optimization.stage is {stage}; build "
                    "the model without zero.Init(), or set zero_optimization.stage to 3"
                )
        return
    refuse_unfetchable(engine.module)
    is_cut = sequence.cuts_params(engine.mpu) or pipeline.is_pipeline(engine.module)
    by_auto_ep = at(engine._config._param_dict, "expert_parallel.enabled")
    if is_cut or engine.has_moe_layers and not by_auto_ep:
        raise ConfigError(
            "zero_optimization.stage is 3, and experts of deepspeed.moe, pipelines or tensor "
            "parallelism spread the model over ranks as well, which this backend supports only at "
            "stages 1 and 2; set zero_optimization.stage to 2"
        )
    if by_auto_ep and engine.sequence_parallel_size > 1:
        raise ConfigError(
            "zero_optimization.stage is 3, and expert_parallel.enabled is true, together with "
            "sequence parallelism, which DeepSpeed supports only at stages 1 and 2; set "
            "zero_optimization.stage to 2"
        )


def _clip_grad_norm_(original: Method, parameters: Any, *args: Any, **options: Any) -> Any:
    if isinstance(parameters, torch.Tensor):
        given = [parameters]
    else:
        given = list(parameters)
    if any(param_owner.is_trained(param) and param.grad is None for param in given):
        comm.warn_once(
            "clip_grad_norm_() of the script has no effect: gradients are in the engine, not on "
            "the parameters; set gradient_clipping in the config, and get the norm from "
            "engine.get_global_grad_norm()"
        )
    return original(given, *args, **options)


def _zero_grad(original: Method, engine: DeepSpeedEngine) -> Any:
    """Drop the gradients of this step, reduced or not."""
    # The original looks for gradients on the parameters, but ours are not there.
    engine.optimizer.zero_grad()
    return original()


def _scheduler_from_config(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    kind = (engine._config._param_dict.get("scheduler") or {}).get("type")
    is_of_torch = kind is not None and not hasattr(lr_schedules, kind)
    # DeepSpeed's schedulers ask themselves for their rates when they are made.
    logger.addFilter(_asks_later)
    try:
        return original(engine.basic_optimizer if is_of_torch else optimizer)
    except FOREIGN_ERRORS as error:
        retell(error)
    finally:
        logger.removeFilter(_asks_later)


def _asks_later(record: Any) -> bool:
    """Tell whether a warning is about anything but rates before the first step."""
    return "scheduler before it has started" not in record.msg


def _configure_lr_scheduler(original: Method, engine: DeepSpeedEngine) -> None:
    """Let the engine make or take the scheduler, and refuse one that has no effect here.

    Raises:
        ConfigError: names its class and the way out.
    """
    with comm.errors_on_all_ranks():
        # A function of the script may fail on one rank alone.
        original()
        if not engine.client_lr_scheduler:
            return
        schedule = engine.lr_scheduler
        known = {id(group) for group in engine.optimizer.param_groups}
        moved = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
        if moved is not None and not any(id(group) in known for group in moved):
            kind = type(schedule).__name__
            raise ConfigError(
                f"lr_scheduler is a {kind} of another optimizer "
                f"({type(schedule.optimizer).__name__}), so that no rate of this engine would ever "
                f"move; give a function: lr_scheduler=lambda optimizer: {kind}(optimizer, ...)"
            )


#: The hooks that an engine of this backend needs after it was built. The keys, here and below, are
#: those of :mod:`.engine.contract.contract`.
FOR_LIFE = {
    **only_ours(uses_us, {"zero_grad": _zero_grad}),
    **only_ours(_is_for_us, {"zero_use_cpu_optimizer": lambda _, engine: False}),
    **saving.WRAPS,
    **loading.WRAPS,
}
WRAPS: dict[str, Method] = {
    **config_hook.WRAPS,
    "clip_grad_norm_": _clip_grad_norm_,
    "_do_sanity_check": _do_sanity_check,
    "_do_optimizer_sanity_check": _do_optimizer_sanity_check,
    "_configure_zero_optimizer": _configure_zero_optimizer,
    **only_ours(
        _is_for_us,
        {
            "_configure_with_arguments": _configure_with_arguments,
            "_configure_distributed_model": _configure_distributed_model,
            "_configure_expert_parallel": _configure_expert_parallel,
            "_broadcast_model": _broadcast_model,
            "_configure_optimizer": _configure_optimizer,
            "_configure_basic_optimizer": _configure_basic_optimizer,
        },
    ),
    **inference_only.WRAPS,
    **only_ours(
        uses_us,
        {
            "_scheduler_from_config": _scheduler_from_config,
            "_configure_lr_scheduler": _configure_lr_scheduler,
        },
    ),
    **operator_build.WRAPS,
    **FOR_LIFE,
}


def _settings(engine: DeepSpeedEngine) -> Settings:
    config = engine._config
    run = _run(engine)
    compute_dtype, _ = engine.get_data_types()
    if run.autocast:
        compute_dtype = engine.torch_autocast_dtype()
    # DeepSpeed before 0.19.7 has no such key and always computes the norm.
    compute_grad_norm = getattr(config.zero_config, "compute_grad_norm", True)
    # As in DeepSpeed: always in fp16, on request in bf16, and in fp32 if a norm is computed.
    check_overflow = compute_dtype == torch.float16 or compute_grad_norm
    if engine.bfloat16_enabled():
        check_overflow = bool(config.bfloat16_config.check_grad_overflow)
    loss_scale_args = AUTOCAST_SCALE if run.autocast else engine.dynamic_loss_scale_args()
    group = engine.seq_data_parallel_group
    model_group = stage_group = parts_group = None
    mp_rank = 0
    if sequence.cuts_params(engine.mpu):
        model_group = engine.mpu.get_model_parallel_group()
        mp_rank = engine.mpu.get_model_parallel_rank()
        parts_group = tensor_group(engine)
        if pipeline.is_pipeline(engine.module):
            stage_group = engine.mpu.get_pipe_parallel_group()
    expert_groups: dict[str, comm.Group] = {}
    if engine.has_moe_layers:
        expert_groups = engine.expert_data_parallel_group or {}
    for made_by_deepspeed in (group, model_group, stage_group, *expert_groups.values()):
        comm.take_over_timeout(made_by_deepspeed)
    offload = config.zero_config.offload_optimizer
    # With sequence parallelism, the engine has stored seq_parallel_communication_data_type here.
    wire = config.communication_data_type
    run = replace(run, wire_dtype=None if wire is None else dtype_name(wire))
    return Settings(
        **vars(run),
        group=group,
        expert_groups=expert_groups,
        model_group=model_group,
        stage_group=stage_group,
        mp_rank=mp_rank,
        tensor_group=parts_group,
        divide_by=sequence.num_sequences(engine) if engine.gradient_average else 1.0,
        check_overflow=check_overflow,
        compute_grad_norm=compute_grad_norm,
        scaling=LossScaling(
            CreateLossScaler(
                dtype=compute_dtype,
                static_loss_scale=engine.loss_scale(),
                dynamic_scaling=run.autocast or engine.dynamic_loss_scale(),
                dynamic_loss_args=loss_scale_args,
            )
        ),
        pin_memory=offload is not None and offload.pin_memory,
        timers=engine.timers if engine.wall_clock_breakdown() else NoopTimer(),
    )
