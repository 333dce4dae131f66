"""Dry runs: the plans that training would make for a model and a config from files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ds_layerwise.config.config_file import at, fill_in
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.engine.config_hook import check_for, read_file
from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.rule_registry import check_recipes
from ds_layerwise.plan.forecast.forecast import Forecast, forecast, specs_of
from ds_layerwise.plan.forecast.model_file import (
    deal_out_experts,
    find_model,
    is_hf_config,
    read_model,
    route_model,
)
from ds_layerwise.plan.forecast.param_list import listed
from ds_layerwise.plan.forecast.prediction import Prediction, predict
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.network.links import Links, links_of_run
from ds_layerwise.plan.network.reduction import Reduction, reduction_of_run
from ds_layerwise.plan.routes.group_defaults import ByKind, idle_keys
from ds_layerwise.plan.routes.low_bit_checks import check_kept
from ds_layerwise.plan.routes.override_matching import check_norm_groups
from ds_layerwise.plan.routes.rate_checks import check_floors, check_peaks, check_taken
from ds_layerwise.plan.routes.routes import Route, Routes
from ds_layerwise.plan.routes.tensor_parallel_routes import Cutter, cut
from ds_layerwise.tools.hf_model import HfShapes

#: The keys of ``zero_optimization`` that a plan depends on, and that no Trainer fills in.
_LEFT_TO_DEEPSPEED = """
    reduce_bucket_size overlap_comm compute_grad_norm cpu_offload offload_optimizer.ratio
""".split()


@dataclass(frozen=True)
class DryRun:
    """The content of the start-up tables for each number of ranks."""

    run: RunConfig
    routes: Routes
    specs: Sequence[ParamSpec]
    forecasts: Sequence[Forecast]
    assumed: Sequence[str]
    """Lines with the assumptions."""
    predictions: Sequence[Prediction]
    """A prediction for each of the forecasts."""
    tp_size: int
    """The number of ranks that the model is cut for. Forecasts are for one of its parts."""

    @classmethod
    def of(
        cls,
        model: str,
        config: Path | Mapping[str, Any],
        ranks: Sequence[int],
        *,
        links: str | None = None,
        reduction: Reduction | None = None,
        ranks_per_node: int | None = None,
        ep_size: int = 1,
        tp_size: int | None = None,
        memory_bytes: int | None = None,
    ) -> DryRun:
        """Plan ``model``, a file or a name, for training with a DeepSpeed config, or the file with
        it, on each number of ``ranks``.

        Args:
            links: a name or a file, see :func:`.plan.network.links.find_links`; None for the value
                of the config, where "auto" assumes that devices communicate.
            reduction: None for the value of the config.
            ranks_per_node: None for the value of the links.
            ep_size: the number of ranks that share the experts of a layer; each plans with its own
                experts.
            tp_size: the number of tensor-parallel ranks in addition to ``ranks``; None for the
                value of the config.
            memory_bytes: the memory of one device; None to not check whether it suffices.

        Raises:
            ConfigError: a file cannot be read, or has settings that training would refuse.
            RoutingError: a parameter cannot be trained by its chosen optimizer.
        """
        given = read_file(config) if isinstance(config, Path) else config
        path = find_model(model)
        for num_ranks in ranks:
            zero = check_for(fill_in(given)[0], num_ranks)  # find mistakes before building anything
        route: Callable[..., dict[str, Route]]
        hf = None
        if is_hf_config(path):
            hf = HfShapes(path)
            shapes = hf.params
            route = hf.route
            hidden_size = hf.hidden_size
        else:
            file = read_model(path)
            shapes = [(p.name, p.shape) for p in file.params]
            route = partial(route_model, file.params)
            hidden_size = file.hidden_size
        filled, by_trainer = fill_in(given, hidden_size=hidden_size)
        run = RunConfig.from_ds_config(filled)
        tp_size, cutter = _tensor_parallel(filled, tp_size, ep_size, run.stage)
        links_by_ranks, of_nodes = _links(links, run, ranks, ranks_per_node, tp_size)
        sums = reduction_of_run(
            reduction or run.layerwise.reduction, on_host=links_by_ranks[0].on_host
        )
        routes = route(
            run.layerwise.overrides,
            per_head=run.optimizer.per_head_muon,
            recipes=run.optimizer.recipes,
            auto_split=run.layerwise.auto_split,
            by_kind=ByKind(run.optimizer, run.layerwise),
        )
        check_norm_groups([each for each in shapes if each[0] in routes], run.layerwise.norm_groups)
        run = _checked(run, routes, filled.get("scheduler"))
        shapes, experts = deal_out_experts(shapes, ep_size)
        if hf is not None:
            hf.check_heads(tp_size)
        routes = {name: routes[name] for name, _ in shapes if name in routes}
        shapes, routes = cut(shapes, routes, tp_size, cutter)
        specs = specs_of(
            ((name, shape, run.param_dtype) for name, shape in shapes),
            routes,
            ep_size=experts,
            wires=dict.fromkeys(routes, run.sent_as(run.param_dtype)),
            tp_size=tp_size,
        )
        check_kept(routes, specs, [run.optimizer.group()], run.layerwise, host_ratio=run.host_ratio)
        forecasts = []
        predictions = []
        for num_ranks, on in zip(ranks, links_by_ranks, strict=True):
            where: dict[str, Any] = {"links": on, "reduction": sums, "tp_size": tp_size}
            plan = forecast(specs, routes, run, num_ranks, **where)
            forecasts.append(plan)
            prediction = predict(plan, specs, routes, run, memory_bytes=memory_bytes, **where)
            predictions.append(prediction)
        assumed = [*_for_auto(by_trainer, filled, zero), *of_nodes]
        return cls(run, routes, specs, forecasts, assumed, predictions, tp_size)

    def listed(self, plan: Forecast) -> list[dict[str, Any]]:
        """Return every route of ``plan``; see :func:`.plan.forecast.param_list.listed`."""
        return listed(self.routes, self.specs, plan.layout, [self.run.optimizer.group()])


def _checked(run: RunConfig, routes: Routes, scheduler: Any) -> RunConfig:
    """Check the settings of ``run`` that depend on ``routes``, and record which of its keys have no
    effect.
    """
    if run.autocast:
        raise ConfigError(
            "torch_autocast.enabled is true, and shapes do not say which modules it makes send "
            "their gradients in half precision; plan without it"
        )
    group = run.optimizer.group()
    in_use = {route.recipe for route in routes.values()}
    check_recipes(in_use)
    check_taken(run.optimizer, routes)
    check_floors(routes, [group])
    ratios = {recipe.lr_ratio for recipe in in_use}
    check_peaks(scheduler, [group], run.optimizer, used={0: ratios})
    idle = idle_keys(run.optimizer, run.layerwise, routes.values())
    return replace(run, without_effect=(*run.without_effect, *idle))


def _for_auto(
    by_trainer: Mapping[str, Any], filled: Mapping[str, Any], zero: Mapping[str, Any]
) -> list[str]:
    lines = []
    for path, value in by_trainer.items():
        lines.append(
            f'assumed for "auto", which a Trainer by default fills in like this: {path} = '
            f"{json.dumps(value)}"
        )
    for path in _LEFT_TO_DEEPSPEED:
        if at(filled, f"zero_optimization.{path}") != "auto":
            continue
        why = ""
        if path == "reduce_bucket_size":
            why = ", because the model has no hidden_size, whose square a Trainer would use"
        lines.append(
            f'assumed for "auto", for which DeepSpeed uses its default{why}: zero_optimization.'
            f"{path} = {json.dumps(at(zero, path))}"
        )
    return lines


def _tensor_parallel(
    given: Mapping[str, Any], tp_size: int | None, ep_size: int, stage: int
) -> tuple[int, Cutter]:
    """Return the number of ranks that the model is cut for, and what cuts it.

    Raises:
        ConfigError: shapes do not determine the result of the config, it differs from ``tp_size``,
            or experts are shared as well, or stage 3 or sequence parallelism is asked for with
            either.
    """
    section = given.get("tensor_parallel") or {}
    of_config = section.get("autotp_size")
    cutter: Cutter = "autotp"
    if of_config in (None, 0):
        cutter = "megatron"
        of_config = tp_size or 1
    if type(of_config) is not int or of_config < 1:
        raise ConfigError(
            f"tensor_parallel.autotp_size must be a whole number from 0 on, got {of_config!r}"
        )
    if tp_size not in (None, of_config):
        raise ConfigError(
            f"tensor_parallel.autotp_size is {of_config}, and tp_size {tp_size}; leave one of them "
            "out"
        )
    others = sorted(section.keys() - {"autotp_size"})
    if cutter == "autotp" and of_config > 1 and others:
        raise ConfigError(
            f"tensor_parallel.{others[0]} may change how AutoTP cuts the model, which shapes do "
            "not say; plan without it"
        )
    if of_config > 1 and ep_size > 1:
        raise ConfigError(
            f"ep_size is {ep_size} and tp_size {of_config}; experts and tensor parallelism do not "
            "go together here: plan with one of them"
        )
    sequences = given.get("sequence_parallel_size", 1)
    other = {3: "stage 3"}.get(stage) or "sequence parallelism" * (sequences > 1)
    for key, size, what in (
        ("tp_size", of_config, "tensor parallelism"),
        ("ep_size", ep_size, "shared experts"),
    ):
        if size > 1 and other:
            raise ConfigError(
                f"{key} is {size}, and the config asks for {other}; {other} goes together with no "
                f"{what} here: plan without {key}, or without {other}"
            )
    return of_config, cutter


def _links(
    links: str | None,
    run: RunConfig,
    ranks: Sequence[int],
    ranks_per_node: int | None,
    tp_size: int,
) -> tuple[list[Links], list[str]]:
    """Return the links between ranks with the same part of the model, for each of ``ranks``, as a
    run would use them, and lines about nodes.

    Raises:
        ConfigError: as in :func:`.plan.network.links.find_links`; or tensor-parallel ranks would be
            spread unevenly over nodes.
    """
    where = "links" if links else "layerwise.links"
    links_with = partial(links_of_run, links or run.layerwise.links, on_host=None, where=where)
    full = links_with(ranks_per_node=ranks_per_node)
    per_node = full.ranks_per_node
    lines = []
    if tp_size > 1:
        if per_node % tp_size and tp_size % per_node:
            raise ConfigError(
                f"of tp_size {tp_size} and the {per_node} ranks per node ({where}), one must "
                "divide the other; plan with another tp_size, or set ranks_per_node"
            )
        same_part = max(1, per_node // tp_size)
        full = links_with(ranks_per_node=same_part, places=per_node // same_part)
        lines.append(
            f"tensor parallelism over {tp_size} ranks: numbers are of one of them, and --ranks are "
            f"those with the same part of the model, of which a node has {same_part}"
        )
    uneven = []
    for num_ranks in ranks:
        if not full.are_full(num_ranks):
            uneven.append(str(num_ranks))
    if uneven:
        lines.append(
            f"assumed for {', '.join(uneven)} ranks, of which nodes of {full.ranks_per_node} would "
            "have different numbers: sums are not made inside nodes first, and transports are "
            "chosen as for one rank per node, as in a run there; start the same number on each "
            "node, and set it with --ranks_per_node"
        )
    lonely = links_with(ranks_per_node=1, places=per_node)
    return [full if full.are_full(num_ranks) else lonely for num_ranks in ranks], lines
