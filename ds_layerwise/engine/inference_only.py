"""The engine of a model that is only used for inference, such as the reference model that TRL
builds with the trainer's config.

Note: what is wrapped, and why there
    TRL copies the config of the run, sets ``zero_optimization.stage`` to 0 unless it is 3, and
    passes only the model. DeepSpeed then builds an optimizer that is never used. With this hook,
    DeepSpeed builds the engine as for a config without an optimizer. Only ``__init__`` sees the
    config first, and knows whether parameters were passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, ref

import deepspeed.comm as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch import nn

from ds_layerwise.config.ds_config import at
from ds_layerwise.config.sections import is_for_us
from ds_layerwise.engine.contract.patches import Method
from ds_layerwise.instance_patches import patch, refusing
from ds_layerwise.output import announce
from ds_layerwise.parallel import pipeline

#: The keys of a config that only concern training.
_OF_TRAINING = ("optimizer", "layerwise", "train_batch_size")

#: The object that fetches the parameters of a model for an engine without an optimizer, at ZeRO
#: stage 3.
_fetchers: WeakKeyDictionary[nn.Module, ref[DeepSpeedZeRoOffload]] = WeakKeyDictionary()


def _init(
    original: Method,
    engine: DeepSpeedEngine,
    args: Any,
    model: Any,
    optimizer: Any = None,
    model_parameters: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Build the engine, without an optimizer if nothing is trained.

    It takes over a model that another engine has for inference: the hooks of two on one model would
    count its modules twice.
    """
    fetcher = _fetchers.pop(model, lambda: None)()
    if fetcher is not None:
        fetcher.destroy()
    config: Any = kwargs.get("config_class")
    stage = None
    if (
        config is not None
        and optimizer is None
        and model_parameters is None
        and not pipeline.is_pipeline(model)
        and _is_for_asking(config._param_dict)
    ):
        stage = config._param_dict["zero_optimization"]["stage"]
        kept = {key: value for key, value in config._param_dict.items() if key not in _OF_TRAINING}
        # At stage 3 DeepSpeed reads the config again, without the mesh, and counts other ranks.
        kept["train_micro_batch_size_per_gpu"] = config.train_micro_batch_size_per_gpu
        kwargs["config"] = config._param_dict = kept
        config.optimizer_name = config.optimizer_params = None
    original(args, model, optimizer, model_parameters, *rest, **kwargs)
    if isinstance(engine.optimizer, DeepSpeedZeRoOffload):
        _fetchers[model] = ref(engine.optimizer)
    if stage is None:
        return
    patch(engine, backward=_refuse("backward", stage), step=_refuse("step", stage))
    if not dist.is_initialized() or dist.get_rank() == 0:
        announce(
            f"ds_layerwise: zero_optimization.stage is {stage}, and "
            "neither model_parameters nor an optimizer was passed: this engine has no optimizer "
            "(it is for inference, such as with a reference model); to train, pass "
            "model_parameters, and set stage to 1, 2 or 3"
        )


def _is_for_asking(given: Mapping[str, Any]) -> bool:
    stage = at(given, "zero_optimization.stage")
    # False would count as 0, which DeepSpeed refuses.
    return is_for_us(given) and isinstance(stage, int) and stage is not False and stage in (0, 3)


def _refuse(name: str, stage: int) -> Callable[..., NoReturn]:
    why = "is 0, at which this backend does not train; set it to 1 or 2"
    if stage == 3:
        why = (
            "is 3, and initialize() was given neither model_parameters nor an optimizer; give "
            "model_parameters=model.parameters()"
        )
    return refusing(
        f"engine.{name}() of an engine without an optimizer: zero_optimization.stage {why}"
    )


WRAPS = {"__init__": _init}
