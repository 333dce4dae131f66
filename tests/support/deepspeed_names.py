"""Names of DeepSpeed that the package imports or reads, or that DeepSpeed's code asks an optimizer for.

An attribute that only instances have is found in the code that sets it, so no instance has to be made.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, Literal

from ds_layerwise.engine.contract.contract import difference
from tests.support import lookup
from tests.support.lookup import bases_of

_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_CONFIG = "deepspeed.runtime.config.DeepSpeedConfig"
_BASE = "deepspeed.runtime.base_optimizer"
_PIPE = "deepspeed.runtime.pipe"
_TIMERS = "deepspeed.utils.timer"
_ACCELERATOR = "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator"


@dataclass(frozen=True)
class Used:
    """A name of DeepSpeed that this package needs as it is."""

    path: str
    """Module, class and name. The attribute of a class may be one that only its instances have."""

    kind: Literal["imported", "read", "asked"]
    """``imported``: an import statement names it. ``read``: it is got from, called on or set on an imported name, or an
    object of DeepSpeed. ``asked``: code of the owner asks an optimizer or a parameter for it, and this package provides
    it."""

    parameters: tuple[str, ...] | None = None
    """Arguments of the calls here. The name may take more, with defaults. None: it is not called, or does not tell what
    it takes."""

    since: str | None = None
    """The first release that must have the name."""
    until: str | None = None
    """The first release that must no longer have it."""

    @property
    def key(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def is_in(self, release: str) -> bool:
        """Return whether ``release`` must have the name."""
        return not (self.since and _number(release) < _number(self.since)
                    or self.until and _number(release) >= _number(self.until))

    def problem(self) -> str | None:
        path = self.path
        try:
            if self.kind == "imported":
                return self._changed(lookup.find(path))
            owner, name = lookup.owner_of(path)
        except lookup.Absent as absent:
            return str(absent) if absent.part == path else f"{path} is not there, as {absent}"
        if self.kind == "asked":
            return None if is_asked_for(owner, name) else f"{path} is not asked for"
        if not is_attribute(owner, name):
            return f"{path} is not there"
        return self._changed(getattr(owner, name, None))

    def _changed(self, value: Any) -> str | None:
        changed = None if self.parameters is None else difference(value, self.parameters)
        return changed and f"{self.path} {changed}"


def _number(release: str) -> tuple[int, ...]:
    """Return ``release`` as numbers, without the suffix of a build or a pre-release."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def missing(release: str) -> list[str]:
    """List, in words, the names of :data:`USED` that the installed DeepSpeed, taken for ``release``, lacks or has
    changed."""
    # The code may have been changed since the last call.
    codes_of.cache_clear()
    return [problem for name in USED if name.is_in(release) and (problem := name.problem())]


def is_attribute(owner: Any, name: str) -> bool:
    """Return whether ``owner`` defines ``name``, or its instances have it, as a field or because its code sets it."""
    if lookup.defines(owner, name) or not isinstance(owner, type):
        return lookup.defines(owner, name)
    fields = {**getattr(owner, "model_fields", {}), **getattr(owner, "__dataclass_fields__", {})}
    return name in fields or any(_sets(code, name) for code in codes_of(owner))


def is_asked_for(owner: Any, name: str) -> bool:
    """Return whether code of ``owner``, a class or a module, asks an object for its attribute ``name``."""
    return any(name in (*code.co_names, *code.co_consts) for code in codes_of(owner))


def _sets(code: CodeType, name: str) -> bool:
    return (name in code.co_names or name in code.co_consts) and name in _all_set(code)


@functools.cache
def _all_set(code: CodeType) -> frozenset[str]:
    """Return the names of the attributes that ``code`` sets."""
    steps = [(step.opname, step.argval) for step in dis.get_instructions(code)]
    # torch keeps modules out of the list of submodules by self.__dict__["name"] = ...
    return frozenset({name for operation, name in steps if operation == "STORE_ATTR"} | {
        name for before, (operation, name), after in zip(steps, steps[1:], steps[2:])
        if before == ("LOAD_ATTR", "__dict__") and operation == "LOAD_CONST" and after[0] == "STORE_SUBSCR"})


@functools.cache
def codes_of(owner: Hashable) -> tuple[CodeType, ...]:
    """Return all code of a module, or of a class and the classes of its package that it derives from."""
    if isinstance(owner, ModuleType):
        members = [value for value in vars(owner).values() if getattr(value, "__module__", None) == owner.__name__]
    elif isinstance(owner, type):
        members = [value for base in bases_of(owner) for value in vars(base).values()]
    else:
        members = []
    return tuple(nested for value in members for function in _functions(value) for nested in _nested(function.__code__))


def _functions(member: Any) -> Iterator[FunctionType]:
    members = (member.fget, member.fset) if isinstance(member, property) else (getattr(member, "__func__", member),)
    for each in members:
        function = inspect.unwrap(each) if callable(each) else None
        if isinstance(function, FunctionType):
            yield function
            # A decorator may keep the function that it wraps in its closure alone.
            for cell in function.__closure__ or ():
                if isinstance(inner := _content(cell), FunctionType):
                    yield from _functions(inner)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # A cell is empty while the function that it belongs to is being defined.
        return None


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _used(owner: str, kind: Literal["imported", "read", "asked"], names: str,
          parameters: tuple[str, ...] | None = None, *, since: str | None = None) -> tuple[Used, ...]:
    """Return names of ``owner`` that differ in nothing else."""
    return tuple(Used(f"{owner}.{name}", kind, parameters, since=since) for name in names.split())


IMPORTED = (
    Used("deepspeed.comm", "imported"),
    Used("deepspeed.accelerator.get_accelerator", "imported", ()),
    *_used("deepspeed.checkpoint.constants", "imported", """
        AUTOEP_LAYERS_KEY BASE_OPTIMIZER_STATE CAT_DIM CLIP_GRAD DS_VERSION FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES
        GROUP_PADDINGS PARAM_N_SUB_PARAMS
        LOSS_SCALER OPTIMIZER_STATE_DICT PARAM PARAM_GROUPS PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT
        SINGLE_PARTITION_OF_FP32_GROUPS TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO
        UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE ZERO_STAGE"""),
    Used("deepspeed.git_version_info.version", "imported"),
    Used("deepspeed.module_inject.auto_ep", "imported"),
    Used("deepspeed.module_inject.auto_ep.AutoEP", "read", ("model", "config")),
    Used("deepspeed.module_inject.auto_ep.AutoEP.ep_parser", "read", ("self",)),
    Used("deepspeed.module_inject.auto_ep.AutoEP._replace_moe_layer_without_retarget", "read",
         ("self", "spec", "ep_size", "ep_rank")),
    Used("deepspeed.module_inject.auto_ep_config", "imported"),
    Used("deepspeed.module_inject.auto_ep_config.parse_autoep_config", "read"),
    Used("deepspeed.module_inject.auto_ep_config.validate_autoep_post_detection", "read"),
    Used("deepspeed.module_inject.tp_plan_converter.TPPlanConverter", "imported"),
    Used("deepspeed.module_inject.tp_plan_converter.TPPlanConverter.convert", "read", ("hf_tp_plan",)),
    Used("deepspeed.moe.ep_tp_dispatch", "imported"),
    Used("deepspeed.moe.utils.is_moe_param", "imported", ("param",)),
    *_used("deepspeed.runtime", "imported", "config lr_schedules"),
    Used("deepspeed.runtime.config_utils.dict_raise_error_on_duplicate_keys", "imported", ("ordered_pairs",)),
    Used(f"{_BASE}.ZeROOptimizer", "imported"),
    Used(_ENGINE, "imported"),
    Used("deepspeed.runtime.fp16.loss_scaler.CreateLossScaler", "imported", (
        "dtype", "static_loss_scale", "dynamic_scaling", "dynamic_loss_args")),
    *_used("deepspeed.runtime.fp16.loss_scaler", "imported", "DynamicLossScaler LossScaler"),
    Used(f"{_PIPE}.engine.PipelineEngine", "imported"),
    *_used(f"{_PIPE}.module", "imported", "PipelineModule TiedLayerSpec"),
    Used(f"{_PIPE}.topology.PipelineParallelGrid", "imported"),
    Used("deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME", "imported"),
    Used("deepspeed.runtime.torch_autocast.get_comm_dtype", "imported", ("param",)),
    Used("deepspeed.runtime.tensor_parallel.config._get_hf_tp_plan", "imported", ("model",)),
    Used("deepspeed.runtime.utils.partition_balanced", "imported", ("weights", "num_parts")),
    Used("deepspeed.runtime.zero.config.ZeroStageEnum", "imported"),
    Used("deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum", "imported"),
    Used("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload", "imported"),
    *_used("deepspeed.utils", "imported", "groups logger"),
    *_used("deepspeed.utils.bwc", "imported", """
        bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_group bwc_tensor_model_parallel_world_size""",
           ("mpu",)),
    Used("deepspeed.utils.tensor_fragment.fragment_address", "imported", ("numel", "start")),
    Used(f"{_TIMERS}.NoopTimer", "imported", ()),
    Used("deepspeed.utils.torch.register_grad_hook", "imported", ("param", "hook")),
)

READ = (
    *_used("deepspeed", "read", "__version__ initialize"),
    # Functions that send something do not tell what they take.
    *_used("deepspeed.comm", "read", "all_gather_into_tensor all_reduce all_to_all_single broadcast recv "
             "reduce_scatter_tensor send"),
    *_used("deepspeed.comm", "read", "get_rank get_world_size", ("group",)),
    Used("deepspeed.comm.ReduceOp", "read"),
    *_used("deepspeed.comm", "read", "init_distributed is_initialized", ()),
    Used("deepspeed.utils.groups._clone_world_group", "read", ()),
    Used("deepspeed.utils.groups._create_zero_param_parallel_group", "read", ("group_size",)),
    Used("deepspeed.utils.groups._get_zero_param_intra_parallel_group", "read", ()),
    Used("deepspeed.utils.groups._get_model_parallel_world_size", "read", ()),
    Used("deepspeed.utils.groups._get_sequence_parallel_group", "read", ()),
    *_used("deepspeed.runtime.lr_schedules", "read", "WarmupLR WarmupDecayLR OneCycle LRRangeTest"),
    Used(_CONFIG, "read"),
    Used("deepspeed.runtime.config.DeepSpeedConfigError", "read"),
    *_used(_CONFIG, "read", """
        _param_dict bfloat16_config communication_data_type grad_accum_dtype gradient_accumulation_steps
        load_universal_checkpoint optimizer_name train_micro_batch_size_per_gpu world_size zero_config"""),
    *_used(_CONFIG, "read", "buffer_dtype param_dtype"),
    Used(f"{_CONFIG}.managed_gradient_accumulation", "read"),
    Used(f"{_CONFIG}.gradient_allreduce_op", "read", since="0.19.6"),
    Used(f"{_CONFIG}.keep_in_fp32_modules", "read", since="0.19.8"),
    Used("deepspeed.runtime.precision_config.DeepSpeedBF16Config.check_grad_overflow", "read"),
    Used("deepspeed.runtime.zero.config.DeepSpeedZeroConfig.offload_optimizer", "read"),
    Used("deepspeed.runtime.zero.config.DeepSpeedZeroConfig.compute_grad_norm", "read", since="0.19.7"),
    *_used("deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", "read",
            "device pin_memory ratio"),
    Used("deepspeed.runtime.tensor_parallel.config.TPTrainingConfig.tensor_parallel", "read"),
    Used("deepspeed.runtime.tensor_parallel.config.TPConfig.tp_group", "read"),
    *_used(_ENGINE, "read", """
        _config _running_engine_backward basic_optimizer checkpoint_engine client_lr_scheduler client_optimizer
        enable_backward_allreduce engine_timers expert_data_parallel_group global_rank global_samples global_steps
        gradient_average has_moe_layers inside_no_sync_ctxt local_rank lr_scheduler mesh_device micro_steps module
        module_forward_post_hook module_forward_pre_hook monitor mp_world_size mpu num_experts optimizer
        save_non_zero_checkpoint save_zero_checkpoint seq_data_parallel_group sequence_parallel_size skipped_steps
        timers"""),
    Used(f"{_ENGINE}.checkpoint_mp_rank", "read", since="0.19.6"),
    Used("deepspeed.monitor.monitor.MonitorMaster.enabled", "read"),
    Used("deepspeed.monitor.monitor.MonitorMaster.write_events", "read", ("self", "event_list")),
    *_used(_ENGINE, "read", """
        autotp_size bfloat16_enabled dynamic_loss_scale dynamic_loss_scale_args get_data_types
        gradient_accumulation_steps gradient_clipping is_gradient_accumulation_boundary load_universal_checkpoint
        loss_scale tensor_parallel_config torch_autocast_dtype use_node_local_storage
        wall_clock_breakdown zero_ignore_unused_parameters zero_load_from_fp32_weights
        zero_optimization_partition_gradients zero_optimization_partition_weights
        zero_overlap_comm""", ("self",)),
    Used(f"{_ENGINE}._get_shared_params", "read", ("self",)),
    Used(f"{_ENGINE}.module_state_dict", "read"),
    Used(f"{_ENGINE}._get_param_fragment_func", "read", ("self", "param")),
    *_used("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload", "read", """
        destroy partition_all_parameters""", ("self",)),
    Used("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.release_backward_leftovers", "read", ("self",)),
    Used("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload.persistent_parameters", "read"),
    Used("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._DeepSpeedZeRoOffload__allgather_stream",
         "read"),
    *_used("deepspeed.runtime.zero.partition_parameters.Init", "read", """
        all_gather all_gather_coalesced ds_id ds_numel ds_process_group ds_shape ds_tensor ds_zero_param_process_group
        partition"""),
    Used(f"{_ENGINE}.backward", "read", ("self", "loss")),
    Used(f"{_ENGINE}._backward_prologue_per_tensor", "read", ("self", "grad")),
    Used(f"{_ENGINE}._is_gradient_accumulation_boundary", "read"),
    Used(f"{_ENGINE}.step", "read", ("self", "lr_kwargs")),
    Used(f"{_ENGINE}._get_ckpt_name", "read", ("self", "checkpoints_path", "tag")),
    Used(f"{_ENGINE}._get_zero_ckpt_name", "read", ("self", "checkpoints_path", "tag")),
    *_used(_ENGINE, "read", "_running_engine_step _unmanaged_backward_count"),
    Used(f"{_ENGINE}.managed_gradient_accumulation", "read", ("self",)),
    Used("deepspeed.runtime.engine.EngineTimers.step_timers", "read"),
    *_used(f"{_BASE}.ZeROOptimizer", "read", """
        _backward_active_depth _backward_hook_state _hooks_fired_this_backward"""),
    *_used(f"{_BASE}.ZeROOptimizer", "read", """
        backward_epilogue clear_backward_seen_flag enter_backward exit_backward queue_post_backward_callback
        reenter_backward_if_needed""", ("self",)),
    Used(f"{_BASE}.ZeROOptimizer.update_hook_state_and_maybe_run_epilogue", "read", (
        "self", "current_expected_count")),
    *_used(f"{_BASE}.BackwardHookStateManager", "read", """
        backward_active_depth hooks_fired_this_backward post_backward_callback_queued"""),
    *_used("deepspeed.runtime.fp16.loss_scaler.LossScalerBase", "read", "dynamic loss_scale"),
    Used("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.is_decoupled", "read", ("self",)),
    *_used("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine", "read", "cleanup get_commit_info",
           ("self",)),
    Used("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.commit", "read", ("self", "info")),
    Used("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.makedirs", "read", (
        "self", "path", "exist_ok")),
    Used("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.save", "read", (
        "self", "state_dict", "path")),
    Used("deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine.FastCheckpointEngine._writer", "read"),
    Used("deepspeed.runtime.model_checkpointing.writer_factory.CheckpointWriterFactory._writer", "read"),
    *_used(f"{_PIPE}.module.PipelineModule", "read", """
        _layer_specs _local_start _num_layers forward_funcs tied_modules tied_weight_attrs"""),
    Used(f"{_PIPE}.module.PipelineModule._recursive_getattr", "read", ("module", "attr_name")),
    Used(f"{_PIPE}.module.PipelineModule.ckpt_layer_path_list", "read", ("self", "ckpt_dir", "local_layer_idx")),
    Used(f"{_PIPE}.module.PipelineModule.load_state_dir", "read", ("self", "load_dir", "checkpoint_engine", "strict")),
    Used(f"{_PIPE}.module.PipelineModule._synchronize_tied_weights", "read", ("self",)),
    Used(f"{_PIPE}.module.PipelineModule.get_tied_weights_and_groups", "read", ("self",)),
    Used(f"{_PIPE}.module.PipelineModule.ds_pipe_replicated", "read"),
    *_used(f"{_PIPE}.topology.PipelineParallelGrid", "read", """
        get_model_parallel_group get_model_parallel_rank get_pipe_parallel_group get_slice_parallel_rank
        get_slice_parallel_world_size get_stage_id""", ("self",)),
    Used("deepspeed.moe.experts.Experts.group_name", "read"),
    Used("deepspeed.utils.groups._get_expert_model_parallel_world_size", "read", ()),
    Used("deepspeed.utils.groups._get_expert_parallel_world_size", "read", ("group_name",)),
    Used("deepspeed.moe.ep_experts.GroupedExperts.is_expert_group", "read"),
    Used("deepspeed.runtime.engine.DeepSpeedEngine._autoep_folding_spec", "read"),
    *_used(f"{_TIMERS}.SynchronizedWallClockTimer.Timer", "read", "reset start stop", ("self",)),
    Used(f"{_ACCELERATOR}.Stream", "read"),
    *_used(_ACCELERATOR, "read", "current_stream empty_cache is_synchronized_device "
             "supported_dtypes synchronize", ("self",)),
    Used(f"{_ACCELERATOR}.is_fp64_supported", "read", ("self",), since="0.19.6"),
    Used(f"{_ACCELERATOR}.pin_empty", "read", ("self", "dtype"), since="0.19.7"),
    Used(f"{_ACCELERATOR}.pin_memory", "read", ("self", "tensor")),
    Used(f"{_ACCELERATOR}.set_device", "read", ("self", "device_index")),
    Used(f"{_ACCELERATOR}.stream", "read", ("self", "stream")),
)

#: Where an optimizer lacks one of these, the engine may take it as not asked for: no other test would notice.
ASKED = (
    *_used(_ENGINE, "asked", """
        _global_grad_norm _restore_from_bit16_weights bit16_groups checkpoint_event_epilogue checkpoint_event_prologue
        clear_backward_seen_flag cur_scale dp_process_group enter_backward exit_backward offload_states overflow
        overlapping_partition_gradients_reduce_epilogue param_groups reduce_gradients refresh_fp32_params reload_states
        round_robin_bit16_groups update_lp_params"""),
    *_used(_ENGINE, "asked", """
        _coalesce_grad_reduction get_gradient_for_reduction reduce_ready_partitions_and_remove_grads setup_buckets"""),
    Used(f"{_ENGINE}.finalize_gradient_accumulation_boundary", "asked"),
    *_used(_ENGINE, "asked", "empty_partition_cache fp16_groups"),
    Used(f"{_ENGINE}.independent_gradient_partition_epilogue", "asked"),
    *_used("deepspeed.utils.tensor_fragment", "asked", """
        _z3_optimizer get_fp32_grad_for_param get_local_fp32_grad_for_param get_local_fp32_param
        set_fp32_grad_for_param set_local_grad_for_param set_local_hp_param update_fp32_grad_for_param_vectorized"""),
    *_used("deepspeed.utils.tensor_fragment", "asked", """
        _hp_mapping get_full_hp_grad get_full_hp_param set_full_hp_grad set_full_hp_param"""),
    Used("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.ds_grad_is_ready", "asked"),
)

USED: tuple[Used, ...] = (*IMPORTED, *READ, *ASKED)
