"""The reading of a script's optimizer object: its class and settings, and optimizers like it for
single parameters.

Note: the content of an object
    Its class, ``defaults``, the values of its parameter groups, and its states: everything that
    torch.optim.Optimizer keeps, pickles and copies. An optimizer for one parameter on one rank is
    such a copy. If an object keeps more, it has got that from a constructor with unknown arguments.
    It is then refused, unless a function of the script made it; that function also makes the
    optimizers for single parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ds_layerwise.checkpoint.plain_values import plain as saved
from ds_layerwise.errors import ConfigError, few
from ds_layerwise.optimizers.base.fields import check, normalised, plain
from ds_layerwise.optimizers.foreign import any_torch_recipe
from ds_layerwise.optimizers.foreign.client_recipe import (
    SPLIT,
    ClientSplit,
    ClientTorch,
    client_recipe,
)
from ds_layerwise.optimizers.foreign.probe import set_rate

#: The attributes of objects in addition to those of torch's base class: of fused kernels, and of
#: schedulers.
_OF_TORCH = (
    "torch.optim.Adagrad._need_device_dtype_check_for_fused",
    "torch.optim.Adam._step_supports_amp_scaling",
    "torch.optim.lr_scheduler.LRScheduler._opt_called",
    "torch.optim.lr_scheduler.LRScheduler._step_count",
)

#: The keys of a group that concern the group as a whole, and not an optimizer of one of its
#: parameters.
ABOUT_GROUPS = ("params", "param_names", SPLIT)

#: The keys that a scheduler or a script changes, and that overrides replace.
MOVED = ("lr", "weight_decay")

#: The keys that schedulers of torch store in a group.
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")

#: A script's function that makes an optimizer from parameters or groups.
Make = Callable[[Any], object]


@dataclass(frozen=True, eq=False)
class Prototype:
    """Makes optimizers like one group of an object."""

    kind: type[Optimizer]
    defaults: Mapping[str, Any]
    group: Mapping[str, Any]
    """The group's values when the engine was built, without its parameters."""
    function: Make | None
    """The script's function that makes them; None for copies of the object."""

    def make(self, params: Sequence[Tensor]) -> Optimizer:
        """Return a new optimizer for ``params``, without states and with an ``lr`` of 1e-3.

        Raises:
            ConfigError: the function cannot make one for these parameters alone.
        """
        group = {**copy.deepcopy(dict(self.group)), "params": list(params)}
        set_rate(group, 1e-3)
        if self.function is None:
            made = self.kind.__new__(self.kind)
            defaults = copy.deepcopy(dict(self.defaults))
            made.__setstate__(
                {"defaults": defaults, "state": defaultdict(dict), "param_groups": [group]}
            )
            return made
        made = must_be_optimizer(self.function([group]))
        first, *others = made.param_groups
        is_of_these = list(map(id, first["params"])) == list(map(id, params))
        if type(made) is not self.kind or others or not is_of_these:
            raise ConfigError(
                f"the function given to initialize() makes a {path_of(made)} of other parameters "
                "than those that it is given, and is called again for each parameter, because what "
                "it makes keeps more than groups and states; let it make one of its argument, a "
                "list of parameters or of groups"
            )
        return made


def of_class(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``group`` for an optimizer of one of its parameters."""
    found = {}
    for key, value in group.items():
        if key not in ABOUT_GROUPS:
            found[key] = value
    return found


def must_be_optimizer(found: object) -> Optimizer:
    """Return ``found``, if it is an optimizer.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(found, Optimizer):
        raise ConfigError(
            "the optimizer given to initialize() must be a torch.optim.Optimizer, or make one of "
            f"parameters, got {type(found).__module__}.{type(found).__qualname__}"
        )
    return found


def path_of(client: Optimizer) -> str:
    """Return the name of the class for a config: in the outermost package that exports it, because
    saved states refer to the class by that name.
    """
    return any_torch_recipe.path_of(type(client))


def recipes_of(
    client: Optimizer, make: Make | None, *, split: ClientSplit
) -> tuple[ClientTorch, ...]:
    """Return the recipe of each parameter group of ``client``. Groups that differ only in their
    rates and weight decay have the same recipe.

    Args:
        make: the function that has made it, if any.
        split: for groups that do not set ``split`` themselves.

    Raises:
        LayerWiseError: a group has a value that no checkpoint can hold.
        ConfigError: no optimizers like it can be made, or a value of a group is not valid.
    """
    path = path_of(client)
    function = _function_for(client, make)
    by_settings = {}
    found = []
    for index, group in enumerate(client.param_groups):
        where = f"param_groups[{index}]"
        values = of_class(group)
        texts = {}
        for key, value in values.items():
            # Otherwise the first save would find it.
            text = str(normalised(saved(value, f"{where}.{key}")))
            if key not in (*MOVED, *_OF_SCHEDULERS):
                texts[key] = text
        for key in MOVED:
            value = plain(values.get(key, 0.0))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or "lr" not in values:
                raise ConfigError(
                    f"{where}.{key} of {path} is {values.get(key)!r}, and an engine needs a number "
                    "that schedules can move; give one (of an optimizer that finds its own rate, "
                    "switch that off)"
                )
        chosen = check(ClientSplit, f"{where}.{SPLIT}", group.get(SPLIT, split))
        same = chosen, tuple(texts.items())
        if same not in by_settings:
            prototype = Prototype(type(client), client.defaults, copy.deepcopy(values), function)
            by_settings[same] = client_recipe(path, prototype, texts, split=chosen)
        found.append(by_settings[same])
    return tuple(found)


def _function_for(client: Optimizer, make: Make | None) -> Make | None:
    """Return ``make`` if ``client`` keeps more than torch.optim.Optimizer does.

    Raises:
        ConfigError: no optimizer like it can be made: it needs a closure, has hooks before its
            step, has states, or keeps more and was not made by a function.
    """
    path = path_of(client)
    try:
        inspect.signature(type(client).step).bind(client)
    except TypeError as error:
        raise ConfigError(
            f"{path}.step: {error}, and engine.step() has no closure that could evaluate the "
            "model again; use another optimizer"
        ) from None
    if type(client).__module__.startswith("deepspeed.ops"):
        raise ConfigError(
            f"{path} updates all parameters of a rank at once, by kernels of DeepSpeed's; give "
            "initialize() torch's optimizer of that kind, such as torch.optim.AdamW for Adam "
            "(where Accelerate has put it there, set zero_force_ds_cpu_optimizer to false)"
        )
    plainest = SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=0.0)
    known = {*vars(plainest), *(path.rpartition(".")[2] for path in _OF_TORCH)}
    if hasattr(client.step, "_wrapped_by_lr_sched"):
        known.add("step")
    more = []
    for key in vars(client).keys() - known:
        more.append(f"{key} ({type(vars(client)[key]).__qualname__})")
    if more and make is None:
        raise ConfigError(
            f"this {path} keeps {few(sorted(more))} beside its groups and states, and each "
            "parameter needs an optimizer like it on the rank that owns it; give initialize() a "
            "function that makes one of the parameters that it is given, name the class in the "
            f"config (optimizer.params.matrix_optimizer: '{path}'), or give it the optimizer "
            "inside, if this wraps another"
        )
    if client._optimizer_step_pre_hooks:
        raise ConfigError(
            f"{path} has hooks that run before its step (register_step_pre_hook), which would find "
            "no gradients: those stay in the engine; remove them, and use the engine's "
            "gradient_clipping"
        )
    # Some classes make states, with a count of 0, in their constructors.
    for state in client.state.values():
        if state and state.get("step", 1) != 0:
            raise ConfigError(
                f"this {path} has states already, such as after a step or a load, and each rank "
                "has those of what it owns alone; give initialize() one without states, and set "
                "them afterwards with engine.load_checkpoint() or DeepSpeed's "
                "safe_set_full_optimizer_state(), 'step' included"
            )
    return make if more else None
