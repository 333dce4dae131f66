"""Hooks into DeepSpeed's reading of a config. They report its problems in the terms of this
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import deepspeed.comm as dist
import hjson
import torch
from deepspeed.runtime import config as ds_config_module
from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ds_layerwise.config.ds_config import (
    at,
    config_of,
    refuse_misplaced,
    retell,
    type_meant,
    with_plain_numbers,
)
from ds_layerwise.config.run_config import RunConfig, checked_ratio
from ds_layerwise.config.sections import is_for_us, is_ours
from ds_layerwise.engine import final_error
from ds_layerwise.engine.contract.patches import Method
from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError
from ds_layerwise.optimizers.registry import check_recipes


def _get_zero_config(original: Method, given: Any) -> Any:
    """Read ``zero_optimization`` as DeepSpeed does. DeepSpeed accepts an offload ratio below 1 only
    at stage 3.

    Raises:
        ConfigError: the ratio is not in [0, 1].
    """
    if not is_for_us(given):
        return original(given)
    rest, ratio = _without_ratio(given)
    config = original(rest)
    if ratio != "auto":
        config.offload_optimizer.ratio = checked_ratio(ratio)
    return config


def _without_ratio(given: Any) -> tuple[Any, Any]:
    """Return ``given`` with an offload ratio of "auto", and the ratio that it had."""
    offload = at(given, "zero_optimization.offload_optimizer")
    if not isinstance(offload, Mapping):
        return given, "auto"
    zero = {**given["zero_optimization"], "offload_optimizer": {**offload, "ratio": "auto"}}
    return {**given, "zero_optimization": zero}, offload.get("ratio", "auto")


def _initialize_params(original: Method, _: ds_config_module.DeepSpeedConfig, given: Any) -> Any:
    # Install it again: torch has wrapped the earlier hook in one of its own when the ranks
    # connected.
    final_error.begin()
    return _read_params(original, given)


def _read_params(original: Method, given: Any) -> Any:
    """Raise the error of this backend, if there is one, in place of DeepSpeed's error."""
    if not is_for_us(given) and not is_ours(str(given.get("optimizer"))):
        if any(
            isinstance(each, Mapping) and is_ours(str(each.get("type"))) for each in given.values()
        ):
            refuse_misplaced(given)
        return original(given)
    # DeepSpeed ignores a section that is not an object, or fails on it only later.
    config_of(with_plain_numbers(given))
    try:
        return original(given)
    except FOREIGN_ERRORS as error:
        RunConfig.from_ds_config(given, client=given.get("optimizer") is None)
        retell(error)


def _configure_train_batch_size(original: Method, config: ds_config_module.DeepSpeedConfig) -> Any:
    if not is_for_us(config._param_dict):
        return original()
    # A plan counts the ranks that it is for.
    is_run = type(config) is ds_config_module.DeepSpeedConfig
    if is_run and torch.distributed.is_initialized() and not dist.is_initialized():
        # zero.Init reads its config first, and connects deepspeed.comm afterwards. On a CPU a
        # Trainer has connected torch alone by then, and DeepSpeed would count one rank.
        dist.init_distributed()
        shared_by = config._param_dict.get("sequence_parallel_size", 1)
        config.global_rank = dist.get_rank()
        config.world_size = dist.get_world_size() // shared_by
    config._param_dict = with_plain_numbers(config._param_dict)
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    ):
        if config._param_dict.get(key) == "auto":
            raise ConfigError(
                f"{key} is 'auto', which only Hugging Face's Trainer and Accelerate replace by a "
                "number; give it a whole number, or remove it"
            )
    try:
        return original()
    except FOREIGN_ERRORS as error:
        retell(error)


def refuse_what_others_ignore(config: Any, client: object) -> None:
    """Refuse a config with keys of this backend that does not select this backend.

    Args:
        client: the optimizer of the script, if it has one.

    Raises:
        ConfigError: names the key.
    """
    name = config.optimizer_name
    is_known = name in (None, *ds_config_module.DEEPSPEED_OPTIMIZERS) or hasattr(torch.optim, name)
    if client is None and not is_known and (meant := type_meant(name)):
        raise ConfigError(f"optimizer.type {name!r} is not known; did you mean {meant!r}?")
    if "layerwise" in config._param_dict:
        raise ConfigError(
            "the layerwise section needs optimizer.type 'LayerWiseMuon' or 'LayerWise', got "
            f"{name!r}; change it, or remove the section"
        )


#: The keys that the newest supported DeepSpeed reads and the oldest does not, with their defaults.
_NOT_IN_EVERY_RELEASE = {
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "data_types.param_dtype": None,
    "data_types.buffer_dtype": None,
    "data_types.keep_in_fp32_modules": "auto",
}


def run_of(config: Any, client: object) -> RunConfig:
    """Return ``config`` as this backend reads it, for an engine and for a plan.

    Args:
        client: the optimizer of the script, if it has one.

    Raises:
        ConfigError: names the key.
    """
    given = config._param_dict
    is_left = given.get("optimizer") is None
    run = RunConfig.from_ds_config(given, client=is_left)
    for path, default in _NOT_IN_EVERY_RELEASE.items():
        section, _, key = path.rpartition(".")
        values = at(given, section) or {}
        if values.get(key, default) != default and not hasattr(config, key):
            raise ConfigError(
                f"{path} is not known to DeepSpeed {deepspeed.__version__}, which would ignore it; "
                "remove it, or install a newer DeepSpeed"
            )
    if not is_left:
        check_recipes(run.optimizer.recipes)
        if client is not None:
            raise ConfigError(
                "the optimizer is given twice: deepspeed.initialize(optimizer=...) and "
                f"optimizer.type {given['optimizer']['type']!r} in the config; remove one"
            )
    elif client is None:
        raise ConfigError(
            "the layerwise section needs optimizer.type 'LayerWiseMuon' or 'LayerWise', or an "
            "optimizer given to initialize(), and there is none of these; name one, or remove the "
            "section"
        )
    return run


def read_file(path: Path) -> Mapping[str, Any]:
    """Read the DeepSpeed config in a file as DeepSpeed does: HJSON, which is JSON with comments.

    Raises:
        ConfigError: the file cannot be read or is neither, repeats a key, or is not a config.
    """
    try:
        text = path.read_text(encoding="utf-8")
        given = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    except OSError as e:
        raise ConfigError(
            f"--config must be a file with a DeepSpeed config, got {path}: {e.strerror}; name one, "
            "such as those in ds_configs"
        ) from e
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is no JSON: {e}") from e
    return config_of(given)


def check_for(given: dict[str, Any], num_ranks: int) -> Mapping[str, Any]:
    """Check the config ``given`` as an engine on ``num_ranks`` data-parallel ranks does.

    Returns:
        The values of ``zero_optimization``, with DeepSpeed's defaults.

    Raises:
        ConfigError: the error of that engine, or of DeepSpeed, which an engine passes on.
    """

    class Config(ds_config_module.DeepSpeedConfig):  # type: ignore[misc]
        def _initialize_params(self, params: Any) -> None:
            self.world_size = num_ranks // params.get("sequence_parallel_size", 1)
            _read_params(super()._initialize_params, _without_ratio(params)[0])

    def quiet(_: object) -> bool:
        return False

    # It writes on stdout, where a plan may write JSON.
    logger.addFilter(quiet)
    try:
        if not (is_for_us(given) or given.get("optimizer")):
            RunConfig.from_ds_config(given)
        config = Config(given)
        if not is_for_us(given):
            refuse_what_others_ignore(config, None)
        group = run_of(config, None).optimizer.group()
        # A scheduler checks its own arguments. Torch takes seconds to make an optimizer with steps.
        optimizer = torch.optim.Optimizer.__new__(torch.optim.Optimizer)
        optimizer.defaults = group
        optimizer.param_groups = [{"params": [], **group}]
        engine = SimpleNamespace(
            scheduler_name=lambda: config.scheduler_name,
            scheduler_params=lambda: config.scheduler_params,
            optimizer=None,
        )
        DeepSpeedEngine._scheduler_from_config(engine, optimizer)
        return dict(config.zero_config.model_dump())
    except (ds_config_module.DeepSpeedConfigError, *FOREIGN_ERRORS) as error:
        retell(error)
    finally:
        logger.removeFilter(quiet)


WRAPS: dict[str, Method] = {
    "get_zero_config": _get_zero_config,
    "_initialize_params": _initialize_params,
    "_configure_train_batch_size": _configure_train_batch_size,
}
