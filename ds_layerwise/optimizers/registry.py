"""The registry of optimizers: for each name in configs, its recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers import any_torch
from ds_layerwise.optimizers.recipe import Recipe
from ds_layerwise.optimizers.rules import elementwise, muon_family
from ds_layerwise.optimizers.rules.rmnp import Rmnp
from ds_layerwise.optimizers.rules.shampoo import Shampoo
from ds_layerwise.optimizers.rules.soap import KlSoap, Soap

_RECIPES: tuple[type[Recipe], ...] = (
    muon_family.Muon,
    muon_family.NorMuon,
    muon_family.AdaMuon,
    muon_family.Namo,
    muon_family.Scion,
    muon_family.PolarGrad,
    Rmnp,
    Soap,
    KlSoap,
    Shampoo,
    elementwise.AdamW,
    elementwise.Adam,
    elementwise.Lion,
    elementwise.Sgd,
)

REGISTRY: dict[str, type[Recipe]] = {recipe.rule: recipe for recipe in _RECIPES}

#: The optimizers that were rules of this package, each with the class that replaces it.
GONE = {
    "laprop": "pytorch_optimizer:LaProp",
    "ademamix": "pytorch_optimizer:AdEMAMix",
    "signum": "pytorch_optimizer:SignSGD",
    "adafactor": "torch.optim:Adafactor",
}

#: The keys of other packages' optimizers that have another meaning here, each with the way out.
NOT_HERE = {
    **dict.fromkeys(
        ("alpha", "beta3", "alpha_warmup_steps", "beta3_warmup_steps"),
        f"AdEMAMix is a class of another package: scalar_optimizer {GONE['ademamix']!r}, with its "
        'arguments, and "split": "element", in scalar_params',
    ),
    **dict.fromkeys(
        ("beta2_decay", "eps1", "eps2", "clip_threshold"),
        f"Adafactor is a class of torch: matrix_optimizer {GONE['adafactor']!r}, with its "
        "arguments (beta2_decay, eps, d) in matrix_params",
    ),
    "max_grad_norm": "set gradient_clipping at the top level",
    "use_shape_scaling": "scalar optimizers get pieces of parameters, and do not know the shape; "
    "set lr_scale to 2 / (rows + columns) in layerwise.overrides",
}


def recipe_at(name: str, *, for_matrices: bool) -> type[Recipe]:
    """Return the recipe for a name in a config: one of the registry, or of a class by its path.

    Args:
        for_matrices: for a class by its path, True if it gets matrices; False for the rest.
    """
    if any_torch.is_path(name):
        return any_torch.recipe_of(name, for_matrices=for_matrices)
    return REGISTRY[name]


@cache
def any_of(*named: str) -> Any:
    """Return the type of a key that allows one of ``named``, or the path of a class."""
    return Annotated[Literal[named] | any_torch.Path, BeforeValidator(_still_here)]


def _still_here(name: object) -> object:
    if isinstance(name, str) and name in GONE:
        arguments = "its arguments into matrix_params or scalar_params"
        if name != "adafactor":
            arguments = 'its arguments, and "split": "element", into scalar_params'
        raise ValueError(
            f"{name!r} is no optimizer of this package any more: write {GONE[name]!r}, the path of "
            f"its class, and {arguments}"
        )
    return name


def recipes_of_settings() -> tuple[type[Recipe], ...]:
    """Return recipes that together have all settings."""
    return (*REGISTRY.values(), any_torch.MatrixTorch, any_torch.ScalarTorch)


def names(*, whole: bool) -> tuple[str, ...]:
    """Return the names of optimizers that need whole parameters, or of those that do not."""
    return tuple(name for name, recipe in REGISTRY.items() if recipe.whole is whole)


def check_recipes(recipes: Iterable[Recipe], device: torch.device | None = None) -> None:
    """Refuse settings that nothing, or not ``device``, can run.

    Raises:
        ConfigError: names the setting.
    """
    for recipe in recipes:
        recipe.check(device)


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
        if owners := [name for name, kind in REGISTRY.items() if key in kind.keys()]:
            raise ConfigError(
                f"optimizer.params.{key} belongs to {' or '.join(owners)}, and this run has "
                f"{matrix.rule} for matrices (another: optimizer.type 'LayerWise' with "
                f"matrix_optimizer), {scalar.rule} for the rest (another: scalar_optimizer); "
                "choose that, or remove it"
            )
