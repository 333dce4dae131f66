"""Every optimizer there is, by the name that a config uses: its recipe, and the class of the rule
that runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.recipe import Recipe
from ds_layerwise.recipes.rules import (
    adafactor_recipe,
    adamuon_recipe,
    any_torch_recipe,
    elementwise_recipes,
    muon_recipe,
    namo_recipe,
    normuon_recipe,
    polargrad_recipe,
    scion_recipe,
    shampoo_recipe,
    soap_recipe,
)


class Entry(NamedTuple):
    """One optimizer. The rule is named, not imported: it takes torch."""

    recipe: type[Recipe]
    rule: str
    """``module:Class``; the class is built from the recipe, see
    :func:`ds_layerwise.optimizers.rule_registry.rule_of`.
    """


REGISTRY: dict[str, Entry] = {
    "muon": Entry(muon_recipe.Muon, "ds_layerwise.optimizers.rules.muon:Muon"),
    "normuon": Entry(normuon_recipe.NorMuon, "ds_layerwise.optimizers.rules.normuon:NorMuon"),
    "adamuon": Entry(adamuon_recipe.AdaMuon, "ds_layerwise.optimizers.rules.adamuon:AdaMuon"),
    "namo": Entry(namo_recipe.Namo, "ds_layerwise.optimizers.rules.namo:Namo"),
    "scion": Entry(scion_recipe.Scion, "ds_layerwise.optimizers.rules.scion:Scion"),
    "polargrad": Entry(
        polargrad_recipe.PolarGrad, "ds_layerwise.optimizers.rules.polargrad:PolarGrad"
    ),
    "adafactor": Entry(
        adafactor_recipe.Adafactor, "ds_layerwise.optimizers.rules.adafactor:Adafactor"
    ),
    "soap": Entry(soap_recipe.Soap, "ds_layerwise.optimizers.rules.soap:Soap"),
    "kl_soap": Entry(soap_recipe.KlSoap, "ds_layerwise.optimizers.rules.soap:Soap"),
    "shampoo": Entry(shampoo_recipe.Shampoo, "ds_layerwise.optimizers.rules.shampoo:Shampoo"),
    "adamw": Entry(elementwise_recipes.AdamW, "ds_layerwise.optimizers.rules.elementwise:Adam"),
    "adam": Entry(elementwise_recipes.Adam, "ds_layerwise.optimizers.rules.elementwise:Adam"),
    "lion": Entry(elementwise_recipes.Lion, "ds_layerwise.optimizers.rules.elementwise:Lion"),
    "sgd": Entry(elementwise_recipes.Sgd, "ds_layerwise.optimizers.rules.elementwise:Sgd"),
    "signum": Entry(elementwise_recipes.Signum, "ds_layerwise.optimizers.rules.elementwise:Signum"),
    "laprop": Entry(elementwise_recipes.LaProp, "ds_layerwise.optimizers.rules.elementwise:LaProp"),
    "ademamix": Entry(
        elementwise_recipes.AdEMAMix, "ds_layerwise.optimizers.rules.elementwise:AdEMAMix"
    ),
}

#: Keys of other packages' optimizers that mean something else here, and what to do.
NOT_HERE = {
    "max_grad_norm": "set gradient_clipping at the top level",
    "use_shape_scaling": "scalar optimizers see pieces of parameters, which have no shape; "
    "multiply the rate by 2 / "
    "(rows + columns) with lr_scale in layerwise.overrides",
}


def entry_of(name: str, *, whole: bool) -> Entry:
    """The optimizer that a config calls ``name``: one of the registry, or a class by its path.

    Args:
        whole: whether a class by its path is to have whole parameters.
    """
    if any_torch_recipe.is_path(name):
        return Entry(
            any_torch_recipe.recipe_of(name, whole=whole),
            "ds_layerwise.optimizers.foreign.any_torch:AnyTorch",
        )
    return REGISTRY[name]


def recipes_of_settings() -> tuple[type[Recipe], ...]:
    """Recipes that together have every setting there is."""
    return (
        *(entry.recipe for entry in REGISTRY.values()),
        any_torch_recipe.WholeTorch,
        any_torch_recipe.ElementTorch,
    )


def names(*, whole: bool) -> tuple[str, ...]:
    """The optimizers that need whole parameters, or those that do not."""
    return tuple(name for name, entry in REGISTRY.items() if entry.recipe.whole is whole)


def refuse_of_others(
    params: Iterable[str], matrix: type[Recipe], scalar: type[Recipe], known: Collection[str]
) -> None:
    """Refuse keys of ``optimizer.params`` that are not ``known``, and are those of optimizers that
    a run has not.

    Raises:
        ConfigError: names the first, and who has it.
    """
    for key in params:
        if key in known:
            continue
        if key in ("matrix_params", "scalar_params"):
            raise ConfigError(
                f"optimizer.params.{key} is for a class, named as package.module:Class in "
                f"{key.removesuffix('params')}optimizer (optimizer.type 'LayerWise' has both); "
                "write its entries as keys of optimizer.params"
            )
        if key == "matrix_optimizer":
            raise ConfigError(
                "optimizer.params.matrix_optimizer needs optimizer.type 'LayerWise', got "
                "'LayerWiseMuon', which has muon for matrices; change the type, or remove the key"
            )
        if of := [name for name, entry in REGISTRY.items() if key in entry.recipe.keys()]:
            raise ConfigError(
                f"optimizer.params.{key} belongs to {' or '.join(of)}, and this run has "
                f"{matrix.rule} for matrices (another: optimizer.type 'LayerWise' with "
                f"matrix_optimizer), {scalar.rule} for the rest (another: scalar_optimizer); "
                "choose that, or remove it"
            )
