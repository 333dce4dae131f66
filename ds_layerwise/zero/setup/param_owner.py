"""The optimizer that trains each parameter, and its end when another engine is made for the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ds_layerwise.instance_patches import refusing

#: The optimizer that takes the gradients of a parameter, by parameter. A second optimizer on the
#: same parameter would never see any.
_owners: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()

#: The methods that an engine calls in its forward and backward passes, its step, its saves and its
#: loads.
_USES = (
    "clear_backward_seen_flag",
    "backward_prologue",
    "enter_backward",
    "step",
    "zero_grad",
    "state_dict",
    "checkpoint_event_prologue",
    "refresh_fp32_params",
    "update_lp_params",
    "offload_states",
    "reload_states",
)


def is_trained(param: Tensor) -> bool:
    """Tell whether an optimizer of this package takes the gradients of ``param``."""
    return param in _owners


def has_optimizer(param: Tensor) -> bool:
    """Tell whether an engine trains ``param``, with an optimizer of this package or with another
    one at ZeRO stage 1 or 2. The latter leaves on the parameter what DeepSpeed's functions for
    masters look for.
    """
    return is_trained(param) or hasattr(param, "_hp_mapping")


def take(params: Iterable[Tensor], optimizer: Any) -> None:
    """Make ``optimizer`` the one that trains ``params``, which none trains so far."""
    _owners.update((param, optimizer) for param in params)


def release(params: Iterable[Tensor]) -> None:
    """Remove ``params`` from the optimizer that trains them."""
    for param in params:
        _owners.pop(param, None)


def retire_owners(params: Iterable[Tensor]) -> None:
    """Retire every optimizer that trains one of ``params``. Further use of it or of its engine
    raises an error.
    """
    for optimizer in dict.fromkeys(_owners[param] for param in params if param in _owners):
        optimizer.destroy()
        for name in _USES:
            setattr(optimizer, name, _refuse)
        optimizer.checkpointing.prepare_load = _refuse


_refuse = refusing(
    "another engine was made for parameters of this one, and trains them since; use that engine, "
    "or make a new one of this model by deepspeed.initialize()"
)
