"""The two sections of a DeepSpeed config that this package reads, parsed once into frozen values.

``optimizer`` says which mathematics runs (:class:`OptimizerConfig`), ``layerwise`` how the work is laid out
(:class:`LayerwiseConfig`). Whoever holds one of these need not check it again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from ds_layerwise.errors import ConfigError, unknown_key

#: The spellings of ``optimizer.type`` that select this backend, in lower case as DeepSpeed stores them.
OPTIMIZER_TYPES = ("layerwisemuon", "layerwise")

MatrixOptimizer = Literal["muon"]
ScalarOptimizer = Literal["adamw", "adam", "lion", "sgd"]
NsMethod = Literal["gram", "standard"]
NsDtype = Literal["auto", "bf16", "fp16", "fp32"]
ScaleMode = Literal["original", "spectral", "unit_rms_norm", "match_rms_adamw"]
TpMode = Literal["duplicated", "distributed", "blockwise"]
LayoutPolicy = Literal["balanced", "lpt", "size_matching"]
OnMissingState = Literal["fresh", "error"]
OnOptimizerChange = Literal["error", "reset", "keep_shared"]
Placement = Literal["matrix", "scalar"]

#: Learning rates of stock DeepSpeed's Muon and of its auxiliary Adam where the config names none.
DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4


def is_ours(optimizer_type: str | None) -> bool:
    """Whether ``optimizer.type`` names this backend, in any letter case."""
    return optimizer_type is not None and optimizer_type.lower() in OPTIMIZER_TYPES


def _number(where: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False,
            open_high: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where} must be a number, got {value!r}")
    if not (low < value if open_low else low <= value) or not (value < high if open_high else value <= high):
        left, right = "(" if open_low else "[", ")" if open_high or high == math.inf else "]"
        raise ConfigError(f"{where} must be in {left}{low:g}, {high:g}{right}, got {value}")
    return float(value)


def _whole_number(where: str, value: object, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{where} must be a whole number of at least {low}, got {value!r}")
    return value


def _flag(where: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    return value


def _only_known(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    for key in section:
        if key not in known:
            raise unknown_key(where, key, known)


def _choice(where: str, value: object, literal: Any) -> Any:
    choices = get_args(literal)
    if value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _betas(where: str, value: object) -> tuple[float, float]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"{where} must be two numbers, got {value!r}")
    first, second = (_number(f"{where}[{i}]", b, low=0, high=1, open_high=True) for i, b in enumerate(value))
    return first, second


def check_hyper(where: str, key: str, value: object) -> Any:
    """Check one hyper-parameter that a parameter group may carry, and return it normalised.

    Raises:
        ConfigError: the value is out of its bounds; ``where`` is the name it is reported under.
    """
    if key == "betas":
        return _betas(where, value)
    if key == "momentum":
        return _number(where, value, low=0, high=1, open_high=True)
    return _number(where, value, low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """``optimizer.params``: names, meanings and defaults of stock DeepSpeed's Muon, and more.

    Raises:
        ConfigError: on construction through :meth:`from_section`, naming the key, its value and its bound.
    """

    lr: float = DEFAULT_ADAM_LR
    """What schedulers move: ``param_groups[i]["lr"]``. The two below follow it in a fixed ratio."""
    muon_lr: float = DEFAULT_MUON_LR
    """Learning rate of the matrix optimizer while ``lr`` stands at its configured value."""
    adam_lr: float = DEFAULT_ADAM_LR
    """Learning rate of the scalar optimizer while ``lr`` stands at its configured value."""
    momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    matrix_optimizer: MatrixOptimizer = "muon"
    scalar_optimizer: ScalarOptimizer = "adamw"
    nesterov: bool = True
    ns_method: NsMethod = "gram"
    ns_steps: int = 5
    ns_coefficients: str | tuple[tuple[float, float, float], ...] = "simple"
    ns_dtype: NsDtype = "auto"
    scale_mode: ScaleMode = "original"
    extra_scale_factor: float = 1.0
    per_head_muon: bool = False
    """Orthogonalise every attention head of the query, key and value projections on its own."""
    muon_tp_mode: TpMode = "duplicated"
    """How matrices that tensor parallelism has cut are orthogonalised; see :mod:`.orthogonalize.shards`."""

    @property
    def matrix_lr_ratio(self) -> float:
        """What the matrix optimizer multiplies a group's ``lr`` with."""
        return self.muon_lr / self.lr

    @property
    def scalar_lr_ratio(self) -> float:
        """What the scalar optimizer multiplies a group's ``lr`` with."""
        return self.adam_lr / self.lr

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> OptimizerConfig:
        """Parse DeepSpeed's ``optimizer`` section, ``{"type": ..., "params": {...}}``."""
        _only_known("optimizer", section, ("type", "params", "legacy_fusion"))
        params = dict(section.get("params") or {})
        if section.get("legacy_fusion"):
            raise ConfigError("optimizer.legacy_fusion is not supported by this backend; remove it")
        if "max_grad_norm" in params:
            raise ConfigError("optimizer.params.max_grad_norm is not supported; set gradient_clipping at the top level")
        general = str(section.get("type")).lower() == "layerwise"
        known = {f.name for f in fields(cls)} | set(_ALWAYS_TRUE) | {"adam_w_mode"}
        if not general:
            known.remove("matrix_optimizer")
        _only_known("optimizer.params", params, known)
        for key in _ALWAYS_TRUE:
            if params.pop(key, True) is not True:
                raise ConfigError(f"optimizer.params.{key} must be true, got false: {_ALWAYS_TRUE[key]}; remove it")
        if not _flag("optimizer.params.adam_w_mode", params.pop("adam_w_mode", True)):
            if params.setdefault("scalar_optimizer", "adam") != "adam":
                raise ConfigError("optimizer.params.adam_w_mode is false, which means scalar_optimizer 'adam', got "
                                  f"{params['scalar_optimizer']!r}; remove one of the two")
        return cls(**_checked_params(params))


#: Switches of stock DeepSpeed's auxiliary Adam that describe what this backend does anyway.
_ALWAYS_TRUE = {
    "torch_adam": "the scalar optimizer runs on torch's own AdamW",
    "foreach": "all updates run on lists of tensors",
    "fp32_optimizer_states": "masters and states are float32",
}


def _checked_params(params: dict[str, Any]) -> dict[str, Any]:
    where = "optimizer.params"
    checked: dict[str, Any] = {}
    for key, value in params.items():
        if value == "auto" and key != "ns_dtype":
            raise ConfigError(f"{where}.{key} is 'auto', and nothing filled it in; give it a value")
        if key in ("lr", "muon_lr", "adam_lr", "weight_decay", "momentum", "betas", "eps"):
            checked[key] = check_hyper(f"{where}.{key}", key, value)
        elif key in ("nesterov", "per_head_muon"):
            checked[key] = _flag(f"{where}.{key}", value)
        elif key == "ns_steps":
            checked[key] = _whole_number(f"{where}.{key}", value, low=1)
        elif key == "extra_scale_factor":
            checked[key] = _number(f"{where}.{key}", value, low=0, open_low=True)
        elif key == "ns_coefficients":
            checked[key] = _coefficients(f"{where}.{key}", value)
        else:
            checked[key] = _choice(f"{where}.{key}", value, _CHOICES[key])
    lr = checked.get("lr")
    if lr == 0:
        raise ConfigError(f"{where}.lr must be greater than 0: muon_lr and adam_lr are kept in ratio to it, got 0; "
                          "let a scheduler start at 0 instead")
    checked.setdefault("muon_lr", DEFAULT_MUON_LR if lr is None else lr)
    checked.setdefault("adam_lr", DEFAULT_ADAM_LR if lr is None else lr)
    checked.setdefault("lr", checked["adam_lr"] or DEFAULT_ADAM_LR)
    return checked


_CHOICES = {
    "matrix_optimizer": MatrixOptimizer,
    "scalar_optimizer": ScalarOptimizer,
    "ns_method": NsMethod,
    "ns_dtype": NsDtype,
    "scale_mode": ScaleMode,
    "muon_tp_mode": TpMode,
}


def _coefficients(where: str, value: object) -> str | tuple[tuple[float, float, float], ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence) or not value:
        raise ConfigError(f"{where} must be a name or a list of [a, b, c], got {value!r}")
    rows = []
    for i, row in enumerate(value):
        if isinstance(row, str) or not isinstance(row, Sequence) or len(row) != 3:
            raise ConfigError(f"{where}[{i}] must be three numbers [a, b, c], got {row!r}")
        rows.append(tuple(_number(f"{where}[{i}][{j}]", x, low=-math.inf) for j, x in enumerate(row)))
    return cast("tuple[tuple[float, float, float], ...]", tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """One entry of ``layerwise.overrides``: what differs for the parameters whose name matches."""

    name: str
    """A glob over full parameter names; ``*`` crosses dots."""
    optimizer: Placement | None = None
    weight_decay: float | None = None
    lr_scale: float | None = None
    """Multiplies the learning rate of whichever optimizer the parameter has."""
    num_heads: int | None = None
    """Orthogonalise this many equal blocks of rows on their own."""

    @classmethod
    def from_entry(cls, where: str, entry: object) -> Override:
        """Parse one entry; ``where`` is the name that errors report it under."""
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be an object like {{\"name\": \"*.bias\", ...}}, got {entry!r}")
        known = [f.name for f in fields(cls)]
        _only_known(where, entry, known)
        if not isinstance(entry.get("name"), str) or not entry["name"]:
            raise ConfigError(f"{where}.name must be a glob over parameter names, got {entry.get('name')!r}")
        if len(entry) == 1:
            raise ConfigError(f"{where} ({entry['name']!r}) overrides nothing; add one of {', '.join(known[1:])}")
        values = dict(entry)
        if "optimizer" in values:
            _choice(f"{where}.optimizer", values["optimizer"], Placement)
        for key in ("weight_decay", "lr_scale"):
            if key in values:
                values[key] = _number(f"{where}.{key}", values[key], low=0)
        if "num_heads" in values:
            _whole_number(f"{where}.num_heads", values["num_heads"], low=1)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerwiseConfig:
    """The ``layerwise`` section: how the work is laid out. Every key is optional."""

    layout: LayoutPolicy = "balanced"
    """Who owns which matrix; see :mod:`ds_layerwise.planner`."""
    alignment: int = 64
    """Every parameter starts at a multiple of this many elements."""
    overlap_param_gather: bool = False
    """Wait for updated parameters in the forward pass of the module that needs them, not in ``step``."""
    batch_matrices: bool = True
    """Orthogonalise matrices of equal shape together."""
    save_universal: bool = False
    """Write every checkpoint in DeepSpeed's universal format, too, beside the regular one."""
    fsync: bool = False
    """Let no checkpoint count before all of its files are on the disk."""
    on_missing_state: OnMissingState = "fresh"
    """What to do at a load with a parameter of which the checkpoint holds no optimizer state."""
    on_optimizer_change: OnOptimizerChange = "error"
    """What to do at a load with a parameter that another optimizer updated before."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Globs over names in checkpoints to names in the model, each ``*`` standing for the same text in both."""
    overrides: tuple[Override, ...] = field(default=())

    @classmethod
    def from_section(cls, section: object) -> LayerwiseConfig:
        """Parse the top-level ``layerwise`` section of a DeepSpeed config."""
        if not isinstance(section, Mapping):
            raise ConfigError(f"layerwise must be an object, got {section!r}")
        known = [f.name for f in fields(cls)]
        values: dict[str, Any] = {}
        for key, value in section.items():
            if key in _LAYERWISE_CHOICES:
                values[key] = _choice(f"layerwise.{key}", value, _LAYERWISE_CHOICES[key])
            elif key == "alignment":
                values[key] = _whole_number("layerwise.alignment", value, low=1)
            elif key in ("overlap_param_gather", "batch_matrices", "save_universal", "fsync"):
                values[key] = _flag(f"layerwise.{key}", value)
            elif key == "rename":
                values[key] = _renames(f"layerwise.{key}", value)
            elif key == "overrides":
                if isinstance(value, str) or not isinstance(value, Sequence):
                    raise ConfigError(f"layerwise.overrides must be a list, got {value!r}")
                values[key] = tuple(Override.from_entry(f"layerwise.overrides[{i}]", e) for i, e in enumerate(value))
            else:
                raise unknown_key("layerwise", key, known)
        return cls(**values)


_LAYERWISE_CHOICES = {
    "layout": LayoutPolicy,
    "on_missing_state": OnMissingState,
    "on_optimizer_change": OnOptimizerChange,
}


def _renames(where: str, value: object) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object of names in checkpoints to names in the model, got {value!r}")
    for old, new in value.items():
        if not isinstance(old, str) or not isinstance(new, str) or not old or not new:
            raise ConfigError(f"{where} must map names to names, got {old!r}: {new!r}")
        if old.count("*") != new.count("*"):
            raise ConfigError(f"{where}[{old!r}] has {old.count('*')} times '*', its new name {new!r} "
                              f"{new.count('*')}; each stands for the same text in both")
    return dict(value)


#: Keys elsewhere in a DeepSpeed config that this backend does not honour: what they may say, and the way out.
_MUST_BE: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_optimization.stage": ((1, 2), "this backend takes the place of ZeRO stages 1 and 2; set it to one of them"),
    "zero_optimization.reduce_scatter": ((True,), "gradients are always reduced to their owners; remove it"),
    "zero_optimization.round_robin_gradients": ((False,), "the layout is layerwise.layout's; remove it"),
    "zero_optimization.parameter_alignment": ((False,), "set layerwise.alignment instead"),
    "zero_optimization.ignore_unused_parameters": ((True,), "a missing gradient counts as zeros; remove it"),
    "zero_optimization.elastic_checkpoint": ((False,), "remove it"),
    "zero_optimization.offload_optimizer.device": (("none", "cpu"), "nothing goes to NVMe; set it to 'cpu'"),
    "zero_optimization.offload_param.device": (("none",), "parameters stay on the device; remove it"),
    "zero_optimization.cpu_offload_param": ((False,), "parameters stay on the device; remove it"),
    "zero_optimization.legacy_stage1": ((False,), "DeepSpeed has no such stage any more; remove it"),
    "zero_optimization.zenflow": ((None,), "remove it"),
    **{f"zero_optimization.{key}": ((neutral,), "it belongs to ZeRO stage 3; remove it") for key, neutral in {
        "offload_optimizer.super_offload": False, "pipeline_loading_checkpoint": False, "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False, "zeropp_loco_param": None,
        "zero_quantized_gradients": False, "mics_shard_size": -1, "mics_hierarchical_params_gather": False}.items()},
    "prescale_gradients": ((False,), "sums are taken in float32, where scaling first gains nothing; remove it"),
    "gradient_predivide_factor": ((1, 1.0), "sums are taken in float32, where dividing first gains nothing; remove it"),
    "sparse_gradients": ((False,), "sparse gradients cannot be cut into shards; remove it"),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are float32; remove it"),
    **{f"{section}.bf16_{what}": ((False,), "masters and states are float32; remove it")
       for section in ("bf16", "bfloat16") for what in ("master_weights_and_grads", "optimizer_states")},
    "amp.enabled": ((False,), "use the bf16 or fp16 section instead"),
    "compile.deepcompile": ((False,), "DeepCompile takes ZeRO's buffers apart; use engine.compile() without it"),
    "hybrid_engine.enabled": ((False,), "remove it"),
    "eigenvalue.enabled": ((False,), "it differentiates gradients that do not stay on the parameters; remove it"),
    "expert_parallel.enabled": ((False,), "build the model with deepspeed.moe.layer.MoE instead"),
    "use_data_before_expert_parallelism": ((False,), "experts are dealt out rank after rank; remove it"),
}

#: What Hugging Face fills in, and DeepSpeed reads as it stands, or takes for false.
_NEVER_AUTO = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", "gradient_clipping", "managed_gradient_accumulation",
               "data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype")


def _at(ds_config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    value: Any = ds_config
    for key in path.split("."):
        value = value.get(key, default) if isinstance(value, Mapping) else default
    return value


def refuse_unsupported(ds_config: Mapping[str, Any]) -> None:
    """Check everything outside our two sections that this backend could not honour.

    Raises:
        ConfigError: names the key, its value, what it may say and the way out.
    """
    for path, (allowed, way_out) in _MUST_BE.items():
        value = _at(ds_config, path, allowed[0])
        if value is not None and value not in allowed:
            raise ConfigError(f"{path} must be {' or '.join(map(repr, allowed))} with this optimizer, got {value!r}: "
                              f"{way_out}")
    for path in _NEVER_AUTO:
        if _at(ds_config, path) == "auto":
            raise ConfigError(f"{path} is 'auto', and nothing filled it in; give it a value")
    _number("gradient_clipping", ds_config.get("gradient_clipping", 1.0), low=0)
    zero = ds_config.get("zero_optimization") or {}
    if not isinstance(zero, Mapping) or "stage" not in zero:
        raise ConfigError("zero_optimization.stage must be 1 or 2 with this optimizer, but is not set")
    _only_known("data_types", ds_config.get("data_types") or {},
                ("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"))
    asked = _at(ds_config, "data_types.grad_accum_dtype")
    if zero["stage"] == 2 and asked not in (None, "fp32", "float32", "float"):
        raise ConfigError(f"data_types.grad_accum_dtype must be 'fp32' at ZeRO stage 2, got {asked!r}: owners add up "
                          "averaged gradients in float32; remove it")
    if zero.get("compute_grad_norm") is False and ds_config.get("gradient_clipping", 1.0):
        raise ConfigError("zero_optimization.compute_grad_norm is false, but gradient_clipping needs the norm; set "
                          "gradient_clipping to 0")
    checkpoint, layerwise = ds_config.get("checkpoint"), ds_config.get("layerwise")
    if isinstance(checkpoint, Mapping) and checkpoint.get("use_node_local_storage") and \
            isinstance(layerwise, Mapping) and layerwise.get("save_universal"):
        raise ConfigError("layerwise.save_universal is true, which needs a disk that all ranks share, but checkpoint."
                          "use_node_local_storage is true; remove one of the two")
