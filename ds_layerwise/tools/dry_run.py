"""Dry runs: the plans that training would make for a model and a config from files, on the meta
device.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_layerwise.config.ds_config import at, retell
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.engine.config_hook import check_for, read_file
from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError
from ds_layerwise.optimizers.registry import check_recipes
from ds_layerwise.parallel import pipeline
from ds_layerwise.parallel.mesh import Mesh
from ds_layerwise.plan.forecast.forecast import Forecast, forecast
from ds_layerwise.plan.forecast.report import listed
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.plan.layout.transport import reduction_of_run
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.ranks.sync.param_cuts import refuse_second, refuse_unfetchable
from ds_layerwise.routing.module_of import config_value
from ds_layerwise.routing.override_matching import require_members
from ds_layerwise.routing.routes import Routes, idle_keys
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer
from ds_layerwise.zero.setup.rate_checks import check_peaks, check_taken
from ds_layerwise.zero.setup.run_plan import norm_groups_of, route

#: The folder of the models that come with the package, each a ``config.json`` of transformers.
_SHIPPED = Path(__file__).resolve().parent / "models"


def build_model(said: str) -> nn.Module:
    """Build the model that ``--model`` names, with shapes and dtypes, but no values.

    Args:
        said: the path of a ``config.json`` of transformers or of a folder with one, the name of
            one that comes with the package, or ``module:function``.

    Raises:
        ConfigError: it is none of these, or building the model fails.
    """
    for path in (Path(said), Path(said) / "config.json", _SHIPPED / f"{said}.json"):
        if path.is_file():
            with _without_warnings():
                return _of_transformers(said, path)
    module_name, colon, function_name = said.partition(":")
    if not colon:
        known = ", ".join(sorted(path.stem for path in _SHIPPED.glob("*.json")))
        raise ConfigError(
            "--model must be a config.json of transformers, a folder with one, "
            "module:function that returns a model, or the name of a model that comes with "
            f"this package ({known}), got {said!r}"
        )
    return _of_function(said, module_name, function_name)


def hidden_size_of(model: nn.Module) -> int | None:
    """Return the hidden size that a Trainer would use: the largest of several; None if there is
    none.
    """
    config = getattr(model, "config", None)
    return _hidden_size(config) or _hidden_size(getattr(config, "text_config", None))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence what libraries log of each other while a model is built."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _hidden_size(config: Any) -> int | None:
    sizes = config_value(config, "hidden_size") or config_value(config, "hidden_sizes")
    if not isinstance(sizes, list | tuple):
        sizes = [sizes]
    return max((size for size in sizes if isinstance(size, int)), default=None)


def _of_transformers(said: str, path: Path) -> nn.Module:
    # A plan must not download anything, whatever the file names.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers = import_module("transformers")
    except ImportError as e:
        raise ConfigError(
            f"--model {said} is built by transformers, which cannot be imported ({e}): pip install "
            "transformers"
        ) from e
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), trust_remote_code=False)
        kind = None
        for name in config.architectures or ():
            kind = kind or getattr(transformers, name, None)
        # The class itself, because from_config cuts parameters over the ranks of DeepSpeed where
        # a script has a config with ZeRO stage 3.
        kind = kind or transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            model: nn.Module = kind(config)
        model.tie_weights()  # type: ignore[operator]
    except (
        OSError,
        *FOREIGN_ERRORS,
        getattr(import_module("huggingface_hub.errors"), "StrictDataclassError", ValueError),
    ) as e:
        raise _cannot_build(f"{said} by transformers {transformers.__version__}", e) from e
    return model


def _of_function(said: str, module_name: str, function_name: str) -> nn.Module:
    if "" not in sys.path:
        # As `python -m` does: a script for plans lies where it is started.
        sys.path.insert(0, "")
    try:
        with torch.device("meta"):
            model = getattr(import_module(module_name), function_name)()
    except (OSError, *FOREIGN_ERRORS) as e:
        raise _cannot_build(said, e) from e
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"--model {said} must return a torch.nn.Module, got {type(model).__name__}"
        )
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ConfigError(
                f"--model {said} returns a model with a lazy {name}, which has no shape before a "
                "forward pass; build it with layers that know their sizes"
            )
    return model


def _cannot_build(said: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()[:40]) or "no reason given"
    return ConfigError(
        f"--model {said} cannot be built on the meta device: {type(error).__name__}: {reason}; "
        "name a module:function that builds it there"
    )


#: The values that Hugging Face's Trainer uses for "auto" with default TrainingArguments.
_FILLED_IN: dict[str, Any] = {
    "gradient_clipping": 1.0,
    "bf16.enabled": False,
    "fp16.enabled": False,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
}

#: Values for the "auto" keys that do not affect a plan. DeepSpeed takes None for a missing key.
_WITHOUT_EFFECT = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": None,
    "gradient_accumulation_steps": None,
    "scheduler.params.total_num_steps": 10**9,
    "scheduler.params.warmup_num_steps": 1,
}

#: The keys of ``zero_optimization`` that a plan depends on, and that no Trainer fills in.
_LEFT_TO_DEEPSPEED = """
    reduce_bucket_size overlap_comm compute_grad_norm cpu_offload offload_optimizer.ratio
""".split()


@dataclass(frozen=True)
class DryRun:
    """The content of the start-up tables for each number of ranks."""

    model: nn.Module
    """The model, which :meth:`of` has spread over the mesh."""
    run: RunConfig
    routes: Routes
    specs: Sequence[ParamSpec]
    forecasts: Sequence[Forecast]
    """With a pipeline, those of the stage that needs most memory, as ``specs`` and ``costs_of``."""
    assumed: Sequence[str]
    """Lines with the assumptions."""
    costs_of: Callable[..., Forecast]
    """Returns the forecast for a number of ranks, and optionally another ``bucket_numel``."""
    stages: Sequence[DryRun] = ()
    """The plans of all pipeline stages, in order."""

    @classmethod
    def of(
        cls,
        model: str | nn.Module,
        config: Path | Mapping[str, Any],
        ranks: Sequence[int],
        *,
        mesh: Mapping[str, int | None] | None = None,
    ) -> DryRun:
        """Plan ``model`` for training with a DeepSpeed config, or the file with it, on each number
        of ``ranks``.

        Args:
            model: a model, or the text that names one, see :func:`build_model`. It is spread over
                the mesh in place.
            mesh: the sizes of axes that the config does not have; see :meth:`.Mesh.of`.

        Raises:
            ConfigError: a file cannot be read, the model cannot be built, or the config has
                settings that training would refuse, or of which a plan knows too little.
            RoutingError: a parameter cannot be trained by its chosen optimizer.
        """
        given = read_file(config) if isinstance(config, Path) else config
        axes = Mesh.of(given, mesh or {})
        sharing = list(map(axes.sharing, ranks))
        given = {**given, "sequence_parallel_size": axes.sp}
        for num_ranks in sharing:
            zero = check_for(fill_in(given)[0], num_ranks)  # find mistakes before building anything
            refuse_second(zero["zero_hpz_partition_size"], num_ranks)
        if isinstance(model, str):
            model = build_model(model)
        filled, by_trainer = fill_in(given, hidden_size=hidden_size_of(model))
        run = RunConfig.from_ds_config(filled)
        if run.autocast:
            raise ConfigError(
                "torch_autocast.enabled is true, and an engine chooses the modules that send "
                "their gradients in half precision; plan without it"
            )
        if axes.pp > 1:
            pipeline.refuse_settings(given, run)
        if run.stage == 3:
            refuse_unfetchable(model)
        try:
            with _without_warnings():
                has_moe = axes.spread(model, filled)
        except FOREIGN_ERRORS as error:
            retell(error)
        is_cut = axes.tp * axes.pp > 1 or min(axes.ep, axes.sp) > 1
        if run.stage == 3 and (has_moe or is_cut):
            raise ConfigError(
                "zero_optimization.stage is 3, and experts of deepspeed.moe, experts together with "
                "sequences, pipelines or tensor parallelism spread the model over ranks as well; "
                "set zero_optimization.stage to 2"
            )
        # As an engine does.
        if run.param_dtype != "float32":
            model.to(DTYPES[run.param_dtype])
        check_recipes(run.optimizer.recipes)
        optimizer = LayerWiseOptimizer(
            model.parameters(), run.optimizer, scheduler=filled.get("scheduler")
        )
        routed = route(model, optimizer, run, axes.ep_size, tp_size=axes.tp)
        groups = run.layerwise.norm_groups
        members = norm_groups_of(model, routed, groups, tp_size=axes.tp).values()
        require_members(groups, set(members))
        routes = routed.routes
        idle = idle_keys(run.optimizer, run.layerwise, routes.values())
        run = replace(run, without_effect=(*run.without_effect, *idle))
        stages = axes.stages_of(model, routed.specs)
        tied = Counter(spec.name for spec in chain.from_iterable(stages))
        assumed = _for_auto(by_trainer, filled, zero)
        plans = []
        for specs in stages:
            costs_of = partial(
                forecast,
                specs,
                routes,
                run,
                # "auto" assumes devices.
                reduction=reduction_of_run(run.layerwise.reduction, on_host=False),
                tp_size=axes.tp,
                tied=tied,
            )
            forecasts = list(map(costs_of, sharing))
            plans.append(cls(model, run, routes, specs, forecasts, assumed, costs_of))
        return replace(max(plans, key=lambda plan: plan.forecasts[0].needed), stages=plans)

    def activations(self, tokens: int) -> int:
        """Return about the bytes that passes keep of ``tokens``, those of a micro-batch on one
        rank, with activation checkpointing: 2 for each hidden unit of each layer, and 10 for each
        word of the vocabulary in the loss.

        Raises:
            ConfigError: the model has no config that says its sizes.
        """
        config = getattr(self.model, "config", None)
        text = getattr(config, "text_config", config)
        hidden = hidden_size_of(self.model)
        layers = config_value(text, "num_hidden_layers")
        words = config_value(text, "vocab_size")
        if not (hidden and layers and words):
            raise ConfigError(
                "--tokens needs a model with a config that has hidden_size, num_hidden_layers and "
                "vocab_size; leave it out"
            )
        return tokens * (2 * int(layers) * hidden + 10 * int(words))

    def listed(self, plan: Forecast) -> list[dict[str, Any]]:
        """Return every route of ``plan``; see :func:`.plan.forecast.report.listed`."""
        return listed(self.routes, self.specs, plan.layout, [self.run.optimizer.group()])


def checked(path: Path) -> list[str]:
    """Return lines about a DeepSpeed config that is right, as far as it says without a model and a
    number of ranks.

    Raises:
        ConfigError: the error of a run, or the file cannot be read.
    """
    given = read_file(path)
    filled, by_trainer = fill_in(given)
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu")
    total, micro = map(filled.get, batches)
    passes = filled.get("gradient_accumulation_steps", 1)
    num_ranks = Mesh.of(given, {}).sp
    if isinstance(total, int) and isinstance(micro, int) and isinstance(passes, int):
        # As many as the three sizes ask for. DeepSpeed says if they are no product.
        num_ranks *= max(1, total // max(1, micro * passes))
    run = RunConfig.from_ds_config(filled)
    # An override may leave a recipe nothing, or bring another one.
    if not any(override.optimizer for override in run.layerwise.overrides):
        check_taken(run.optimizer, {}, ())
        used = {recipe.lr_ratio for recipe in run.optimizer.recipes}
        # A Trainer fills in rates that go together.
        if {"optimizer.params.lr", "scheduler.params.warmup_max_lr"}.isdisjoint(by_trainer):
            check_peaks(
                filled.get("scheduler"), [run.optimizer.group()], run.optimizer, used={0: used}
            )
    lines = _for_auto(by_trainer, filled, check_for(filled, num_ranks))
    if given.keys().isdisjoint(batches):
        lines.append(f"a run needs {' or '.join(batches)}")
    if run.without_effect:
        lines.append(f"without effect here: {', '.join(run.without_effect)}")
    rules = " and ".join(recipe.rule for recipe in run.optimizer.recipes)
    return [*lines, f"ok: {rules} at ZeRO stage {run.stage}, parameters in {run.param_dtype}"]


def fill_in(
    given: Mapping[str, Any], *, hidden_size: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a copy of ``given`` in which every "auto" of a Trainer has a value, and these values
    by path.

    Args:
        hidden_size: that of the model, if it is known: a Trainer makes buckets of its square.
    """
    filled = json.loads(json.dumps(given))
    values = {path: value for path, value in _FILLED_IN.items() if at(given, path) == "auto"}
    lr = at(given, "optimizer.params.lr")
    if "scheduler.params.warmup_max_lr" in values and isinstance(lr, (int, float)):
        values["scheduler.params.warmup_max_lr"] = lr
    if hidden_size and at(given, "zero_optimization.reduce_bucket_size") == "auto":
        values["zero_optimization.reduce_bucket_size"] = hidden_size**2
    for path, value in {**_WITHOUT_EFFECT, **values}.items():
        if at(filled, path) == "auto":
            section, _, key = path.rpartition(".")
            at(filled, section)[key] = value
    if filled.get("train_batch_size") is filled.get("train_micro_batch_size_per_gpu") is None:
        filled["train_micro_batch_size_per_gpu"] = 1
    return filled, values


def _for_auto(
    by_trainer: Mapping[str, Any], filled: Mapping[str, Any], zero: Mapping[str, Any]
) -> list[str]:
    lines = []
    if by_trainer:
        values = ", ".join(f"{path} = {json.dumps(value)}" for path, value in by_trainer.items())
        lines.append(f'assumed for "auto", which a Trainer by default fills in like this: {values}')
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
