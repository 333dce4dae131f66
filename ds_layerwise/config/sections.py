"""The two sections of a DeepSpeed config that this package reads, parsed once into frozen values.

``optimizer`` chooses the mathematics (:class:`OptimizerConfig`), ``layerwise`` the layout of the
work (:class:`LayerWiseConfig`). Constructors check all values, so users of these classes need no
checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, create_model

from ds_layerwise.config.conditions import NormGroup, norm_groups_of
from ds_layerwise.config.mup import Mup
from ds_layerwise.config.overrides import Override
from ds_layerwise.config.qk_clip_settings import QkClip
from ds_layerwise.errors import FOREIGN, ConfigError, nearest, unknown_key
from ds_layerwise.optimizers.any_torch import ClientOptimizerConfig
from ds_layerwise.optimizers.dtypes import MasterDtype
from ds_layerwise.optimizers.fields import (
    Betas,
    Count,
    Decay,
    Name,
    NonNegative,
    OrNull,
    Positive,
    Section,
    build,
    check,
    entries_of,
    merged_keys,
)
from ds_layerwise.optimizers.mxfp8 import ParamWire
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.optimizers.registry import (
    NOT_HERE,
    any_of,
    names,
    recipe_at,
    recipes_of_settings,
    refuse_of_others,
)
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon

#: The values of ``optimizer.type`` that select this backend, in lower case as DeepSpeed stores
#: them.
OPTIMIZER_TYPES = ("layerwisemuon", "layerwise")


LayoutPolicy = Literal["balanced", "lpt", "size_matching"]
Reduction = Literal["auto", "ordered", "native"]
OnMissingState = Literal["fresh", "error"]
OnOptimizerChange = Literal["error", "reset", "keep_shared"]
OnHyperChange = Literal["checkpoint", "config"]

#: The default learning rates of stock DeepSpeed's Muon and of its auxiliary Adam.
DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4

#: Published values of ``optimizer.params``, by name; a config's own values take precedence. If an
#: update has AdamW's size, there is no learning rate: the rate is then that of the run.
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2502.16982, section 2.2; betas and eps from the authors' published code,
    # MoonshotAI/Moonlight.
    "kimi": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": "simple",
        "ns_steps": 5,
        "scale_mode": "match_rms_adamw",
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
    },
    # https://kellerjordan.github.io/posts/muon/; betas and eps from KellerJordan/Muon.
    "keller_jordan": {
        "muon_lr": 0.02,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": "simple",
        "ns_steps": 5,
        "scale_mode": "original",
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
    },
    # The defaults of Muon in NVIDIA-NeMo/Emerging-Optimizers 0.5.0.
    "soap_muon_beyond": {
        "momentum": 0.9,
        "nesterov": False,
        "ns_coefficients": "polar_express",
        "ns_steps": 16,
        "scale_mode": "spectral",
        "extra_scale_factor": 0.2,
        "weight_decay": 0.1,
    },
}

#: The keys that every parameter group has once it is built.
HYPER_KEYS = (
    "lr",
    "momentum",
    "weight_decay",
    "betas",
    "eps",
    "matrix_lr_ratio",
    "scalar_lr_ratio",
)


def is_ours(optimizer_type: str | None) -> bool:
    """Tell whether ``optimizer.type`` names this backend, in any letter case."""
    return optimizer_type is not None and optimizer_type.lower() in OPTIMIZER_TYPES


def is_for_us(ds_config: Mapping[str, Any]) -> bool:
    """Tell whether a DeepSpeed config selects this backend.

    It does so by its type, or, if the script passes an optimizer, by a ``layerwise`` section
    without an ``optimizer`` section.
    """
    section = ds_config.get("optimizer")
    if isinstance(section, Mapping) and isinstance(section.get("type"), str):
        return is_ours(section["type"])
    return section is None and "layerwise" in ds_config


def only_known(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key of ``section`` that is not ``known``; the error suggests the nearest one."""
    for key in section:
        if key not in known:
            raise unknown_key(where, key, known)


def belongs_in(
    key: str, *, shared: Collection[str] = ("lr", "momentum", "weight_decay", "betas", "eps")
) -> str | None:
    """Return the place of ``key`` if it is a key of our two sections, a misspelling of one, or a
    name that others have for a setting; else None.

    Args:
        shared: the keys that have other meanings elsewhere.
    """
    place = FOREIGN.get(key, "")
    section, _, name = place.rpartition(".")
    if place and (
        not shared or (section in ("layerwise", "optimizer.params") and name not in shared)
    ):
        return place
    for section, keys in (
        ("layerwise", LayerWiseConfig.keys()),
        ("optimizer.params", _all_params()),
    ):
        if close := nearest(key, [each for each in keys if each not in shared], cutoff=0.9):
            return f"{section}.{close}"
    return None


#: The keys of our sections that are no longer there, each with what to do instead.
GONE = {
    "layerwise.links": "transports are chosen by counting bytes; leave it out",
}


def _only_ours(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse unknown keys. For a key of our other section, the error names that section."""
    for key in section:
        if key in known:
            continue
        if f"{where}.{key}" in GONE:
            raise ConfigError(f"{where}.{key} is no longer an option: {GONE[f'{where}.{key}']}")
        home = belongs_in(str(key), shared=())
        if str(key).lower().replace("_", "") == "layerwise":
            home = "layerwise at the top level"
        if home and home.rpartition(".")[0] != where:
            raise ConfigError(f"{where}.{key} is not an option; did you mean {home}?")
    only_known(where, section, known)


class GroupSettings(Section):
    """The settings that a parameter group may also have: those of stock DeepSpeed's Muon."""

    lr: NonNegative = DEFAULT_ADAM_LR
    """The rate that schedulers move, ``param_groups[i]["lr"]``. The next two keep their ratio to
    it.
    """
    muon_lr: NonNegative = DEFAULT_MUON_LR
    """The learning rate of recipes for whole matrices, while ``lr`` has its configured value."""
    adam_lr: NonNegative = DEFAULT_ADAM_LR
    """The learning rate of element-wise recipes, while ``lr`` has its configured value."""
    momentum: Decay = 0.95
    weight_decay: NonNegative = 0.0
    betas: Betas = (0.9, 0.95)
    eps: NonNegative = 1e-10


def check_hyper(where: str, key: str, value: object) -> Any:
    """Check one hyper-parameter of a parameter group, and return it normalised.

    Raises:
        ConfigError: the value is out of its bounds; the error calls it ``where``.
    """
    return check(GroupSettings.model_fields[key].rebuild_annotation(), where, value)


class Recipes(NamedTuple):
    """The recipes of parameters for which nothing else is set."""

    matrix: Recipe = Muon()
    """The recipe of matrices; of everything, if it is an element-wise one of the registry."""
    scalar: Recipe = AdamW()
    """The recipe of the rest."""

    @property
    def are_one(self) -> bool:
        """True if one recipe is for everything."""
        return type(self.matrix) is type(self.scalar)


class OptimizerConfig(GroupSettings):
    """``optimizer.params``: the keys of stock DeepSpeed's Muon, with the same meanings and
    defaults, and more.

    Raises:
        ConfigError: from :meth:`from_section`; names the key, its value and its bound.
    """

    per_head_muon: bool = False
    """Orthogonalise each attention head of the query, key and value projections separately."""
    decay_vectors: bool = False
    """Also apply weight decay to parameters with fewer than two axes: norms, biases, gains."""
    scalar_weight_decay: OrNull[NonNegative] = None
    """The weight decay of element-wise recipes, in place of ``weight_decay``; None for the same."""
    preset: OrNull[Literal[tuple(PRESETS)]] = None  # type: ignore[valid-type]
    """The published recipe that sets the values missing in the config; see
    :mod:`.config.sections`.
    """
    from_preset: tuple[str, ...] = ()
    """The keys set by the preset."""
    given: tuple[str, ...] = ()
    """The keys set in the config."""
    matrix: Recipe = Muon()
    scalar: Recipe = AdamW()

    @property
    def recipes(self) -> Recipes:
        """The two recipes that the routing rules choose from."""
        return Recipes(self.matrix, self.scalar)

    @property
    def matrix_lr_ratio(self) -> float:
        """The factor of a group's ``lr`` in recipes for whole matrices."""
        return self.muon_lr / self.lr

    @property
    def scalar_lr_ratio(self) -> float:
        """The factor of a group's ``lr`` in element-wise recipes."""
        return self.adam_lr / self.lr

    def group(self) -> dict[str, Any]:
        """Return the parameter group of a run with a single one, before any scheduler."""
        return {"configured_lr": self.lr, **{key: getattr(self, key) for key in HYPER_KEYS}}

    def for_the_run(self) -> dict[str, Any]:
        """Return the settings of ``optimizer.params`` that no parameter group can change."""
        return {
            **self.scalar.settings(),
            **self.matrix.settings(),
            "matrix_optimizer": self.matrix.rule,
            "scalar_optimizer": self.scalar.rule,
            **{key: getattr(self, key) for key in _FOR_THE_RUN},
        }

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
        for key, why in NOT_HERE.items():
            if key in params:
                raise ConfigError(f"optimizer.params.{key} is not supported; {why}")
        general = str(section.get("type")).lower() == "layerwise"
        named = "muon"
        if general:
            named = _named(params, "matrix_optimizer", "muon", _matrix_names())
        matrix = recipe_at(named, for_matrices=True)
        default = "adam" if params.get("adam_w_mode") is False else "adamw"
        of_rest = _named(params, "scalar_optimizer", default, names(whole=False))
        scalar = recipe_at(of_rest, for_matrices=False)
        if named in names(whole=False):
            scalar = matrix
        model = params_model(matrix, scalar, general)
        refuse_of_others(params, matrix, scalar, {*model.keys()})
        _only_ours("optimizer.params", params, {*model.keys(), *_ALWAYS_TRUE, "adam_w_mode"})
        _drop_switches(params, scalar)
        preset = _preset(params, model)
        checked = build(model, "optimizer.params", {**preset, **params})
        for_the_run = _set_in(checked, _FOR_THE_RUN)
        if scalar is matrix:
            for_the_run.pop("per_head_muon", None)
        values = {
            **_set_in(checked, GroupSettings.model_fields),
            **for_the_run,
            "matrix": build(matrix, "optimizer.params", _set_in(checked, matrix.model_fields)),
            "scalar": build(scalar, "optimizer.params", _set_in(checked, scalar.model_fields)),
        }
        return cls(
            from_preset=tuple(preset),
            given=tuple(key for key, value in params.items() if value is not None),
            **_with_rates(values),
        )


def _drop_switches(params: dict[str, Any], scalar: type[Recipe]) -> None:
    """Remove the switches of stock DeepSpeed's Adam from ``params``; refuse unsupported values."""
    for key, why in _ALWAYS_TRUE.items():
        if params.pop(key, True) is not True:
            raise ConfigError(f"optimizer.params.{key} must be true, got false: {why}; remove it")
    is_adamw = check(bool, "optimizer.params.adam_w_mode", params.pop("adam_w_mode", True))
    if not is_adamw and scalar.rule != "adam":
        raise ConfigError(
            "optimizer.params.adam_w_mode is false, which means scalar_optimizer 'adam', got "
            f"{scalar.rule!r}; remove one of the two"
        )


def _set_in(checked: Section, keys: Iterable[str]) -> dict[str, Any]:
    return checked.model_dump(include={*keys}, exclude_unset=True)


def _matrix_names() -> tuple[str, ...]:
    """Return the valid names for ``matrix_optimizer``: optimizers of whole matrices, or of
    everything.
    """
    return (*names(whole=True), *names(whole=False))


#: The keys that neither a parameter group nor a recipe has.
_FOR_THE_RUN = ("per_head_muon", "decay_vectors", "scalar_weight_decay", "preset")

#: The switches of stock DeepSpeed's auxiliary Adam that describe what this backend always does.
_ALWAYS_TRUE = {
    "torch_adam": "the scalar optimizer runs on torch's own AdamW",
    "foreach": "all updates run on lists of tensors",
    "fp32_optimizer_states": "masters and states are float32",
    "bias_correction": "averages are corrected as each optimizer does it",
}


def _named(params: Mapping[str, Any], key: str, default: str, known: Sequence[str]) -> str:
    name: str = check(any_of(*known), f"optimizer.params.{key}", params.get(key, default))
    return name


#: The settings of the size of an update. If a config sets the first one, none of them comes from
#: the preset.
_SIZE = ("scale_mode", "extra_scale_factor", "muon_lr")

#: The hooks that replace the scale of a preset; see :class:`.update_hooks.UpdateHooks`.
_HOOKS = ("hyperball", "relative_update")


def _preset(params: Mapping[str, Any], model: type[Section]) -> Mapping[str, Any]:
    """Return the settings of the preset in ``params``, except those that ``params`` sets itself."""
    if params.get("preset") is None:
        return {}
    name: str = check(Literal[tuple(PRESETS)], "optimizer.params.preset", params["preset"])
    for key in PRESETS[name]:
        if key not in model.keys():
            raise ConfigError(
                f"optimizer.params.preset is {name!r}, which sets {key}, and matrix_optimizer "
                f"{params.get('matrix_optimizer')!r} has no such setting; remove one of the two"
            )
    left_out = {*params}
    if "scale_mode" in params or any(map(params.get, _HOOKS)):
        left_out.update(_SIZE)
    return {key: value for key, value in PRESETS[name].items() if key not in left_out}


@lru_cache(maxsize=None)
def params_model(matrix: type[Recipe], scalar: type[Recipe], general: bool) -> type[Section]:
    """Return the model of ``optimizer.params`` for two recipes.

    Args:
        general: True for the type "LayerWise".
    """
    # A recipe for everything replaces another one, whose settings may stay in the config.
    others = recipes_of_settings() if scalar is matrix else (scalar,)
    kinds = (*others, matrix)
    fields = {}
    for kind in kinds:
        fields.update(_fields_of(kind, kind.model_fields))
    fields.update(_fields_of(OptimizerConfig, _FOR_THE_RUN))
    fields["scalar_optimizer"] = (any_of(*names(whole=False)), "adamw")
    if general:
        fields["matrix_optimizer"] = (any_of(*_matrix_names()), "muon")
    model = create_model("optimizer.params", __base__=GroupSettings, **fields)
    return model


def _fields_of(section: type[Section], keys: Iterable[str]) -> dict[str, Any]:
    """Return the fields ``keys`` of ``section`` in the form for pydantic's ``create_model``."""
    fields = section.model_fields
    return {key: (fields[key].annotation, fields[key]) for key in keys}


@lru_cache(maxsize=None)
def _all_params() -> tuple[str, ...]:
    of_recipes = merged_keys(recipes_of_settings())
    return tuple(dict.fromkeys((*params_model(Muon, AdamW, True).keys(), *of_recipes)))


def _with_rates(values: dict[str, Any]) -> dict[str, Any]:
    lr = values.get("lr")
    if lr == 0:
        raise ConfigError(
            "optimizer.params.lr must be greater than 0: muon_lr and adam_lr are kept in ratio to "
            "it, got 0; let a scheduler start at 0 instead"
        )
    kind = values["matrix"]
    as_adamw = kind.takes_rate_of_adamw
    if lr is not None and "muon_lr" not in values and not as_adamw:
        one_rate = ""
        if kind.as_adamw:
            one_rate = f", or set {kind.as_adamw}, with which lr is right for both"
        raise ConfigError(
            f"optimizer.params.lr is {lr:g} without muon_lr, and {kind.rule.capitalize()}'s rate "
            f"is far from AdamW's: give muon_lr, such as {DEFAULT_MUON_LR}{one_rate}"
        )
    values.setdefault("adam_lr", DEFAULT_ADAM_LR if lr is None else lr)
    values.setdefault("lr", values["adam_lr"] or DEFAULT_ADAM_LR)
    values.setdefault("muon_lr", values["lr"] if as_adamw else DEFAULT_MUON_LR)
    return values


class Monitor(Section):
    """Statistics of updates, for each optimizer by name, over all parameters that it trains."""

    example = '{"update_rms": true}'

    update_rms: bool = False
    """Report the root mean square of the changes of float32 weights, including learning rate and
    weight decay.
    """
    momentum_norm: bool = False
    """Report the norm of the momentum (``momentum_buffer``, or ``exp_avg``) after an update."""
    every: Count = 1
    """The number of updates from one report to the next."""

    @property
    def asks(self) -> bool:
        """True if anything is to be reported."""
        return self.update_rms or self.momentum_norm


class LayerWiseConfig(Section):
    """The ``layerwise`` section: the layout of the work. Every key is optional."""

    layout: LayoutPolicy = "balanced"
    """The policy that chooses the owners of matrices; see
    :mod:`ds_layerwise.plan.layout.planner`.
    """
    reduction: Reduction = "auto"
    """The method to sum gradients over ranks; see :mod:`ds_layerwise.ranks.sync.bucket_transfers`.
    "auto" is "ordered" on a CPU.
    """
    alignment: Count = 64
    """Every parameter starts at a multiple of this many elements."""
    max_skipped_steps: OrNull[Count] = 100
    """Raise an error after this many consecutive skipped steps, skipped because a gradient was not
    finite or the norm exceeded ``grad_norm_skip_threshold``; None to never stop.
    """
    grad_norm_skip_threshold: OrNull[Positive] = None
    """Skip a step whose gradients have a larger norm than this; Megatron-LM's key. None for no
    bound.
    """
    max_waiting_buckets: OrNull[Count] = None
    """At ZeRO stages 2 and 3, let the backward pass wait while more buckets than this are complete
    and not started; None for no bound.
    """
    log_num_zeros_in_grad: bool = False
    """Count the zeros in averaged gradients; Megatron-LM's key."""
    norm_groups: Mapping[str, NormGroup] = Field(default_factory=dict)
    """Groups of parameters, by name, with a norm of their own, and optionally a bound of it."""
    monitor: Monitor = Monitor()
    """The statistics of updates that DeepSpeed's monitor gets in addition to the usual ones."""
    verify_first_step: bool = False
    """Compare the first update with that of a single process; see
    :mod:`.zero.step.first_step`.
    """
    check_writes: OrNull[Count] = None
    """Compare all weights by value every so many steps, for writes that show nowhere; None for
    never. See :meth:`.LayerWiseZeroOptimizer.reload_weights`.
    """
    overlap_param_gather: bool = False
    """Wait for an updated parameter at its first use, not in ``step``."""
    auto_split: bool = True
    """Treat the known parts of fused matrices as matrices; see :mod:`.routing.fused_parts`."""
    param_wire: OrNull[ParamWire] = None
    """The format in which updated bfloat16 matrices are sent, and to which their weights are
    rounded; see :mod:`ds_layerwise.optimizers.mxfp8`. None for their dtype.
    """
    master_dtype: MasterDtype = "float32"
    """The form of the masters of bfloat16 parameters; see
    :mod:`ds_layerwise.optimizers.dtypes`.
    """
    rounding_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """The seed for stochastic rounding of states (``stochastic_rounding``)."""
    cuda_graph: bool = False
    """Capture the update of each bucket as a CUDA graph, and replay it; see
    :mod:`.ranks.owned.captured`. Megatron-LM's ``optimizer_cuda_graph``.
    """
    batch_matrices: bool = True
    """Orthogonalise matrices of equal shape together."""
    save_universal: bool = False
    """Also write every checkpoint in DeepSpeed's universal format, beside the regular one."""
    fsync: bool = False
    """Complete a checkpoint only when all of its files are on the disk."""
    on_missing_state: OnMissingState = "fresh"
    """The action at a load for a parameter without optimizer state in the checkpoint."""
    on_optimizer_change: OnOptimizerChange = "error"
    """The action at a load for a parameter that another optimizer updated before."""
    on_hyper_change: OnHyperChange = "checkpoint"
    """The side that wins at a load if the config sets a group's hyper-parameter to a new value."""
    rename: Mapping[Name, Name] = Field(
        default_factory=dict,
        json_schema_extra={"expects": "an object of names in checkpoints to names in the model"},
    )
    """Globs over names in checkpoints, each with the name in the model. Each ``*`` stands for the
    same text in both.
    """
    overrides: tuple[Override, ...] = ()
    client_optimizer: ClientOptimizerConfig = ClientOptimizerConfig()
    """The settings for an optimizer that the script passes to ``initialize``; see
    :mod:`.zero.setup.client_groups`.
    """
    decoupled_lr: OrNull[NonNegative] = None
    """The learning rate of embeddings and output heads, like an override's ``lr``; Megatron-LM's
    key. None for that of the run.
    """
    decoupled_min_lr: OrNull[NonNegative] = None
    """The lowest learning rate of embeddings and output heads under any scheduler; None for no
    bound.
    """
    apply_wd_to_qk_layernorm: bool = False
    """Apply weight decay to the vectors of norms over queries and keys, even if other vectors have
    none; Megatron-LM's key.
    """
    mup: OrNull[Mup] = None
    """The narrower model for which learning rates and eps were chosen; see
    :mod:`.config.mup`. None if they are for this model.
    """
    qk_clip: OrNull[QkClip] = None
    """Scale queries and keys down if attention logits are too large; see
    :mod:`.config.qk_clip_settings`. None for never.
    """
    log_max_attention_logit: bool = False
    """Measure and report the largest attention logits, as ``qk_clip`` always does; Megatron-LM's
    key.
    """
    table: Literal["full", "short"] = "full"
    """The table at start, or one line in its place."""
    dump_param_map: OrNull[Name] = None
    """A file that rank 0 writes at start, with the output of ``ds-layerwise plan --list --json``;
    None for none.
    """

    @classmethod
    def from_section(cls, section: object) -> LayerWiseConfig:
        """Parse the top-level ``layerwise`` section of a DeepSpeed config."""
        if not isinstance(section, Mapping):
            raise ConfigError(f"layerwise must be an object, got {section!r}")
        _only_ours("layerwise", section, cls.keys())
        values = dict(section)
        for key, parse in _SECTIONS.items():
            if values.get(key) is not None:
                values[key] = parse(f"layerwise.{key}", values[key])
        found = build(cls, "layerwise", values)
        lr = found.decoupled_lr
        min_lr = found.decoupled_min_lr
        if lr is not None and min_lr is not None and min_lr > lr:
            raise ConfigError(
                f"layerwise.decoupled_min_lr is {min_lr:g}, above layerwise.decoupled_lr, which is "
                f"{lr:g}; lower it"
            )
        return found


def _rename_of(where: str, entries: object) -> object:
    """Return ``entries`` as they are, and refuse a pair that renames nothing.

    Raises:
        ConfigError: names the pair.
    """
    if not isinstance(entries, Mapping):
        return entries
    for old, new in entries.items():
        if not all(isinstance(name, str) and name for name in (old, new)):
            raise ConfigError(
                f"{where} must be an object of names in checkpoints to names in the model, got "
                f"{old!r}: {new!r}; a name is a text that is not empty"
            )
        if old.count("*") != new.count("*"):
            raise ConfigError(
                f"{where}[{old!r}] has {old.count('*')} times '*', its new name {new!r} "
                f"{new.count('*')}; each stands for the same text in both"
            )
    return entries


#: The functions that parse sections within ``layerwise``.
_SECTIONS: dict[str, Any] = {
    "mup": partial(build, Mup),
    "qk_clip": QkClip.from_section,
    "norm_groups": norm_groups_of,
    "rename": _rename_of,
    "overrides": partial(entries_of, Override.from_entry),
    "client_optimizer": partial(build, ClientOptimizerConfig),
    "monitor": partial(build, Monitor),
}
