"""The models that come with the package, and models of bare parameters, as planners and plans take them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.config.sections import Recipes
from ds_layerwise.optimizers.rules.muon_family import Muon
from ds_layerwise.orthogonalize.newton_schulz import NsMethod
from ds_layerwise.plan.forecast import forecast as of_plan
from ds_layerwise.plan.forecast.forecast import Forecast, specs_of
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.routing.routes import Route
from ds_layerwise.tools.dry_run import build_model
from tests.support.routing import route_parameters


@cache
def shipped(name: str) -> nn.Module:
    """Build a model that comes with the package, once."""
    return build_model(name)


def bare(shapes: Mapping[str, Sequence[int]], device: str = "meta") -> nn.Module:
    """Return a model with nothing but parameters of these names and shapes."""
    model = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        holder = model
        for part in path:
            if not hasattr(holder, part):
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.register_parameter(last, nn.Parameter(torch.zeros(*shape, device=device)))
    return model


#: A model of two layers, to be named on a command line.
SMALL = {"embed": (16, 64), "0.up": (16, 64), "0.down": (64, 16), "1.up": (16, 64), "1.down": (64, 16)}


def small() -> nn.Module:
    """Return a model with the parameters of :data:`SMALL`."""
    return bare(SMALL)


def routes_of(model: nn.Module, overrides: Sequence[Any] = (), **options: Any) -> dict[str, Route]:
    """Route all parameters of ``model`` in one group."""
    return route_parameters(model, [{"params": list(model.parameters())}], overrides=overrides, **options)


def specs_in(model: nn.Module, routes: Mapping[str, Route], dtype: str = "bfloat16") -> list[ParamSpec]:
    """Return the specs of ``model``, as if all its parameters were of ``dtype``."""
    return specs_of(((name, tuple(param.shape), dtype) for name, param in model.named_parameters()), routes)


def forecast(specs: Sequence[ParamSpec], routes: Mapping[str, Route], run: RunConfig, ranks: int,
             **options: Any) -> Forecast:
    """Forecast ``specs`` with gradients in the dtype in which ``run`` sends them."""
    sent = [replace(spec, wire=run.sent_as(spec.dtype)) for spec in specs]
    return of_plan.forecast(sent, routes, run, ranks, **options)


def load_model_specs(name: str, *, dtype: str = "bfloat16", method: NsMethod = "gram", steps: int = 5,
                     ep_size: int = 1) -> list[ParamSpec]:
    """Return the parameters of a model of the package, in model order; fused ones whole, and every expert a few
    matrices of its own.

    Args:
        dtype: of all parameters.
        method, steps: of the Newton-Schulz iteration that a matrix costs.
        ep_size: how many ranks share the experts of a layer, each with as many.
    """
    recipe = Muon(ns_method=method, ns_steps=steps)
    model = shipped(name)
    specs: list[ParamSpec] = []
    for spec in specs_in(model, routes_of(model, recipes=Recipes(matrix=recipe), auto_split=False), dtype):
        specs += _experts(spec, recipe, ep_size) if spec.name.endswith("experts.gate_up_proj") else [spec]
    return [spec for spec in specs if not spec.name.endswith("experts.down_proj")]


def _experts(stacked: ParamSpec, recipe: Muon, ep_size: int) -> Iterator[ParamSpec]:
    count, twice, width = stacked.shape
    shapes = {"gate_proj": (twice // 2, width), "up_proj": (twice // 2, width), "down_proj": (width, twice // 2)}
    where = stacked.name.removesuffix("gate_up_proj")
    for i in range(count // ep_size):
        for leaf, shape in shapes.items():
            yield replace(stacked, name=f"{where}{i}.{leaf}.weight", shape=shape, work=recipe.work(shape),
                          ep_size=ep_size)
