"""The models that come with the package, as planners take them."""

from __future__ import annotations

from os import PathLike

from ds_layerwise.config.sections import Recipes
from ds_layerwise.optimizers.recipes.muon_recipes import Muon
from ds_layerwise.orthogonalize.newton_schulz_cost import NsMethod
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.plan.forecast.model_file import read_model, route_model
from ds_layerwise.plan.layout.layout import ParamSpec


def load_model_specs(path: str | PathLike[str], *, dtype: str = "bfloat16", method: NsMethod = "gram",
                     steps: int = 5) -> list[ParamSpec]:
    """Return the parameters of a model file, in model order; fused ones whole.

    Args:
        dtype: of all parameters.
        method, steps: of the Newton-Schulz iteration that a matrix costs.
    """
    params = read_model(path).params
    recipes = Recipes(matrix=Muon(ns_method=method, ns_steps=steps))
    return specs_of(((p.name, p.shape, dtype) for p in params), route_model(params, auto_split=False, recipes=recipes))
