"""An optimizer object of a script: its class and settings, and more optimizers like it.

Note: what an object is
    Its class, ``defaults``, the values of its parameter groups, its states, and whatever else its
    ``__dict__`` has. An optimizer for one parameter on one rank has to be like it in all of that,
    and no constructor is called for it: the rest of ``__dict__`` is copied. What cannot be copied
    so that the copy works alike on another tensor, because it is code of the script, a tensor,
    another optimizer or a connection to other ranks, is refused by its name.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_layerwise.checkpoint.plain_values import plain as saved
from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import check, plain
from ds_layerwise.recipes.rules import any_torch_recipe
from ds_layerwise.recipes.rules.client_recipe import SPLIT, ClientSplit, ClientTorch, client_recipe

#: What of ``__dict__`` belongs to torch, or is copied otherwise.
_OF_TORCH = (
    "defaults",
    "state",
    "param_groups",
    "_zero_grad_profile_name",
    "_opt_called",
    "_step_count",
    "step",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)

#: What of a group is for the whole of it, and not for an optimizer of one of its parameters.
ABOUT_GROUPS = ("params", "param_names", SPLIT)

#: Keys that a schedule or a script moves, and overrides replace.
MOVED = ("lr", "weight_decay")

#: What schedulers of torch note in a group.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


@dataclass(frozen=True, eq=False, slots=True)
class Prototype:
    """The maker of optimizers like one group of an object."""

    kind: type[Optimizer]
    defaults: Mapping[str, Any]
    rest: Mapping[str, Any]
    """Everything else in ``__dict__`` of the object."""
    group: Mapping[str, Any]
    """The group's values when the engine was made, without its parameters."""

    def make(self, params: Sequence[Tensor]) -> Optimizer:
        """A new optimizer for ``params``, without states, of which ``lr`` is 1e-3."""
        made = self.kind.__new__(self.kind)
        group = {**copy.deepcopy(dict(self.group)), "params": list(params)}
        set_rate(group, 1e-3)
        made.__setstate__(
            {
                **copy.deepcopy(dict(self.rest)),
                "defaults": copy.deepcopy(dict(self.defaults)),
                "state": defaultdict(dict),
                "param_groups": [group],
            }
        )
        return made


def set_rate(group: dict[str, Any], lr: float) -> None:
    """Let a parameter group have ``lr`` as it has its rate: a number, or a tensor, which its class
    may insist on.
    """
    group["lr"] = torch.full_like(group["lr"], lr) if isinstance(group["lr"], Tensor) else lr


def path_of(client: Optimizer) -> str:
    """Return the name of the class in a config: by the outermost package that has it, as states
    belong to a class by that name.
    """
    return any_torch_recipe.path_of(type(client))


def check_object(client: Optimizer) -> Optimizer:
    """``client``, if optimizers like it can be made.

    Raises:
        LayerWiseError: a group says what no checkpoint could hold.
        ConfigError: it wraps another, needs a closure, has hooks before its step, another ``step``
            than its class or states, or keeps what cannot be copied.
    """
    path = path_of(client)
    for key, value in vars(client).items():
        if isinstance(value, Optimizer):
            raise ConfigError(
                f"{path} wraps another optimizer, its {key} ({path_of(value)}), and steps on all "
                "parameters of it at once, which are on several ranks here; give initialize() the "
                "optimizer inside, without its wrapper"
            )
    needs = [
        name
        for name, each in inspect.signature(type(client).step).parameters.items()
        if name != "self"
        and each.default is each.empty
        and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]
    if needs:
        raise ConfigError(
            f"{path}.step needs {', '.join(needs)}, and engine.step() has no closure that could "
            "evaluate the model again; use another optimizer"
        )
    if type(client).__module__.startswith("deepspeed.ops"):
        why = (
            "stock DeepSpeed's offloading; Accelerate, which puts it in the place of torch's, "
            "leaves that with zero_force_ds_cpu_optimizer set to false"
            if "CPU" in path
            else "kernels of DeepSpeed's that update all parameters of a rank at once"
        )
        raise ConfigError(
            f"{path} is made for {why}; give initialize() torch's optimizer of that kind, such as "
            "torch.optim.AdamW for Adam"
        )
    if client._optimizer_step_pre_hooks:
        raise ConfigError(
            f"{path} has hooks that run before its step (register_step_pre_hook), which would find "
            "no gradients: those stay in the engine; remove them, and use the engine's "
            "gradient_clipping"
        )
    own_step = vars(client).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        raise ConfigError(
            f"somebody has replaced the step of this {path}, which would not run: an engine takes "
            "its own; write a class with that step"
        )
    # Some classes make states that count from 0 when they are made.
    if any(state and state.get("step", 1) != 0 for state in client.state.values()):
        raise ConfigError(
            f"this {path} has states already, such as after a step or a load, and each rank has "
            "those of what it owns alone; give initialize() one without states, and set them "
            "afterwards with engine.load_checkpoint() or DeepSpeed's "
            "safe_set_full_optimizer_state(), 'step' included"
        )
    for key, value in vars(client).items():
        if key not in _OF_TORCH and (reason := _refused(value)) is not None:
            raise ConfigError(
                f"{path} keeps {key} ({reason}), of which each parameter would need one of its own "
                "on the rank that owns it; use a class that keeps numbers, text and containers of "
                "those, beside its states"
            )
    for index, group in enumerate(client.param_groups):
        where = f"param_groups[{index}]"
        values = {key: value for key, value in group.items() if key not in ABOUT_GROUPS}
        for key, value in values.items():
            # Found at the first save otherwise.
            saved(value, f"{where}.{key}")
        for key in MOVED:
            value = plain(values.get(key, 0.0))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or "lr" not in values:
                raise ConfigError(
                    f"{where}.{key} of {path} is {values.get(key)!r}, and an engine needs a number "
                    "that schedules can move; give one (of an optimizer that finds its own rate, "
                    "switch that off)"
                )
    return client


def recipes_of(client: Optimizer, *, split: ClientSplit) -> tuple[ClientTorch, ...]:
    """Return, for each parameter group of ``client``, the recipe of its parameters.

    Args:
        split: for groups that do not say ``split`` themselves.

    Raises:
        ConfigError: one says what it cannot be.
    """
    rest = {key: value for key, value in vars(client).items() if key not in _OF_TORCH}
    found = []
    for index, group in enumerate(client.param_groups):
        values = {key: value for key, value in group.items() if key not in ABOUT_GROUPS}
        chosen = check(ClientSplit, f"param_groups[{index}].{SPLIT}", group.get(SPLIT, split))
        prototype = Prototype(
            type(client), copy.deepcopy(client.defaults), copy.deepcopy(rest), copy.deepcopy(values)
        )
        told = {
            key: _told(value)
            for key, value in values.items()
            if key not in (*MOVED, *_OF_SCHEDULERS)
        }
        found.append(client_recipe(path_of(client), prototype, told, split=chosen))
    return tuple(found)


def _told(value: Any) -> str:
    """``value`` as text without addresses."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_told(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_told, value))}]"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return f"{value.__module__}.{value.__qualname__}"
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value.tolist() if isinstance(value, Tensor) else value)
    )


def _refused(value: Any) -> str | None:
    """Why ``value`` cannot be copied for an optimizer of another tensor; None if it can."""
    parts: Iterable[Any]
    if value is None or isinstance(
        value,
        (
            bool,
            int,
            float,
            complex,
            str,
            bytes,
            Enum,
            torch.dtype,
            torch.device,
            numpy.generic,
            type,
            types.BuiltinFunctionType,
        ),
    ):
        return None
    if isinstance(value, types.FunctionType):
        is_inner = value.__closure__ or "<" in value.__qualname__
        return (
            f"the function {value.__qualname__}, which is code inside other code"
            if is_inner
            else None
        )
    if isinstance(value, partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, Mapping):
        parts = *value, *value.values()
    elif isinstance(value, (Sequence, Set)):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, each.name) for each in fields(value)]
    else:
        shape = f" of {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        return f"a {type(value).__module__}.{type(value).__qualname__}{shape}"
    return next(filter(None, map(_refused, parts)), None)
