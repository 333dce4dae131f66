"""The registry of optimizers: for each name in configs, the recipe and the class of its rule."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.recipe import Recipe
from ds_layerwise.optimizers.foreign import any_torch_recipe
from ds_layerwise.optimizers.recipes import elementwise_recipes as elementwise
from ds_layerwise.optimizers.recipes import muon_recipes as muon
from ds_layerwise.optimizers.recipes.adafactor_recipe import Adafactor
from ds_layerwise.optimizers.recipes.shampoo_recipe import Shampoo
from ds_layerwise.optimizers.recipes.soap_recipe import KlSoap, Soap


class Entry(NamedTuple):
    """An optimizer. The rule is given by name and not imported, because it needs torch."""

    recipe: type[Recipe]
    rule: str
    """``module:Class``. The class is built from the recipe, see
    :func:`ds_layerwise.optimizers.rule_registry.rule_of`.
    """


_RULES: dict[type[Recipe], str] = {
    muon.Muon: "muon_family:Muon",
    muon.NorMuon: "muon_family:NorMuon",
    muon.AdaMuon: "muon_family:AdaMuon",
    muon.Namo: "muon_family:Namo",
    muon.Scion: "muon_family:Scion",
    muon.PolarGrad: "muon_family:PolarGrad",
    Adafactor: "adafactor:Adafactor",
    Soap: "soap:Soap",
    KlSoap: "soap:Soap",
    Shampoo: "shampoo:Shampoo",
    elementwise.AdamW: "elementwise:Adam",
    elementwise.Adam: "elementwise:Adam",
    elementwise.Lion: "elementwise:Lion",
    elementwise.Sgd: "elementwise:Sgd",
    elementwise.Signum: "elementwise:Signum",
    elementwise.LaProp: "elementwise:LaProp",
    elementwise.AdEMAMix: "elementwise:AdEMAMix",
}

REGISTRY: dict[str, Entry] = {
    recipe.rule: Entry(recipe, f"ds_layerwise.optimizers.rules.{rule}")
    for recipe, rule in _RULES.items()
}

#: The keys of other packages' optimizers that have another meaning here, each with the way out.
NOT_HERE = {
    "max_grad_norm": "set gradient_clipping at the top level",
    "use_shape_scaling": "scalar optimizers get pieces of parameters, and do not know the shape; "
    "set lr_scale to 2 / (rows + columns) in layerwise.overrides",
}


def entry_of(name: str, *, for_matrices: bool) -> Entry:
    """Return the optimizer for a name in a config: an entry of the registry, or a class by its
    path.

    Args:
        for_matrices: for a class by its path, True if it gets matrices; False for the rest.
    """
    if any_torch_recipe.is_path(name):
        recipe = any_torch_recipe.recipe_of(name, for_matrices=for_matrices)
        return Entry(recipe, "ds_layerwise.optimizers.foreign.any_torch:AnyTorch")
    return REGISTRY[name]


def recipes_of_settings() -> tuple[type[Recipe], ...]:
    """Return recipes that together have all settings."""
    recipes = (entry.recipe for entry in REGISTRY.values())
    return (*recipes, any_torch_recipe.MatrixTorch, any_torch_recipe.ScalarTorch)


def names(*, whole: bool) -> tuple[str, ...]:
    """Return the names of optimizers that need whole parameters, or of those that do not."""
    return tuple(name for name, entry in REGISTRY.items() if entry.recipe.whole is whole)


def refuse_of_others(
    params: Iterable[str], matrix: type[Recipe], scalar: type[Recipe], known: Collection[str]
) -> None:
    """Refuse keys of ``optimizer.params`` that are not ``known``, but belong to optimizers that are
    not in the run.

    Raises:
        ConfigError: names the first key, and the optimizers that have it.
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
        if owners := [name for name, entry in REGISTRY.items() if key in entry.recipe.keys()]:
            raise ConfigError(
                f"optimizer.params.{key} belongs to {' or '.join(owners)}, and this run has "
                f"{matrix.rule} for matrices (another: optimizer.type 'LayerWise' with "
                f"matrix_optimizer), {scalar.rule} for the rest (another: scalar_optimizer); "
                "choose that, or remove it"
            )
