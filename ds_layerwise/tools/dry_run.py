"""A run before it starts: a model and a config from files, and the plans that training would make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_layerwise.errors import ConfigError
from ds_layerwise.plan.config_file import fill_in, read_config
from ds_layerwise.plan.forecast import Forecast, forecast, specs_of
from ds_layerwise.plan.layout import ParamSpec
from ds_layerwise.plan.links import links_of_run
from ds_layerwise.plan.listing import listed
from ds_layerwise.plan.model_file import deal_out_experts, find_model, is_hf_config, load_model, route_model
from ds_layerwise.plan.prediction import Prediction, predict
from ds_layerwise.plan.rates import check_peaks
from ds_layerwise.plan.routes import Route
from ds_layerwise.plan.run_config import RunConfig
from ds_layerwise.plan.ways import Reduction, reduction_of_run


@dataclass(frozen=True, slots=True)
class DryRun:
    """The outcome: what the start-up table is made of, for each number of ranks."""

    run: RunConfig
    routes: Mapping[str, Route]
    specs: Sequence[ParamSpec]
    forecasts: Sequence[Forecast]
    assumed: Mapping[str, Any]
    """By path in the config, the values that were taken for "auto"."""
    predictions: Sequence[Prediction]
    """What each of the forecasts takes."""

    @classmethod
    def of(cls, model: str, config: Path, ranks: Sequence[int], *, links: str | None = None,
           reduction: Reduction | None = None, ranks_per_node: int | None = None, ep_size: int = 1) -> DryRun:
        """Plan ``model``, a file or a name, as the DeepSpeed config in a file would train it on each of ``ranks``.

        Args:
            links: a name or a file, see :func:`.plan.links.find_links`; what the config says if None, where "auto"
                stands for devices that talk.
            reduction: what the config says if None.
            ranks_per_node: as the links have it if None.
            ep_size: how many ranks share the experts of a layer; each of them then plans with its own.

        Raises:
            ConfigError: a file cannot be read, or says what training would refuse.
            RoutingError: a parameter cannot go where it was sent.
        """
        given, path = read_config(config), find_model(model)
        hf = None
        if is_hf_config(path):
            from ds_layerwise.tools.hf_model import HfShapes
            _read(fill_in(given)[0])  # its mistakes come before building anything
            hf = HfShapes(path)
        filled, assumed = fill_in(given, hidden_size=hf.hidden_size if hf else None)
        run = _read(filled)
        talks = links_of_run(links or run.layerwise.links, on_host=False, ranks_per_node=ranks_per_node,
                             where="links" if links else "layerwise.links")
        sums = reduction_of_run(reduction or run.layerwise.reduction, on_host=talks.on_host)
        overrides, per_head, recipes = run.layerwise.overrides, run.optimizer.per_head_muon, run.optimizer.recipes
        if hf is not None:
            shapes, routes = hf.params, hf.route(overrides, per_head=per_head, recipes=recipes)
        else:
            params = load_model(path)
            shapes = [(p.name, p.shape) for p in params]
            routes = route_model(params, overrides, per_head=per_head, recipes=recipes)
        in_use = {route.recipe for route in routes.values()}
        if any(recipe != type(recipe)() for recipe in in_use):
            # What only the rules know of their settings takes torch to find out.
            from ds_layerwise.optimizers.registry import check_recipes
            check_recipes(in_use)
        chosen = run.optimizer
        check_peaks(filled.get("scheduler"), [{"lr": chosen.lr, "matrix_lr_ratio": chosen.matrix_lr_ratio,
                                               "scalar_lr_ratio": chosen.scalar_lr_ratio}], chosen,
                    used={0: {route.recipe.lr_ratio for route in routes.values()}})
        shapes, experts = deal_out_experts(shapes, ep_size)
        routes = {name: routes[name] for name, _ in shapes if name in routes}
        specs = specs_of(((name, shape, run.param_dtype) for name, shape in shapes), routes, ep_size=experts)
        forecasts = [forecast(specs, routes, run, num_ranks, links=talks, reduction=sums) for num_ranks in ranks]
        return cls(run, routes, specs, forecasts, assumed, [
            predict(each, specs, run, links=talks, reduction=sums) for each in forecasts])

    def listed(self, plan: Forecast) -> list[dict[str, Any]]:
        """Every parameter's route, for one of the forecasts; see :func:`.plan.listing.listed`."""
        chosen = self.run.optimizer
        group = {"weight_decay": chosen.weight_decay, "matrix_lr_ratio": chosen.matrix_lr_ratio,
                 "scalar_lr_ratio": chosen.scalar_lr_ratio}
        return listed(self.routes, self.specs, plan.layout, [group])


def _read(given: Mapping[str, Any]) -> RunConfig:
    """The config, as far as shapes alone can tell what becomes of it.

    Raises:
        ConfigError: training refuses it, or they cannot.
    """
    run = RunConfig.from_ds_config(given)
    if run.autocast:
        raise ConfigError("torch_autocast.enabled is true, and shapes do not say which modules it makes send their "
                          "gradients in half precision; plan without it")
    if (given.get("tensor_parallel") or {}).get("autotp_size") not in (None, 0, 1):
        raise ConfigError("tensor_parallel.autotp_size is not 1, and shapes of a whole model do not say how AutoTP "
                          "cuts them; plan without it")
    return run
