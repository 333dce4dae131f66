"""Hooks into DeepSpeed's reading of a config. They report its problems in the terms of this
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.runtime import config as ds_config_module

from ds_layerwise.config.config_file import config_of
from ds_layerwise.config.ds_config import refuse_misplaced, retell, with_plain_numbers
from ds_layerwise.config.run_config import RunConfig, checked_ratio
from ds_layerwise.config.sections import is_for_us, is_ours
from ds_layerwise.engine import final_error
from ds_layerwise.engine.contract.only_ours import Method
from ds_layerwise.errors import ConfigError


def has_client(config: Mapping[str, Any]) -> bool:
    """Tell whether ``config``, which is for this backend, leaves the optimizer to the script."""
    return config.get("optimizer") is None


def _get_zero_config(original: Method, given: Any) -> Any:
    """Read ``zero_optimization`` as DeepSpeed does. DeepSpeed accepts an offload ratio below 1 only
    at stage 3.

    Raises:
        ConfigError: the ratio is not in [0, 1].
    """
    if not is_for_us(given):
        return original(given)
    zero = given.get("zero_optimization")
    if isinstance(zero, dict):
        offload = zero.get("offload_optimizer")
    else:
        offload = None
    if not isinstance(offload, dict) or offload.get("ratio", "auto") == "auto":
        return original(given)
    rest = dict(offload)
    ratio = checked_ratio(rest.pop("ratio"))
    config = original({**given, "zero_optimization": {**zero, "offload_optimizer": rest}})
    config.offload_optimizer.ratio = ratio
    return config


def _initialize_params(original: Method, _: ds_config_module.DeepSpeedConfig, given: Any) -> Any:
    """Raise the error of this backend, if there is one, in place of DeepSpeed's error."""
    # Install it again: torch has wrapped the earlier hook in one of its own when the ranks
    # connected.
    final_error.begin()
    optimizer = given.get("optimizer")
    if not is_for_us(given) and not (isinstance(optimizer, str) and is_ours(optimizer)):
        if any(
            isinstance(each, Mapping) and is_ours(str(each.get("type"))) for each in given.values()
        ):
            refuse_misplaced(given)
        return original(given)
    # DeepSpeed ignores a section that is not an object, or fails on it only later.
    config_of(with_plain_numbers(given))
    try:
        return original(given)
    except (ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
        try:
            RunConfig.from_ds_config(given, client=has_client(given))
        except ConfigError as ours:
            raise ours from error
        retell(error)
        raise


def _configure_train_batch_size(original: Method, config: ds_config_module.DeepSpeedConfig) -> Any:
    if is_for_us(config._param_dict):
        if torch.distributed.is_initialized() and not dist.is_initialized():
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
                    f"{key} is 'auto', which only Hugging Face's Trainer and Accelerate replace by "
                    "a number; give it a whole number, or remove it"
                )
    try:
        return original()
    except AssertionError as error:
        if is_for_us(config._param_dict):
            retell(error)
        raise


WRAPS: dict[str, Method] = {
    "get_zero_config": _get_zero_config,
    "_initialize_params": _initialize_params,
    "_configure_train_batch_size": _configure_train_batch_size,
}
