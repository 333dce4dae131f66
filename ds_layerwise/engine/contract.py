"""Every name of DeepSpeed that this package wraps, reads, imports or answers to, and in which releases it is what.

:func:`check` looks all of them up before anything is patched, so that a release that has changed one of them is refused
as a whole, by a list of all that it has changed.

Note: how to support the next release
    Run ``python -m tests.contract_releases FOLDER``, with a release that is installed in FOLDER, and change the entry
    of what it names. What has a new name gets it as its ``path``, and the old one goes into ``was`` with the first
    release that has it no more: the rest of the package goes on with the oldest name. What is new or gone gets
    ``since`` or ``until``, and a place in the package that does without. More than an entry is needed for an import
    from a module that is gone, for what the engine asks for by a new name, and for a new meaning.

Releases in ``since``, ``until`` and ``was`` are those of the change: since this one, no more from this one on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import deepspeed

from ds_layerwise.engine import lookup
from ds_layerwise.errors import ConfigError

#: What setup.cfg asks for: the first release that is supported, the newest that was tested, the first that is not.
OLDEST, NEWEST, BELOW = "0.18.9", "0.19.8", "0.20"

Kind = Literal["wrapped", "extended", "imported", "read", "asked"]


@dataclass(frozen=True, slots=True)
class Name:
    """One name of DeepSpeed."""

    path: str
    """Module, class and name, as in the newest release. A class's attribute may be one that only its instances have."""

    kind: Kind
    """``wrapped``: what is registered goes around it. ``extended``: a list that is added to. ``imported``: by an import
    statement. ``read``: got from, called on or set on what was imported, or an object of DeepSpeed. ``asked``: code of
    the owner asks an optimizer, or a parameter, for it, and finds it here."""

    parameters: tuple[str, ...] | None = None
    """What the name is called with here, or by DeepSpeed where it is wrapped; ``self``, too. It may take more, by
    default. None: it is not called, or does not say what it takes."""

    since: str | None = None
    until: str | None = None
    was: tuple[tuple[str, str], ...] = ()
    """Earlier paths, oldest first, each with the first release that has another."""

    @property
    def known_as(self) -> str:
        """The path by which this package knows it, whatever DeepSpeed calls it: the oldest."""
        return self.was[0][0] if self.was else self.path

    @property
    def key(self) -> str:
        """The last part of that."""
        return self.known_as.rpartition(".")[2]

    def is_in(self, release: str) -> bool:
        """Whether ``release`` is to have it."""
        return not (self.since and _number(release) < _number(self.since)
                    or self.until and _number(release) >= _number(self.until))

    def path_in(self, release: str) -> str:
        """The path of the name in ``release``."""
        return next((path for path, before in self.was if _number(release) < _number(before)), self.path)

    def problem(self, release: str) -> str | None:
        """What is wrong with it in the installed DeepSpeed, taken for ``release``; None if it is as expected."""
        path = self.path_in(release)
        try:
            if self.kind == "imported":
                found: Any = lookup.find(path)
            else:
                owner, name = lookup.owner_of(path)
                if self.kind == "asked":
                    return None if lookup.is_asked_for(owner, name) else f"{path} is not asked for"
                if not (lookup.is_attribute(owner, name) if self.kind == "read" else lookup.defines(owner, name)):
                    return f"{path} is not there"
                found = getattr(owner, name, None)
        except lookup.Absent as absent:
            return str(absent) if absent.part == path else f"{path} is not there, as {absent}"
        if self.kind == "extended" and not isinstance(found, list):
            return f"{path} is no list"
        changed = None if self.parameters is None else lookup.difference(found, self.parameters)
        return changed and f"{path} {changed}"


def _number(release: str) -> tuple[int, ...]:
    """``release`` as numbers; what a build or a pre-release adds to it does not count."""
    found = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _names(owner: str, kind: Kind, names: str, parameters: tuple[str, ...] | None = None, *,
           since: str | None = None) -> tuple[Name, ...]:
    """Names of ``owner`` that differ in nothing else."""
    return tuple(Name(f"{owner}.{name}", kind, parameters, since) for name in names.split())


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_CONFIG = "deepspeed.runtime.config.DeepSpeedConfig"
_BASE = "deepspeed.runtime.base_optimizer"
_PIPE = "deepspeed.runtime.pipe"
_ACCELERATOR = "deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator"
_TIMERS = "deepspeed.utils.timer"

_WRAPPED = (
    Name("deepspeed.runtime.config.get_zero_config", "wrapped", ("param_dict",)),
    Name(f"{_CONFIG}._initialize_params", "wrapped", ("self", "param_dict")),
    Name(f"{_CONFIG}._configure_train_batch_size", "wrapped", ("self",)),
    Name(f"{_ENGINE}.__init__", "wrapped", ("self", "args", "model", "optimizer", "model_parameters")),
    Name(f"{_ENGINE}._configure_with_arguments", "wrapped", ("self", "args", "mpu")),
    Name(f"{_ENGINE}._do_sanity_check", "wrapped", ("self",)),
    Name(f"{_ENGINE}._configure_distributed_model", "wrapped", ("self", "model")),
    Name(f"{_ENGINE}._broadcast_model", "wrapped", ("self",)),
    Name(f"{_ENGINE}._configure_optimizer", "wrapped", ("self", "client_optimizer", "model_parameters")),
    Name(f"{_ENGINE}._configure_basic_optimizer", "wrapped", ("self", "model_parameters")),
    Name(f"{_ENGINE}._do_optimizer_sanity_check", "wrapped", ("self", "basic_optimizer")),
    Name(f"{_ENGINE}._configure_zero_optimizer", "wrapped", ("self", "optimizer")),
    Name(f"{_ENGINE}._configure_lr_scheduler", "wrapped", ("self",)),
    Name(f"{_ENGINE}._scheduler_from_config", "wrapped", ("self", "optimizer")),
    Name(f"{_ENGINE}.zero_grad", "wrapped", ("self",)),
    Name(f"{_ENGINE}.zero_use_cpu_optimizer", "wrapped", ("self",)),
    Name(f"{_ENGINE}._take_model_step", "wrapped", ("self", "lr_kwargs")),
    Name(f"{_ENGINE}.save_checkpoint", "wrapped", ("self", "save_dir", "tag", "client_state", "save_latest")),
    Name(f"{_ENGINE}._save_checkpoint", "wrapped", ("self", "save_dir", "tag")),
    Name(f"{_ENGINE}._save_moe_checkpoint", "wrapped", ("self", "save_dir", "tag")),
    Name(f"{_ENGINE}._save_zero_checkpoint", "wrapped", ("self", "save_path", "tag")),
    Name(f"{_ENGINE}._commit_decoupled_checkpoint", "wrapped", ("self",)),
    Name(f"{_ENGINE}.destroy", "wrapped", ("self",)),
    Name(f"{_ENGINE}.load_checkpoint", "wrapped", (
        "self", "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
        "load_module_only", "custom_load_fn")),
    Name(f"{_ENGINE}._load_zero_checkpoint", "wrapped", ("self", "load_dir", "tag")),
    Name(f"{_ENGINE}.load_module_state_dict", "wrapped", ("self", "checkpoint", "strict", "custom_load_fn")),
    Name(f"{_ENGINE}._get_all_ckpt_names", "wrapped", ("self", "checkpoints_path", "tag")),
    Name("deepspeed.runtime.config.DEEPSPEED_OPTIMIZERS", "extended"),
    Name("deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS", "extended"),
)

_IMPORTED = (
    Name("deepspeed.comm", "imported"),
    Name("deepspeed.accelerator.get_accelerator", "imported", ()),
    *_names("deepspeed.checkpoint.constants", "imported", """
        BASE_OPTIMIZER_STATE CAT_DIM CLIP_GRAD DS_VERSION FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS
        LOSS_SCALER OPTIMIZER_STATE_DICT PARAM PARAM_GROUPS PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT
        SINGLE_PARTITION_OF_FP32_GROUPS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY
        UNIVERSAL_CHECKPOINT_VERSION_VALUE ZERO_STAGE"""),
    Name("deepspeed.git_version_info.version", "imported"),
    Name("deepspeed.moe.layer.MoE", "imported"),
    Name("deepspeed.moe.utils.is_moe_param", "imported", ("param",)),
    *_names("deepspeed.runtime", "imported", "config lr_schedules"),
    Name(f"{_BASE}.ZeROOptimizer", "imported"),
    Name("deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine", "imported"),
    Name(_ENGINE, "imported"),
    Name("deepspeed.runtime.fp16.loss_scaler.CreateLossScaler", "imported", (
        "dtype", "static_loss_scale", "dynamic_scaling", "dynamic_loss_args")),
    *_names("deepspeed.runtime.fp16.loss_scaler", "imported", "DynamicLossScaler LossScaler"),
    Name(f"{_PIPE}.engine.PipelineEngine", "imported"),
    *_names(f"{_PIPE}.module", "imported", "PipelineModule TiedLayerSpec"),
    Name(f"{_PIPE}.topology.PipelineParallelGrid", "imported"),
    Name("deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME", "imported"),
    Name("deepspeed.runtime.torch_autocast.get_comm_dtype", "imported", ("param",)),
    Name("deepspeed.runtime.utils.count_used_parameters_in_backward", "imported", ("parameters",)),
    Name("deepspeed.runtime.zero.config.ZeroStageEnum", "imported"),
    Name("deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum", "imported"),
    *_names("deepspeed.utils", "imported", "groups logger"),
    *_names("deepspeed.utils.bwc", "imported", """
        bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_group bwc_tensor_model_parallel_world_size""",
            ("mpu",)),
    Name("deepspeed.utils.tensor_fragment.fragment_address", "imported", ("numel", "start")),
    Name(f"{_TIMERS}.NoopTimer", "imported", ()),
    Name("deepspeed.utils.torch.register_grad_hook", "imported", ("param", "hook")),
)

_READ = (
    *_names("deepspeed", "read", "__version__ initialize"),
    # Those that send something do not say what they take.
    *_names("deepspeed.comm", "read", "all_gather all_gather_into_tensor all_reduce all_to_all_single broadcast recv "
             "reduce_scatter reduce_scatter_tensor send"),
    *_names("deepspeed.comm", "read", "get_rank get_world_size", ("group",)),
    Name("deepspeed.comm.ReduceOp", "read"),
    Name("deepspeed.comm.get_global_rank", "read", ("group", "group_rank")),
    *_names("deepspeed.comm", "read", "init_distributed is_initialized", ()),
    Name("deepspeed.utils.groups._clone_world_group", "read", ()),
    *_names("deepspeed.runtime.lr_schedules", "read", "WarmupLR WarmupDecayLR OneCycle LRRangeTest"),
    Name(_CONFIG, "read"),
    *_names(_CONFIG, "read", """
        _param_dict bfloat16_config communication_data_type grad_accum_dtype gradient_accumulation_steps
        load_universal_checkpoint optimizer_name zero_config"""),
    *_names(_CONFIG, "read", "buffer_dtype param_dtype", since="0.19.2"),
    Name(f"{_CONFIG}.managed_gradient_accumulation", "read", since="0.19.4"),
    Name(f"{_CONFIG}.gradient_allreduce_op", "read", since="0.19.6"),
    Name(f"{_CONFIG}.keep_in_fp32_modules", "read", since="0.19.8"),
    Name("deepspeed.runtime.precision_config.DeepSpeedBF16Config.check_grad_overflow", "read"),
    Name("deepspeed.runtime.zero.config.DeepSpeedZeroConfig.offload_optimizer", "read"),
    Name("deepspeed.runtime.zero.config.DeepSpeedZeroConfig.compute_grad_norm", "read", since="0.19.7"),
    *_names("deepspeed.runtime.zero.offload_config.DeepSpeedZeroOffloadOptimizerConfig", "read",
            "device pin_memory ratio"),
    Name("deepspeed.runtime.tensor_parallel.config.TPTrainingConfig.tensor_parallel", "read"),
    Name("deepspeed.runtime.tensor_parallel.config.TPConfig.tp_group", "read"),
    *_names(_ENGINE, "read", """
        _config _running_engine_backward basic_optimizer checkpoint_engine client_lr_scheduler client_optimizer
        enable_backward_allreduce engine_timers expert_data_parallel_group global_rank global_samples global_steps
        gradient_average has_moe_layers inside_no_sync_ctxt local_rank lr_scheduler mesh_device micro_steps module
        module_forward_post_hook module_forward_pre_hook monitor mp_world_size mpu optimizer save_non_zero_checkpoint
        save_zero_checkpoint seq_data_parallel_group sequence_parallel_size skipped_steps timers"""),
    Name("deepspeed.monitor.monitor.MonitorMaster.enabled", "read"),
    Name("deepspeed.monitor.monitor.MonitorMaster.write_events", "read", ("self", "event_list")),
    *_names(_ENGINE, "read", """
        autotp_size bfloat16_enabled dynamic_loss_scale dynamic_loss_scale_args get_data_types
        gradient_accumulation_steps gradient_clipping is_gradient_accumulation_boundary load_universal_checkpoint
        loss_scale tensor_parallel_config torch_autocast_dtype torch_autocast_enabled use_node_local_storage
        wall_clock_breakdown zero_ignore_unused_parameters zero_load_from_fp32_weights
        zero_optimization_partition_gradients zero_optimization_stage zero_overlap_comm""",
            ("self",)),
    Name(f"{_ENGINE}.backward", "read", ("self", "loss")),
    Name(f"{_ENGINE}.step", "read", ("self", "lr_kwargs")),
    Name(f"{_ENGINE}._get_ckpt_name", "read", ("self", "checkpoints_path", "tag")),
    Name(f"{_ENGINE}._get_zero_ckpt_name", "read", ("self", "checkpoints_path", "tag")),
    Name(f"{_ENGINE}._is_gradient_accumulation_boundary", "read"),
    *_names(_ENGINE, "read", "_running_engine_step _unmanaged_backward_count", since="0.19.4"),
    Name(f"{_ENGINE}.managed_gradient_accumulation", "read", ("self",), since="0.19.4"),
    Name("deepspeed.runtime.engine.EngineTimers.step_timers", "read"),
    *_names(f"{_BASE}.ZeROOptimizer", "read", """
        _backward_active_depth _backward_hook_state _hooks_fired_this_backward _max_expected_hooks_seen"""),
    *_names(f"{_BASE}.ZeROOptimizer", "read", """
        clear_backward_seen_flag enter_backward exit_backward queue_post_backward_callback reenter_backward_if_needed
        should_refresh_expected_hook_count""", ("self",)),
    Name(f"{_BASE}.ZeROOptimizer.update_hook_state_and_maybe_run_epilogue", "read", (
        "self", "current_expected_count")),
    *_names(f"{_BASE}.BackwardHookStateManager", "read", """
        backward_active_depth hooks_fired_this_backward post_backward_callback_graph_task_id
        post_backward_callback_queued"""),
    *_names("deepspeed.runtime.fp16.loss_scaler.LossScalerBase", "read", "dynamic loss_scale"),
    Name("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.is_decoupled", "read", ("self",)),
    *_names("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine", "read", """
        cleanup get_commit_info""", ("self",)),
    Name("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.commit", "read", ("self", "info")),
    Name("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.makedirs", "read", (
        "self", "path", "exist_ok")),
    Name("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.save", "read", (
        "self", "state_dict", "path")),
    Name("deepspeed.runtime.checkpoint_engine.checkpoint_engine.CheckpointEngine.load", "read", (
        "self", "path", "map_location")),
    *_names(f"{_PIPE}.module.PipelineModule", "read", """
        _layer_specs _local_start _num_layers forward_funcs tied_modules tied_weight_attrs"""),
    Name(f"{_PIPE}.module.PipelineModule._recursive_getattr", "read", ("module", "attr_name")),
    Name(f"{_PIPE}.module.PipelineModule.ckpt_layer_path_list", "read", ("self", "ckpt_dir", "local_layer_idx")),
    Name(f"{_PIPE}.module.PipelineModule._synchronize_tied_weights", "read", ("self",)),
    Name(f"{_PIPE}.module.PipelineModule.get_tied_weights_and_groups", "read", ("self",)),
    Name(f"{_PIPE}.module.PipelineModule.ds_pipe_replicated", "read"),
    *_names(f"{_PIPE}.topology.PipelineParallelGrid", "read", """
        get_model_parallel_group get_model_parallel_rank get_slice_parallel_world_size get_stage_id""", ("self",)),
    Name("deepspeed.moe.experts.Experts.group_name", "read"),
    *_names(f"{_TIMERS}.SynchronizedWallClockTimer.Timer", "read", "reset start stop", ("self",)),
    Name(f"{_ACCELERATOR}.Stream", "read"),
    *_names(_ACCELERATOR, "read", "current_device_name current_stream empty_cache is_synchronized_device "
             "supported_dtypes synchronize", ("self",)),
    Name(f"{_ACCELERATOR}.device_name", "read"),
    Name(f"{_ACCELERATOR}.is_fp64_supported", "read", ("self",), since="0.19.6"),
    Name(f"{_ACCELERATOR}.pin_empty", "read", ("self", "dtype"), since="0.19.7"),
    Name(f"{_ACCELERATOR}.pin_memory", "read", ("self", "tensor")),
    Name(f"{_ACCELERATOR}.set_device", "read", ("self", "device_index")),
    Name(f"{_ACCELERATOR}.stream", "read", ("self", "stream")),
)

#: Some of it the engine takes for not asked for, where an optimizer has no such member: then nothing else would tell.
_ASKED = (
    *_names(_ENGINE, "asked", """
        _global_grad_norm _restore_from_bit16_weights bit16_groups checkpoint_event_epilogue checkpoint_event_prologue
        clear_backward_seen_flag cur_scale dp_process_group enter_backward exit_backward offload_states overflow
        overlapping_partition_gradients_reduce_epilogue param_groups reduce_gradients refresh_fp32_params reload_states
        round_robin_bit16_groups update_lp_params"""),
    *_names(_ENGINE, "asked", """
        _coalesce_grad_reduction get_gradient_for_reduction reduce_ready_partitions_and_remove_grads setup_buckets""",
            since="0.19.1"),
    Name(f"{_ENGINE}.finalize_gradient_accumulation_boundary", "asked", since="0.19.4"),
    *_names("deepspeed.utils.tensor_fragment", "asked", """
        _hp_mapping get_full_hp_grad get_full_hp_param set_full_hp_grad set_full_hp_param"""),
    Name("deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.ds_grad_is_ready", "asked"),
)

CONTRACT: tuple[Name, ...] = (*_WRAPPED, *_IMPORTED, *_READ, *_ASKED)


def missing(release: str | None = None) -> list[str]:
    """What the installed DeepSpeed lacks or has changed of the list, each in words.

    Args:
        release: which one it is, if it does not say so itself.
    """
    release = release or str(deepspeed.__version__)
    # Somebody may have changed the code since.
    lookup.codes_of.cache_clear()
    return [problem for name in CONTRACT if name.is_in(release) and (problem := name.problem(release))]


def check() -> None:
    """Refuse a DeepSpeed that does not have the whole list.

    Raises:
        ConfigError: names all of what is missing or differs.
    """
    if problems := missing():
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} is not what ds_layerwise knows (>={OLDEST},<{BELOW}):\n  "
            + "\n  ".join(problems) + f"\nnothing was patched; install deepspeed=={NEWEST}, or report this list")


def resolve(key: str) -> tuple[Any, str]:
    """The class or module of what is wrapped or extended, and what it is called there now.

    Args:
        key: by which name this package knows it.
    """
    entry, = (name for name in _WRAPPED if name.key == key)
    return lookup.owner_of(entry.path_in(str(deepspeed.__version__)))


def renamed() -> Iterator[tuple[Any, str, str]]:
    """What the installed DeepSpeed calls otherwise than this package: where that looks for it, as what, and its path.

    What is asked for is left out: it has to answer to the name that DeepSpeed uses.
    """
    release = str(deepspeed.__version__)
    for entry in CONTRACT:
        path = entry.path_in(release)
        if entry.kind != "asked" and entry.is_in(release) and path != entry.known_as:
            try:
                owner, name = lookup.owner_of(entry.known_as)
            except lookup.Absent:
                owner, name = lookup.owner_of(path)[0], entry.key
            yield owner, name, path
