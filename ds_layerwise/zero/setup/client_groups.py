"""The takeover of an optimizer object that a script passed to ``initialize()``: its groups serve;
its ``step``, ``state_dict`` and ``load_state_dict`` are replaced.

Note: optimizers like it for single parameters
    Each parameter has an optimizer of its own on the rank that owns it: of the same class, with a
    copy of its group, of its ``defaults`` and of its other attributes. Those may be numbers,
    texts, enums and functions; an object that keeps more is refused, because nothing shows which
    part belongs to a parameter.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ds_layerwise.checkpoint.plain_values import plain as saved
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError, few
from ds_layerwise.instance_patches import patch, refusing
from ds_layerwise.optimizers import any_torch
from ds_layerwise.optimizers.any_torch import SPLIT, ClientTorch, UnitOfClass, set_rate
from ds_layerwise.optimizers.fields import check, normalised, plain
from ds_layerwise.optimizers.recipe import State
from ds_layerwise.routing.routes import Routes
from ds_layerwise.zero.setup.param_groups import OF_SCHEDULERS, LayerWiseOptimizer
from ds_layerwise.zero.setup.rate_checks import check_floors

#: The keys of a group that concern the group as a whole, and not an optimizer of one of its
#: parameters.
ABOUT_GROUPS = ("params", "param_names", SPLIT)

#: The keys that a scheduler or a script changes, and that overrides replace.
_MOVED = ("lr", "weight_decay")


#: The attributes that copies of an object share with it.
_SHARED = (type(None), bool, int, float, str, Enum, FunctionType, torch.dtype)


class ClientOptimizer(LayerWiseOptimizer):
    """The groups of an optimizer object: the same list and the same dicts that it and its
    schedulers have.

    From now on, the object's own ``step`` only tells its schedulers and hooks that the engine has
    stepped. Calls that would change it independently raise an error: ``step`` by other code,
    ``add_param_group`` and ``load_state_dict``; so does ``state_dict``, which would have only the
    states that one rank owns.

    Args:
        given: the object, or a function that makes it from ``params``.
        split: the unit of ownership in groups that do not set ``split`` themselves.

    Raises:
        ConfigError: no optimizers like it can be made, see :func:`_recipes_of`, or another engine
            uses it.
    """

    def __init__(self, given: Any, params: Any, *, split: UnitOfClass) -> None:
        client = must_be_optimizer(given(params) if callable(given) else given)
        if "add_param_group" in vars(client):
            raise ConfigError(
                f"this {_path_of(client)} has been given to another engine, which trains with its "
                "groups; make a new one"
            )
        self.client = client
        self.recipes_by_group = _recipes_of(client, split)
        self.config = OptimizerConfig(decay_vectors=True)
        Optimizer.__init__(self, client.param_groups, {})
        self.param_groups = client.param_groups
        self.state = client.state
        self._take_note(map(_before_schedules, self.param_groups))
        self.own_decay = set(range(len(self._built)))
        self.own_keys = []

    def groups_now(self) -> list[dict[str, Any]]:
        """Return the settings of groups for the next step: all of their values under ``of_client``,
        and, under this package's names, the rate and, if the class has one, the weight decay.
        """
        settings = []
        for group, known in zip(self.param_groups, self.configured, strict=True):
            settings.append(
                {
                    "configured_lr": known["lr"],
                    "lr": group["lr"],
                    "matrix_lr_ratio": 1.0,
                    "scalar_lr_ratio": 1.0,
                    "weight_decay": group.get("weight_decay", 0.0),
                    "momentum": 0.0,
                    "betas": (0.0, 0.0),
                    "eps": 0.0,
                    "of_client": _of_class(group),
                }
            )
        return settings

    def check_groups(self) -> None:
        """Do nothing: the class checks the keys of its groups."""

    def require_chosen_rates(self, routes: Routes) -> None:
        """Refuse a bound above its rate. All rates of the object were chosen.

        Raises:
            ConfigError: a bound is above its rate, or a parameter has a rate of its own in a group
                with a rate of 0; names the parameter.
        """
        groups = self.groups_now()
        for route in routes.values():
            if route.lr is not None and not groups[route.group]["configured_lr"]:
                raise ConfigError(
                    f"layerwise.overrides sets lr for {route.name}, which follows the schedule of "
                    f"param_groups[{route.group}], and lr of that is 0; let it start at its highest"
                )
        check_floors(routes, groups)

    def named(self, given: Mapping[str, Any]) -> dict[str, object]:
        """Return the part of ``given`` that a load compares: all of it, under the names of the
        class, in the form of a checkpoint.
        """
        found = {}
        for key, value in given.items():
            found[key] = normalised(saved(value, key))
        return found

    def hold(self, states: Mapping[Tensor, State]) -> None:
        """Set the states of the object to those that this rank owns, and replace its methods, so
        that it does nothing by itself.
        """
        self.client.state.clear()
        super().hold(states)
        refuse = refusing(
            f"an engine trains with this {_path_of(self.client)}, and each rank has the states of "
            "some of its parameters; call engine.step(), save with engine.save_checkpoint(), or "
            "whole states in one file with engine.optimizer.save_state_dict_to_file(), load with "
            "engine.load_checkpoint(), and add groups before initialize()"
        )

        def step(*_: Any, **__: Any) -> None:
            if not self._stepping:
                refuse()

        hooked: Any = Optimizer.profile_hook_step(step)
        # A scheduler that has already inspected the step warns if this mark is missing.
        hooked._wrapped_by_lr_sched = True
        patch(
            self.client,
            step=MethodType(hooked, self.client),
            add_param_group=refuse,
            load_state_dict=refuse,
            state_dict=refuse,
            __reduce_ex__=refuse,
        )

    def _tell_of_step(self) -> None:
        self.client.step()
        vars(self.client)["_opt_called"] = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction. The object has already set defaults."""
        self.param_groups.append(param_group)


def _before_schedules(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``group``, with its rate before any scheduler."""
    values = _of_class(group)
    values["lr"] = float(values.pop("initial_lr", group["lr"]))
    return values


@contextmanager
def pointing_to_ours(client: object) -> Iterator[None]:
    """Point to this package's Muon in the error for a client Muon that is not supported."""
    try:
        yield
    except ConfigError as error:
        name = type(client).__qualname__
        if "muon" not in name.lower():
            raise
        raise ConfigError(
            f"{error}. To train with Muon, give initialize() no optimizer: remove the {name}, and "
            "set optimizer.type 'LayerWiseMuon' in the config"
        ) from error


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


def _of_class(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of ``group`` for an optimizer of one of its parameters."""
    found = {}
    for key, value in group.items():
        if key not in ABOUT_GROUPS:
            found[key] = value
    return found


def _path_of(client: Optimizer) -> str:
    """Return the name of the class for a config: in the outermost package that exports it, because
    saved states refer to the class by that name.
    """
    return any_torch.path_of(type(client))


def _recipes_of(client: Optimizer, split: UnitOfClass) -> tuple[ClientTorch, ...]:
    """Return the recipe of each parameter group of ``client``. Groups that differ only in their
    rates and weight decay have the same recipe.

    Raises:
        LayerWiseError: a group has a value that no checkpoint can hold.
        ConfigError: no optimizers like it can be made, or a value of a group is not valid.
    """
    path = _path_of(client)
    attributes = _attributes_of(client)
    by_settings = {}
    found = []
    for index, group in enumerate(client.param_groups):
        where = f"param_groups[{index}]"
        values = _of_class(group)
        texts = {}
        for key, value in values.items():
            # Otherwise the first save would find it.
            text = str(normalised(saved(value, f"{where}.{key}")))
            if key not in (*_MOVED, *OF_SCHEDULERS):
                texts[key] = text
        for key in _MOVED:
            value = plain(values.get(key, 0.0))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or "lr" not in values:
                raise ConfigError(
                    f"{where}.{key} of {path} is {values.get(key)!r}, and an engine needs a number "
                    "that schedules can move; give one (of an optimizer that finds its own rate, "
                    "switch that off)"
                )
        chosen = check(UnitOfClass, f"{where}.{SPLIT}", group.get(SPLIT, split))
        same = chosen, tuple(texts.items())
        if same not in by_settings:
            by_settings[same] = any_torch.subclass(
                ClientTorch,
                path,
                whole=chosen == "whole",
                maker=_maker(client, attributes, copy.deepcopy(values)),
                told=texts,
            )()
        found.append(by_settings[same])
    return tuple(found)


def _maker(
    client: Optimizer, attributes: Mapping[str, Any], values: Mapping[str, Any]
) -> Callable[[Sequence[Tensor]], Optimizer]:
    """Return the function that makes optimizers like ``client``, with the ``values`` of a group."""
    kind = type(client)
    defaults = copy.deepcopy(client.defaults)

    def make(params: Sequence[Tensor]) -> Optimizer:
        group = {**copy.deepcopy(values), "params": list(params)}
        set_rate(group, 1e-3)
        made = kind.__new__(kind)
        made.__setstate__(
            {
                **attributes,
                "defaults": copy.deepcopy(defaults),
                "state": defaultdict(dict),
                "param_groups": [group],
            }
        )
        return made

    return make


def _attributes_of(client: Optimizer) -> dict[str, Any]:
    """Return the attributes of ``client`` beside those of torch.optim.Optimizer.

    Raises:
        ConfigError: no optimizer like it can be made: it has hooks before its step, has states, or
            keeps more than copies can share.
    """
    path = _path_of(client)
    if type(client).__module__.startswith("deepspeed.ops"):
        raise ConfigError(
            f"{path} updates all parameters of a rank at once, by kernels of DeepSpeed's; give "
            "initialize() torch's optimizer of that kind, such as torch.optim.AdamW for Adam "
            "(where Accelerate has put it there, set zero_force_ds_cpu_optimizer to false)"
        )
    plainest = SGD([torch.zeros(1, dtype=torch.float32, device="cpu")], lr=0.0)
    shared = {}
    more = []
    for key, value in vars(client).items():
        if key in vars(plainest) or hasattr(value, "_wrapped_by_lr_sched"):
            continue
        shared[key] = value
        hides = callable(value) and hasattr(type(client), key)
        if hides or not isinstance(value, _SHARED):
            more.append(f"{key} ({type(value).__qualname__})")
    if more:
        raise ConfigError(
            f"this {path} keeps {few(sorted(more))} beside its groups and states, and each "
            "parameter needs an optimizer like it on the rank that owns it; name the class in the "
            f"config (optimizer.params.matrix_optimizer: '{path}'), or give the optimizer inside, "
            "if this wraps another"
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
    return shared
