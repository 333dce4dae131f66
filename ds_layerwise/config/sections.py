"""The two sections of a DeepSpeed config that this package reads, parsed once into frozen values.

``optimizer`` says which mathematics runs (:class:`OptimizerConfig`), ``layerwise`` how the work is
laid out (:class:`LayerWiseConfig`). Whoever holds one of these need not check it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, create_model

from ds_layerwise.errors import ConfigError, unknown_key
from ds_layerwise.recipes.base.dtypes import MasterDtype
from ds_layerwise.recipes.base.fields import (
    OR_NULL,
    Betas,
    Count,
    Decay,
    NonNegative,
    Positive,
    Section,
    build,
    check,
    entries_of,
    merged_keys,
    nearest,
)
from ds_layerwise.recipes.base.recipe import Recipe
from ds_layerwise.recipes.monitor import Monitor
from ds_layerwise.recipes.presets import PRESETS, started
from ds_layerwise.recipes.recipe_registry import (
    NOT_HERE,
    entry_of,
    names,
    recipes_of_settings,
    refuse_of_others,
)
from ds_layerwise.recipes.rules.any_torch_recipe import any_of
from ds_layerwise.recipes.rules.client_recipe import ClientOptimizerConfig
from ds_layerwise.recipes.rules.elementwise_recipes import AdamW
from ds_layerwise.recipes.rules.muon_recipes import Muon
from ds_layerwise.recipes.targets.mup import Mup
from ds_layerwise.recipes.targets.norm_groups import NormGroup, norm_groups_of
from ds_layerwise.recipes.targets.overrides import Override
from ds_layerwise.recipes.targets.qk_clip_settings import QkClip

#: The spellings of ``optimizer.type`` that select this backend, in lower case as DeepSpeed stores
#: them.
OPTIMIZER_TYPES = ("layerwisemuon", "layerwise")

Name = Annotated[str, Field(min_length=1)]
LayoutPolicy = Literal["balanced", "lpt", "size_matching"]
Reduction = Literal["auto", "ordered", "native"]
OnMissingState = Literal["fresh", "error"]
OnOptimizerChange = Literal["error", "reset", "keep_shared"]
OnHyperChange = Literal["checkpoint", "config"]

#: Learning rates of stock DeepSpeed's Muon and of its auxiliary Adam where the config names none.
DEFAULT_MUON_LR = 0.02
DEFAULT_ADAM_LR = 3e-4

#: What every parameter group says once it is built.
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
    """Tell whether a DeepSpeed config means this backend.

    It does by its type, or, beside an optimizer that a script gives, by a ``layerwise`` section
    without an ``optimizer`` section.
    """
    section = ds_config.get("optimizer")
    if isinstance(section, Mapping):
        kind = section.get("type")
    else:
        kind = None
    if isinstance(kind, str):
        return is_ours(kind)
    return section is None and "layerwise" in ds_config


def only_known(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a key of ``section`` that is not ``known``; the error suggests the nearest one."""
    for key in section:
        if key not in known:
            raise unknown_key(where, key, known)


def belongs_in(
    key: str, *, shared: Collection[str] = ("lr", "momentum", "weight_decay", "betas", "eps")
) -> str | None:
    """Return the place of ``key`` if it is one of our two sections, or nearly; None if it is not.

    Args:
        shared: the keys that have other meanings elsewhere.
    """
    for section, keys in (
        ("layerwise", LayerWiseConfig.keys()),
        ("optimizer.params", _all_params()),
    ):
        if close := nearest(key, [each for each in keys if each not in shared], cutoff=0.9):
            return f"{section}.{close}"
    return None


def _only_ours(where: str, section: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys that are not known, and say where a key of our other section belongs."""
    for key in section:
        if key in known:
            continue
        home = belongs_in(str(key), shared=())
        if str(key).lower().replace("_", "") == "layerwise":
            home = "layerwise at the top level"
        if home and home.rpartition(".")[0] != where:
            raise ConfigError(f"{where}.{key} is not an option; did you mean {home}?")
    only_known(where, section, known)


class Hyper(Section):
    """The settings that a parameter group may have, too: those of stock DeepSpeed's Muon."""

    lr: NonNegative = DEFAULT_ADAM_LR
    """The rate that schedulers move, ``param_groups[i]["lr"]``; the next two follow in ratio."""
    muon_lr: NonNegative = DEFAULT_MUON_LR
    """Learning rate of recipes that need whole matrices while ``lr`` stands at its configured
    value.
    """
    adam_lr: NonNegative = DEFAULT_ADAM_LR
    """Learning rate of element-wise recipes while ``lr`` stands at its configured value."""
    momentum: Decay = 0.95
    weight_decay: NonNegative = 0.0
    betas: Betas = (0.9, 0.95)
    eps: NonNegative = 1e-10


def check_hyper(where: str, key: str, value: object) -> Any:
    """Check one hyper-parameter that a parameter group may carry, and return it normalised.

    Raises:
        ConfigError: the value is out of its bounds; ``where`` is the name it is reported under.
    """
    return check(Hyper.model_fields[key].rebuild_annotation(), where, value)


class Recipes(NamedTuple):
    """The recipes of parameters of which nobody says more."""

    matrix: Recipe = Muon()
    """For matrices; for everything, if it does not need them whole."""
    scalar: Recipe = AdamW()
    """For the rest."""


class OptimizerConfig(Hyper):
    """``optimizer.params``: names, meanings and defaults of stock DeepSpeed's Muon, and more.

    Raises:
        ConfigError: on construction through :meth:`from_section`, naming the key, its value and its
            bound.
    """

    per_head_muon: bool = False
    """Orthogonalise every attention head of the query, key and value projections on its own."""
    decay_vectors: bool = False
    """Decay the weights of parameters with fewer than two axes, too: norms, biases, gains."""
    scalar_weight_decay: Annotated[NonNegative | None, OR_NULL] = None
    """Weight decay of element-wise recipes, in place of ``weight_decay``; None for the same."""
    preset: Annotated[Literal[tuple(PRESETS)] | None, OR_NULL] = None  # type: ignore[valid-type]
    """The published recipe with the values that the config leaves out; see :mod:`.recipes.presets`.
    """
    from_preset: tuple[str, ...] = ()
    """The keys that the preset has given."""
    given: tuple[str, ...] = ()
    """The keys that the config has."""
    matrix: Recipe = Muon()
    scalar: Recipe = AdamW()

    @property
    def recipes(self) -> Recipes:
        """The two recipes that parameters go to by the rules."""
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
        """Return the parameter group of a run that has but one, before any schedule."""
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
        if general:
            named = _named(params, "matrix_optimizer", "muon", _matrix_names())
        else:
            named = "muon"
        matrix = entry_of(named, whole=True).recipe
        scalar = entry_of(_scalar_name(params), whole=False).recipe
        if not matrix.whole:
            scalar = matrix
        model = params_model(matrix, scalar, general)
        refuse_of_others(params, matrix, scalar, {*model.keys()})
        _only_ours("optimizer.params", params, {*model.keys(), *ALWAYS_TRUE, "adam_w_mode"})
        _drop_switches(params, scalar)
        preset = _preset(params, model)
        checked = build(model, "optimizer.params", {**preset, **params})
        for_the_run = _set_in(checked, _FOR_THE_RUN)
        if not matrix.whole:
            for_the_run.pop("per_head_muon", None)
        values = {
            **_set_in(checked, Hyper.model_fields),
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
    """Take the switches of stock DeepSpeed's Adam out of ``params``; refuse other values."""
    for key, why in ALWAYS_TRUE.items():
        if params.pop(key, True) is not True:
            raise ConfigError(f"optimizer.params.{key} must be true, got false: {why}; remove it")
    is_adamw = check(bool, "optimizer.params.adam_w_mode", params.pop("adam_w_mode", True))
    if not is_adamw and scalar.rule != "adam":
        raise ConfigError(
            "optimizer.params.adam_w_mode is false, which means scalar_optimizer 'adam', got "
            f"{scalar.rule!r}; remove one of the two"
        )


def _set_in(checked: Section, keys: Iterable[str]) -> dict[str, Any]:
    found = {}
    for key in keys:
        if key in checked.model_fields_set:
            found[key] = getattr(checked, key)
    return found


def _matrix_names() -> tuple[str, ...]:
    """Return the names of ``matrix_optimizer``: optimizers of whole matrices, or of everything."""
    return (*names(whole=True), *names(whole=False))


#: Keys that neither a parameter group nor a recipe has.
_FOR_THE_RUN = ("per_head_muon", "decay_vectors", "scalar_weight_decay", "preset")

#: Switches of stock DeepSpeed's auxiliary Adam that describe what this backend does anyway.
ALWAYS_TRUE = {
    "torch_adam": "the scalar optimizer runs on torch's own AdamW",
    "foreach": "all updates run on lists of tensors",
    "fp32_optimizer_states": "masters and states are float32",
    "bias_correction": "averages are corrected as each optimizer does it",
}


def _named(params: Mapping[str, Any], key: str, default: str, known: Sequence[str]) -> str:
    name: str = check(any_of(*known), f"optimizer.params.{key}", params.get(key, default))
    return name


def _preset(params: Mapping[str, Any], model: type[Section]) -> Mapping[str, Any]:
    """Return the settings of the preset that ``params`` name, as far as they have none."""
    if params.get("preset") is None:
        return {}
    name: str = check(Literal[tuple(PRESETS)], "optimizer.params.preset", params["preset"])
    for key in PRESETS[name]:
        if key not in model.keys():
            raise ConfigError(
                f"optimizer.params.preset is {name!r}, which sets {key}, and matrix_optimizer "
                f"{params.get('matrix_optimizer')!r} has no such setting; remove one of the two"
            )
    return started(name, params)


def _scalar_name(params: Mapping[str, Any]) -> str:
    as_adam = params.get("adam_w_mode") is False and "scalar_optimizer" not in params
    return _named(params, "scalar_optimizer", "adam" if as_adam else "adamw", names(whole=False))


@lru_cache(maxsize=None)
def params_model(matrix: type[Recipe], scalar: type[Recipe], general: bool) -> type[Section]:
    """Return the model of ``optimizer.params`` for two recipes; ``general``: of "LayerWise"."""
    # One for everything takes the place of another, whose settings may stay.
    others = (scalar,) if matrix.whole else recipes_of_settings()
    kinds = (*others, matrix)
    fields: dict[str, Any] = {}
    for kind in kinds:
        fields.update(fields_of(kind, kind.model_fields))
    fields.update(fields_of(OptimizerConfig, _FOR_THE_RUN))
    fields["scalar_optimizer"] = (any_of(*names(whole=False)), "adamw")
    if general:
        fields["matrix_optimizer"] = (any_of(*_matrix_names()), "muon")
    model: type[Section] = create_model("optimizer.params", __base__=Hyper, **fields)
    return model


def fields_of(section: type[Section], keys: Iterable[str]) -> dict[str, Any]:
    """Return the fields ``keys`` of ``section`` as pydantic's ``create_model`` takes them."""
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


class LayerWiseConfig(Section):
    """The ``layerwise`` section: how the work is laid out. Every key is optional."""

    layout: LayoutPolicy = "balanced"
    """The policy by which matrices get owners; see :mod:`ds_layerwise.plan.planner.planner`."""
    reduction: Reduction = "auto"
    """The way that gradients are added up over ranks; see
    :mod:`ds_layerwise.ranks.sync.bucket_transfers`. "auto" is "ordered" on a CPU.
    """
    links: str = "auto"
    """The links that ways of buckets are chosen for: a set of :mod:`.plan.network.links` or a file;
    "auto" goes by what talks.
    """
    alignment: Count = 64
    """Every parameter starts at a multiple of this many elements."""
    max_skipped_steps: Annotated[Count | None, OR_NULL] = 100
    """An error after this many steps in a row that were skipped, as a gradient was not finite, or
    their norm above ``grad_norm_skip_threshold``; None for no end."""
    grad_norm_skip_threshold: Annotated[Positive | None, OR_NULL] = None
    """A step whose gradients have a greater norm than this is skipped; Megatron-LM's key. None for
    no bound.
    """
    max_waiting_buckets: Annotated[Count | None, OR_NULL] = None
    """At ZeRO stage 2, the backward pass waits while complete gradients of more buckets than this
    wait for their turn; None for no bound."""
    log_num_zeros_in_grad: bool = False
    """Count the elements of averaged gradients that are zero; Megatron-LM's key."""
    norm_groups: Mapping[str, NormGroup] = Field(default_factory=dict)
    """Groups of parameters, by name, with a norm of their own and perhaps a bound of it."""
    monitor: Monitor = Monitor()
    """The figures of updates that DeepSpeed's monitor gets beside the usual ones."""
    verify_first_step: bool = False
    """Compare the first update with what one process would have computed; see
    :mod:`.zero.verify.first_step`.
    """
    overlap_param_gather: bool = False
    """Wait for an updated parameter when it is used first, not in ``step``."""
    auto_split: bool = True
    """Take the parts of fused matrices that are known for matrices; see
    :mod:`.routing.find_fused_parts`.
    """
    master_dtype: MasterDtype = "float32"
    """The dtype of masters of bfloat16 parameters; see
    :mod:`ds_layerwise.optimizers.split_masters`.
    """
    rounding_seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """The seed of chance where states are rounded by chance (``stochastic_rounding``)."""
    batch_matrices: bool = True
    """Orthogonalise matrices of equal shape together."""
    save_universal: bool = False
    """Write every checkpoint in DeepSpeed's universal format, too, beside the regular one."""
    fsync: bool = False
    """Let no checkpoint count before all of its files are on the disk."""
    on_missing_state: OnMissingState = "fresh"
    """The way at a load with a parameter of which the checkpoint holds no optimizer state."""
    on_optimizer_change: OnOptimizerChange = "error"
    """The way at a load with a parameter that another optimizer updated before."""
    on_hyper_change: OnHyperChange = "checkpoint"
    """The winner at a load where the config gives a group another hyper-parameter than before."""
    rename: Mapping[Name, Name] = Field(
        default_factory=dict,
        json_schema_extra={"expects": "an object of names in checkpoints to names in the model"},
    )
    """Globs over names in checkpoints to names in the model, each ``*`` standing for the same text
    in both.
    """
    overrides: tuple[Override, ...] = ()
    client_optimizer: ClientOptimizerConfig = ClientOptimizerConfig()
    """Settings of an optimizer that the script gives to ``initialize``; see
    :mod:`.recipes.rules.client_recipe`.
    """
    decoupled_lr: Annotated[NonNegative | None, OR_NULL] = None
    """Learning rate of embeddings and output heads, as an override's ``lr``; Megatron-LM's key.
    None for the run's.
    """
    decoupled_min_lr: Annotated[NonNegative | None, OR_NULL] = None
    """No schedule takes the learning rate of embeddings and output heads below this; None for no
    bound.
    """
    apply_wd_to_qk_layernorm: bool = False
    """Decay vectors of norms over queries and keys though others are not; Megatron-LM's key."""
    mup: Annotated[Mup | None, OR_NULL] = None
    """Learning rates and eps are those of a narrower model; see :mod:`.recipes.targets.mup`. None:
    of this one.
    """
    qk_clip: Annotated[QkClip | None, OR_NULL] = None
    """Scale queries and keys down where attention logits are too large; see
    :mod:`.recipes.targets.qk_clip_settings`. None for never.
    """
    log_max_attention_logit: bool = False
    """Measure and report the largest attention logits, which ``qk_clip`` does anyway; Megatron-LM's
    key.
    """
    dump_param_map: Annotated[Name | None, OR_NULL] = None
    """A file that rank 0 writes at start: what ``ds-layerwise plan --list --json`` tells; None for
    none.
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
    "mup": Mup.from_section,
    "qk_clip": QkClip.from_section,
    "norm_groups": norm_groups_of,
    "rename": _rename_of,
    "overrides": partial(entries_of, Override.from_entry),
    "client_optimizer": partial(build, ClientOptimizerConfig),
    "monitor": partial(build, Monitor),
}
