"""Every name of DeepSpeed that this package wraps, extends or imports.

:func:`check` looks all of them up before anything is patched, so that a release that has changed
one of them is refused as a whole, by a list of all that it has changed. What is only read from
DeepSpeed's objects, and what its code asks an optimizer for, is listed in
tests/support/deepspeed_names.py, and looked up by tests.

Note: how to support the next release
    Run ``python -m tests.contract_releases FOLDER``, with a release that is installed in FOLDER,
    and mend the entry of what it names. What is wrapped or extended under a new name gets that as
    its ``path``, and the old one as ``was``. Else both names are asked for where they are used;
    what not all supported releases have cannot be here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import deepspeed

from ds_layerwise.engine.contract import lookup
from ds_layerwise.errors import ConfigError

#: What setup.cfg asks for: the first release that is supported, the newest that was tested, the
#: first that is not.
OLDEST, NEWEST, BELOW = "0.18.9", "0.19.8", "0.20"

Kind = Literal["wrapped", "extended", "imported"]


@dataclass(frozen=True, slots=True)
class Name:
    """One name of DeepSpeed."""

    path: str
    """Module, class and name. A class's attribute may be one that only its instances have."""

    kind: Kind
    """``wrapped``: what is registered goes around it. ``extended``: a list that is added to.
    ``imported``: by an import statement."""

    parameters: tuple[str, ...] | None = None
    """What the name is called with here, or by DeepSpeed where it is wrapped; ``self``, too. It may
    take more, by default. None: it is not called, or does not say what it takes."""

    was: str | None = None
    """An earlier path of what is wrapped or extended, which is looked for where ``path`` is not
    there.
    """

    @property
    def key(self) -> str:
        """The last part of the first path that it had, by which the package knows it."""
        return (self.was or self.path).rpartition(".")[2]

    @property
    def here(self) -> str:
        """The path in the installed DeepSpeed."""
        try:
            lookup.find(self.path)
        except lookup.Absent:
            return self.was or self.path
        return self.path

    def problem(self) -> str | None:
        """What is wrong with it in the installed DeepSpeed; None if it is as expected."""
        path = self.here
        try:
            if self.kind == "imported":
                found: Any = lookup.find(path)
            else:
                owner, name = lookup.owner_of(path)
                if not lookup.defines(owner, name):
                    return f"{path} is not there"
                found = getattr(owner, name, None)
        except lookup.Absent as absent:
            return str(absent) if absent.part == path else f"{path} is not there, as {absent}"
        if self.kind == "extended" and not isinstance(found, list):
            return f"{path} is no list"
        changed = None if self.parameters is None else lookup.difference(found, self.parameters)
        return changed and f"{path} {changed}"


def _imports(owner: str, names: str, parameters: tuple[str, ...] | None = None) -> tuple[Name, ...]:
    """Names of ``owner`` that are imported, and called with the same ``parameters``."""
    return tuple(Name(f"{owner}.{name}", "imported", parameters) for name in names.split())


_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"
_CONFIG = "deepspeed.runtime.config.DeepSpeedConfig"
_BASE = "deepspeed.runtime.base_optimizer"
_PIPE = "deepspeed.runtime.pipe"
_TIMERS = "deepspeed.utils.timer"

_WRAPPED = (
    Name("deepspeed.runtime.config.get_zero_config", "wrapped", ("param_dict",)),
    Name(f"{_CONFIG}._initialize_params", "wrapped", ("self", "param_dict")),
    Name(f"{_CONFIG}._configure_train_batch_size", "wrapped", ("self",)),
    Name(
        f"{_ENGINE}.__init__", "wrapped", ("self", "args", "model", "optimizer", "model_parameters")
    ),
    Name(f"{_ENGINE}._configure_with_arguments", "wrapped", ("self", "args", "mpu")),
    Name(f"{_ENGINE}._do_sanity_check", "wrapped", ("self",)),
    Name(f"{_ENGINE}._configure_distributed_model", "wrapped", ("self", "model")),
    Name(f"{_ENGINE}._broadcast_model", "wrapped", ("self",)),
    Name(
        f"{_ENGINE}._configure_optimizer",
        "wrapped",
        ("self", "client_optimizer", "model_parameters"),
    ),
    Name(f"{_ENGINE}._configure_basic_optimizer", "wrapped", ("self", "model_parameters")),
    Name(f"{_ENGINE}._do_optimizer_sanity_check", "wrapped", ("self", "basic_optimizer")),
    Name(f"{_ENGINE}._configure_zero_optimizer", "wrapped", ("self", "optimizer")),
    Name(f"{_ENGINE}._configure_lr_scheduler", "wrapped", ("self",)),
    Name(f"{_ENGINE}._scheduler_from_config", "wrapped", ("self", "optimizer")),
    Name(f"{_ENGINE}.zero_grad", "wrapped", ("self",)),
    Name(f"{_ENGINE}.zero_use_cpu_optimizer", "wrapped", ("self",)),
    Name(f"{_ENGINE}._take_model_step", "wrapped", ("self", "lr_kwargs")),
    Name(
        f"{_ENGINE}.save_checkpoint",
        "wrapped",
        ("self", "save_dir", "tag", "client_state", "save_latest"),
    ),
    Name(f"{_ENGINE}._save_checkpoint", "wrapped", ("self", "save_dir", "tag")),
    Name(f"{_ENGINE}._save_moe_checkpoint", "wrapped", ("self", "save_dir", "tag")),
    Name(f"{_ENGINE}._save_zero_checkpoint", "wrapped", ("self", "save_path", "tag")),
    Name(f"{_ENGINE}._commit_decoupled_checkpoint", "wrapped", ("self",)),
    Name(f"{_ENGINE}.destroy", "wrapped", ("self",)),
    Name(
        f"{_ENGINE}.load_checkpoint",
        "wrapped",
        (
            "self",
            "load_dir",
            "tag",
            "load_module_strict",
            "load_optimizer_states",
            "load_lr_scheduler_states",
            "load_module_only",
            "custom_load_fn",
        ),
    ),
    Name(f"{_ENGINE}._load_zero_checkpoint", "wrapped", ("self", "load_dir", "tag")),
    Name(
        f"{_ENGINE}.load_module_state_dict",
        "wrapped",
        ("self", "checkpoint", "strict", "custom_load_fn"),
    ),
    Name(f"{_ENGINE}._get_all_ckpt_names", "wrapped", ("self", "checkpoints_path", "tag")),
    # A script calls it.
    Name("torch.nn.utils.clip_grad_norm_", "wrapped", ("parameters", "max_norm")),
    Name("deepspeed.runtime.config.DEEPSPEED_OPTIMIZERS", "extended"),
    Name("deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS", "extended"),
)

_IMPORTED = (
    Name("deepspeed.comm", "imported"),
    Name("deepspeed.accelerator.get_accelerator", "imported", ()),
    *_imports(
        "deepspeed.checkpoint.constants",
        """
        BASE_OPTIMIZER_STATE CAT_DIM CLIP_GRAD DS_VERSION FROZEN_PARAM_FRAGMENTS
        FROZEN_PARAM_SHAPES GROUP_PADDINGS LOSS_SCALER OPTIMIZER_STATE_DICT PARAM
        PARAM_GROUPS PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT
        SINGLE_PARTITION_OF_FP32_GROUPS TP_REPLICATED_PARAMETER_PATTERNS
        UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY
        UNIVERSAL_CHECKPOINT_VERSION_VALUE ZERO_STAGE
    """,
    ),
    Name("deepspeed.git_version_info.version", "imported"),
    Name("deepspeed.moe.layer.MoE", "imported"),
    Name("deepspeed.moe.utils.is_moe_param", "imported", ("param",)),
    *_imports("deepspeed.runtime", "config lr_schedules"),
    Name(f"{_BASE}.ZeROOptimizer", "imported"),
    Name(
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.TorchCheckpointEngine",
        "imported",
    ),
    Name(_ENGINE, "imported"),
    Name(
        "deepspeed.runtime.fp16.loss_scaler.CreateLossScaler",
        "imported",
        ("dtype", "static_loss_scale", "dynamic_scaling", "dynamic_loss_args"),
    ),
    *_imports("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler LossScaler"),
    Name(f"{_PIPE}.engine.PipelineEngine", "imported"),
    *_imports(f"{_PIPE}.module", "PipelineModule TiedLayerSpec"),
    Name(f"{_PIPE}.topology.PipelineParallelGrid", "imported"),
    Name("deepspeed.runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME", "imported"),
    Name("deepspeed.runtime.torch_autocast.get_comm_dtype", "imported", ("param",)),
    Name("deepspeed.runtime.utils.count_used_parameters_in_backward", "imported", ("parameters",)),
    Name("deepspeed.runtime.zero.config.ZeroStageEnum", "imported"),
    Name("deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum", "imported"),
    *_imports("deepspeed.utils", "groups logger"),
    *_imports(
        "deepspeed.utils.bwc",
        """
        bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_group
        bwc_tensor_model_parallel_world_size
    """,
        ("mpu",),
    ),
    Name("deepspeed.utils.tensor_fragment.fragment_address", "imported", ("numel", "start")),
    Name(f"{_TIMERS}.NoopTimer", "imported", ()),
    Name("deepspeed.utils.torch.register_grad_hook", "imported", ("param", "hook")),
)

CONTRACT: tuple[Name, ...] = (*_WRAPPED, *_IMPORTED)


def missing() -> list[str]:
    """What the installed DeepSpeed lacks or has changed of the list, each in words."""
    return [problem for name in CONTRACT if (problem := name.problem())]


def check() -> None:
    """Refuse a DeepSpeed that does not have the whole list.

    Raises:
        ConfigError: names all of what is missing or differs.
    """
    if problems := missing():
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} is not what ds_layerwise knows "
            f"(>={OLDEST},<{BELOW}):\n  "
            + "\n  ".join(problems)
            + f"\nnothing was patched; install deepspeed=={NEWEST}, or report this list"
        )


def resolve(key: str) -> tuple[Any, str]:
    """The class or module of what is wrapped or extended, and what it is called there.

    Args:
        key: the last part of its path.
    """
    (entry,) = (name for name in _WRAPPED if name.key == key)
    return lookup.owner_of(entry.here)
