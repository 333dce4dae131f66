"""The learning rate scheduler of an engine. It is built on an object that torch accepts as an
optimizer, and moves the configured rates.

Note: what is wrapped, and why there
    ``_scheduler_from_config`` passes the engine's wrapper to the scheduler that the config names.
    DeepSpeed's schedulers find their optimizer in it, but torch's accept only a
    ``torch.optim.Optimizer``. ``_configure_lr_scheduler`` is the first place in which a script's
    scheduler is present.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from ds_layerwise.config.ds_config import retell
from ds_layerwise.engine.contract.only_ours import Method, only_ours
from ds_layerwise.errors import FOREIGN_ERRORS, ConfigError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.optimizer import uses_us


def _scheduler_from_config(original: Method, engine: DeepSpeedEngine, optimizer: Any) -> Any:
    kind = (engine._config._param_dict.get("scheduler") or {}).get("type")
    is_of_torch = kind is not None and not hasattr(lr_schedules, kind)
    # DeepSpeed's schedulers ask themselves for their rates when they are made.
    logger.addFilter(_asks_later)
    try:
        return original(engine.basic_optimizer if is_of_torch else optimizer)
    except FOREIGN_ERRORS as error:
        retell(error)
    finally:
        logger.removeFilter(_asks_later)


def _asks_later(record: Any) -> bool:
    """Tell whether a warning is about anything but rates before the first step."""
    return "scheduler before it has started" not in record.msg


def _configure_lr_scheduler(original: Method, engine: DeepSpeedEngine) -> None:
    original()
    if engine.client_lr_scheduler:
        with comm.errors_on_all_ranks():
            _check_client(engine, engine.lr_scheduler)


def _check_client(engine: DeepSpeedEngine, schedule: Any) -> None:
    """Refuse a scheduler that has no effect here.

    Raises:
        ConfigError: names its class and the way out.
    """
    known = {id(group) for group in engine.optimizer.param_groups}
    moved = getattr(getattr(schedule, "optimizer", None), "param_groups", None)
    if moved is not None and not any(id(group) in known for group in moved):
        kind = type(schedule).__name__
        raise ConfigError(
            f"lr_scheduler is a {kind} of another optimizer ({type(schedule.optimizer).__name__}), "
            "so that no rate of this engine would ever move; give a function: lr_scheduler=lambda "
            f"optimizer: {kind}(optimizer, ...)"
        )


WRAPS = only_ours(
    uses_us,
    {
        "_scheduler_from_config": _scheduler_from_config,
        "_configure_lr_scheduler": _configure_lr_scheduler,
    },
)
