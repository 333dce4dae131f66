"""The JSON schema of our two sections of a DeepSpeed config, for editors: ``ds-layerwise
schema``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, Union, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model

from ds_layerwise.config.conditions import NormGroup
from ds_layerwise.config.overrides import Override
from ds_layerwise.config.sections import (
    ALWAYS_TRUE,
    GroupSettings,
    LayerWiseConfig,
    fields_of,
    params_model,
)
from ds_layerwise.optimizers.fields import Positive, Section, merged_keys
from ds_layerwise.optimizers.registry import REGISTRY, any_of, recipes_of_settings
from ds_layerwise.optimizers.rules.elementwise import AdamW
from ds_layerwise.optimizers.rules.muon_family import Muon

#: The keys for which Hugging Face's Trainer fills in "auto".
_FILLED_IN = ("lr", "betas", "eps", "weight_decay")


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of our two sections of a DeepSpeed config, for editors. Other keys are
    DeepSpeed's.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema_model().model_json_schema(),
    }


@lru_cache(maxsize=None)
def schema_model() -> type[BaseModel]:
    """Return the model of :func:`json_schema`: a config in a file, which may have "auto" values."""
    of_recipes: dict[str, Any] = {}
    for key, recipe in merged_keys(recipes_of_settings()).items():
        of_recipes.update(fields_of(recipe, [key]))
    of_params: dict[str, Any] = {**of_recipes, "adam_w_mode": (bool, True)}
    for key in _FILLED_IN:
        field = GroupSettings.model_fields[key]
        # A rate of 0 would set all other rates to 0.
        bound = field.rebuild_annotation()
        if key == "lr":
            bound = Positive
        of_params[key] = (bound | Literal["auto"], field.default)
    for key, why in ALWAYS_TRUE.items():
        of_params[key] = (Literal[True], Field(True, description=why))
    params = create_model("optimizer.params", __base__=params_model(Muon, AdamW, True), **of_params)
    kind: Any = Literal["LayerWiseMuon", "LayerWise"]
    optimizer = create_model(
        "optimizer",
        __base__=Section,
        type=(kind, ...),
        params=(params, params()),
        legacy_fusion=(Literal[False], False),
    )
    of_entry: dict[str, Any] = {}
    for key, (_, field) in {**of_recipes, **fields_of(Override, Override.entry_keys())}.items():
        of_entry[key] = (_without_none(field.rebuild_annotation()), _optional())
    of_entry["optimizer"] = (any_of("matrix", "scalar", *REGISTRY), _optional())
    entry = create_model("layerwise.overrides", __base__=Section, **of_entry)
    entries: Any = tuple[entry, ...]  # type: ignore[valid-type]
    conditions = {key: of_entry[key] for key in NormGroup.condition_keys()}
    group = create_model("layerwise.norm_groups", __base__=NormGroup, **conditions)
    groups: Any = Mapping[str, group]  # type: ignore[valid-type]
    layerwise = create_model(
        "layerwise",
        __base__=LayerWiseConfig,
        overrides=(entries, ()),
        norm_groups=(groups, Field(default_factory=dict)),
    )
    return create_model(
        "DeepSpeed config with ds_layerwise",
        __config__=ConfigDict(extra="allow", strict=True),
        optimizer=(optimizer, _optional()),
        layerwise=(layerwise, layerwise()),
    )


def _without_none(annotation: Any) -> Any:
    """Return the type of a field, without the None that stands for a missing key."""
    kinds = tuple(kind for kind in get_args(annotation) if kind is not type(None))
    if type(None) in get_args(annotation):
        return Union[kinds]
    return annotation


def _optional() -> Any:
    return Field(None, json_schema_extra=_without_default)


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]
