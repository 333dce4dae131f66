"""The two sections of a DeepSpeed config that this package reads, parsed once into frozen values.

``optimizer`` says which mathematics runs (:class:`OptimizerConfig`), ``layerwise`` how the work is laid out
(:class:`LayerWiseConfig`). Whoever holds one of these need not check it again.
"""

from __future__ import annotations

import difflib
import math
import sys
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
OnHyperChange = Literal["checkpoint", "config"]
Placement = Literal["matrix", "scalar"]

#: Learning rates of stock DeepSpeed's Muon and of its auxiliary Adam where the config names none.
DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4


def is_ours(optimizer_type: str | None) -> bool:
    """Whether ``optimizer.type`` names this backend, in any letter case."""
    return optimizer_type is not None and optimizer_type.lower() in OPTIMIZER_TYPES


def plain(value: object) -> object:
    """``value`` as Python's own number, where it is one of numpy's or a tensor without axes."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def number(where: str, value: object, *, low: float, high: float = math.inf, open_low: bool = False,
           open_high: bool = False) -> float:
    """``value``, if it is a number between the bounds; else a ConfigError that calls it ``where``."""
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{where} must be a number, got {value!r}")
    if abs(value) > sys.float_info.max:  # or a whole number that no float can be
        value = math.inf if value > 0 else -math.inf
    open_low, open_high = open_low or low == -math.inf, open_high or high == math.inf
    if not (low < value if open_low else low <= value) or not (value < high if open_high else value <= high):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise ConfigError(f"{where} must be in {left}{low:g}, {high:g}{right}, got {value}")
    return float(value)


def _whole_number(where: str, value: object, *, low: int, high: int = 2**31 - 1) -> int:
    value = plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        bound = f"at most {high}" if isinstance(value, int) and value > high else f"at least {low}"
        raise ConfigError(f"{where} must be a whole number of {bound}, got {value!r}")
    return value


def flag(where: str, value: object) -> bool:
    """``value``, if it is true or false; else a ConfigError that calls it ``where``."""
    value = plain(value)
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false, got {value!r}")
    return value


def only_known(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key of ``section`` that is not ``known``, with a ConfigError that suggests the nearest one."""
    for key in section:
        if key not in known:
            raise unknown_key(where, key, known)


def belongs_in(key: str, *, shared: Collection[str] = ("lr", "momentum", "weight_decay", "betas", "eps")) -> str | None:
    """Where a key of one of our two sections stands, if ``key`` is one, or nearly; ``shared`` have other meanings."""
    for section, kind in (("layerwise", LayerWiseConfig), ("optimizer.params", OptimizerConfig)):
        names = [f.name for f in fields(kind) if f.name not in shared]
        if close := difflib.get_close_matches(key, names, n=1, cutoff=0.9):
            return f"{section}.{close[0]}"
    return None


def _only_ours(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    """As :func:`only_known`, and a key of our other section is told where it belongs."""
    for key in section:
        home = "layerwise at the top level" if str(key).lower().replace("_", "") == "layerwise" else belongs_in(
            str(key), shared=())
        if key not in known and home and home.rpartition(".")[0] != where:
            raise ConfigError(f"{where}.{key} is not an option; did you mean {home}?")
    only_known(where, section, known)


def _choice(where: str, value: object, literal: Any) -> Any:
    choices = get_args(literal)
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def _betas(where: str, value: object) -> tuple[float, float]:
    if callable(tolist := getattr(value, "tolist", None)):
        value = tolist()
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"{where} must be two numbers, got {value!r}")
    first, second = (number(f"{where}[{i}]", b, low=0, high=1, open_high=True) for i, b in enumerate(value))
    return first, second


def check_hyper(where: str, key: str, value: object) -> Any:
    """Check one hyper-parameter that a parameter group may carry, and return it normalised.

    Raises:
        ConfigError: the value is out of its bounds; ``where`` is the name it is reported under.
    """
    if key == "betas":
        return _betas(where, value)
    if key == "momentum":
        return number(where, value, low=0, high=1, open_high=True)
    return number(where, value, low=0)


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
    """How matrices that tensor parallelism has cut are orthogonalised; see :mod:`.orthogonalize.tensor_shards`."""

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
        given = section.get("params") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"optimizer.params must be an object, got {given!r}")
        params = dict(given)
        _only_ours("optimizer", section, ("type", "params", "legacy_fusion"))
        if section.get("legacy_fusion"):
            raise ConfigError("optimizer.legacy_fusion is not supported by this backend; remove it")
        if "max_grad_norm" in params:
            raise ConfigError("optimizer.params.max_grad_norm is not supported; set gradient_clipping at the top level")
        general = str(section.get("type")).lower() == "layerwise"
        known = {f.name for f in fields(cls)} | set(_ALWAYS_TRUE) | {"adam_w_mode"}
        if not general:
            known.remove("matrix_optimizer")
        _only_ours("optimizer.params", params, known)
        for key in _ALWAYS_TRUE:
            if params.pop(key, True) is not True:
                raise ConfigError(f"optimizer.params.{key} must be true, got false: {_ALWAYS_TRUE[key]}; remove it")
        if not flag("optimizer.params.adam_w_mode", params.pop("adam_w_mode", True)):
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
        if isinstance(value, str) and value == "auto" and key != "ns_dtype":
            raise ConfigError(f"{where}.{key} is 'auto', and nothing filled it in; give it a value")
        if key in ("lr", "muon_lr", "adam_lr", "weight_decay", "momentum", "betas", "eps"):
            checked[key] = check_hyper(f"{where}.{key}", key, value)
        elif key in ("nesterov", "per_head_muon"):
            checked[key] = flag(f"{where}.{key}", value)
        elif key == "ns_steps":
            checked[key] = _whole_number(f"{where}.{key}", value, low=1, high=1000)
        elif key == "extra_scale_factor":
            checked[key] = number(f"{where}.{key}", value, low=0, open_low=True)
        elif key == "ns_coefficients":
            checked[key] = _coefficients(f"{where}.{key}", value)
        else:
            checked[key] = _choice(f"{where}.{key}", value, _CHOICES[key])
    lr = checked.get("lr")
    if lr == 0:
        raise ConfigError(f"{where}.lr must be greater than 0: muon_lr and adam_lr are kept in ratio to it, got 0; "
                          "let a scheduler start at 0 instead")
    as_adamw = checked.get("scale_mode") == "match_rms_adamw"
    if lr is not None and "muon_lr" not in checked and not as_adamw:
        raise ConfigError(f"{where}.lr is {lr:g} without muon_lr, and Muon's rate is far from AdamW's: give muon_lr, "
                          f"such as {DEFAULT_MUON_LR}, or set scale_mode to 'match_rms_adamw', with which lr is right "
                          "for both")
    checked.setdefault("adam_lr", DEFAULT_ADAM_LR if lr is None else lr)
    checked.setdefault("lr", checked["adam_lr"] or DEFAULT_ADAM_LR)
    checked.setdefault("muon_lr", checked["lr"] if as_adamw else DEFAULT_MUON_LR)
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
        rows.append(tuple(number(f"{where}[{i}][{j}]", x, low=-math.inf) for j, x in enumerate(row)))
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
    optional: bool = False
    """Whether it may match no parameter."""

    @classmethod
    def from_entry(cls, where: str, entry: object) -> Override:
        """Parse one entry; ``where`` is the name that errors report it under."""
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where} must be an object like {{\"name\": \"*.bias\", ...}}, got {entry!r}")
        known = [f.name for f in fields(cls)]
        only_known(where, entry, known)
        if not isinstance(entry.get("name"), str) or not entry["name"]:
            raise ConfigError(f"{where}.name must be a glob over parameter names, got {entry.get('name')!r}")
        if not entry.keys() - {"name", "optional"}:
            raise ConfigError(f"{where} ({entry['name']!r}) overrides nothing; add one of {', '.join(known[1:-1])}")
        values = dict(entry)
        if "optimizer" in values:
            _choice(f"{where}.optimizer", values["optimizer"], Placement)
        for key in ("weight_decay", "lr_scale"):
            if key in values:
                values[key] = number(f"{where}.{key}", values[key], low=0)
        if "optional" in values:
            values["optional"] = flag(f"{where}.optional", values["optional"])
        if "num_heads" in values:
            values["num_heads"] = _whole_number(f"{where}.num_heads", values["num_heads"], low=1)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWiseConfig:
    """The ``layerwise`` section: how the work is laid out. Every key is optional."""

    layout: LayoutPolicy = "balanced"
    """Who owns which matrix; see :mod:`ds_layerwise.plan.planner`."""
    alignment: int = 64
    """Every parameter starts at a multiple of this many elements."""
    max_skipped_steps: int | None = 100
    """An error after this many steps in a row that were skipped for a gradient that is not finite; None for no end."""
    overlap_param_gather: bool = False
    """Wait for an updated parameter when it is used first, not in ``step``."""
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
    on_hyper_change: OnHyperChange = "checkpoint"
    """Which wins at a load where the config gives a group another hyper-parameter than it did before."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Globs over names in checkpoints to names in the model, each ``*`` standing for the same text in both."""
    overrides: tuple[Override, ...] = field(default=())

    @classmethod
    def from_section(cls, section: object) -> LayerWiseConfig:
        """Parse the top-level ``layerwise`` section of a DeepSpeed config."""
        if not isinstance(section, Mapping):
            raise ConfigError(f"layerwise must be an object, got {section!r}")
        _only_ours("layerwise", section, [f.name for f in fields(cls)])
        values: dict[str, Any] = {}
        for key, value in section.items():
            if key in _LAYERWISE_CHOICES:
                values[key] = _choice(f"layerwise.{key}", value, _LAYERWISE_CHOICES[key])
            elif key in ("alignment", "max_skipped_steps"):
                endless = key == "max_skipped_steps" and value is None
                values[key] = None if endless else _whole_number(f"layerwise.{key}", value, low=1)
            elif key in ("overlap_param_gather", "batch_matrices", "save_universal", "fsync"):
                values[key] = flag(f"layerwise.{key}", value)
            elif key == "rename":
                values[key] = _renames(f"layerwise.{key}", value)
            elif key == "overrides":
                if isinstance(value, str) or not isinstance(value, Sequence):
                    raise ConfigError(f"layerwise.overrides must be a list, got {value!r}")
                values[key] = tuple(Override.from_entry(f"layerwise.overrides[{i}]", e) for i, e in enumerate(value))
        return cls(**values)


_LAYERWISE_CHOICES = {
    "layout": LayoutPolicy,
    "on_missing_state": OnMissingState,
    "on_optimizer_change": OnOptimizerChange,
    "on_hyper_change": OnHyperChange,
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
