"""The takeover of an optimizer object that a script passed to ``initialize()``: its groups serve;
its ``step``, ``state_dict`` and ``load_state_dict`` are replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.optim import Optimizer

from ds_layerwise.checkpoint.plain_values import plain
from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.instance_patches import patch
from ds_layerwise.optimizers.base.fields import normalised
from ds_layerwise.optimizers.foreign.client_recipe import ClientSplit
from ds_layerwise.routing.routes import Routes
from ds_layerwise.zero.groups.client_object import (
    must_be_optimizer,
    of_class,
    path_of,
    recipes_of,
)
from ds_layerwise.zero.groups.param_groups import Held, LayerWiseOptimizer
from ds_layerwise.zero.groups.rate_checks import check_floors


class ClientOptimizer(LayerWiseOptimizer):
    """The groups of an optimizer object: the same list and the same dicts that it and its
    schedulers have.

    From now on, the object's own ``step`` only tells its schedulers and hooks that the engine has
    stepped. Calls that would change it independently raise an error: ``step`` by other code,
    ``add_param_group`` and ``load_state_dict``; so does ``state_dict``, which would have only the
    states that one rank owns.

    Args:
        given: the object, or a function that makes it from ``params``.
        split: for groups that do not set ``split`` themselves.

    Raises:
        ConfigError: no optimizers like it can be made, see :func:`.client_object.recipes_of`, or
            another engine uses it.
    """

    def __init__(self, given: Any, params: Any, *, split: ClientSplit) -> None:
        make = given if callable(given) else None
        client = must_be_optimizer(given if make is None else make(params))
        if "add_param_group" in vars(client):
            raise ConfigError(
                f"this {path_of(client)} has been given to another engine, which trains with its "
                "groups; make a new one"
            )
        self.client = client
        self.recipes_by_group = recipes_of(client, make, split=split)
        self.config = OptimizerConfig(decay_vectors=True)
        self._stepping = False
        Optimizer.__init__(self, client.param_groups, {})
        self.param_groups = client.param_groups
        self.state = client.state
        self._built = tuple(self.param_groups)
        self.built_with = tuple(map(_before_schedules, self.param_groups))
        self.configured = list(map(dict, self.built_with))
        self.own_decay = frozenset(range(len(self._built)))
        self.own_keys = []

    def groups_now(self) -> list[dict[str, Any]]:
        """Return the settings of groups for the next step: all of their values under ``of_client``,
        and, under this package's names, the rate and, if the class has one, the weight decay.
        """
        settings = []
        for group, known in zip(self.param_groups, self.configured, strict=True):
            now = {
                "configured_lr": known["lr"],
                "lr": group["lr"],
                "matrix_lr_ratio": 1.0,
                "scalar_lr_ratio": 1.0,
                "weight_decay": group.get("weight_decay", 0.0),
                "momentum": 0.0,
                "betas": (0.0, 0.0),
                "eps": 0.0,
                "of_client": of_class(group),
            }
            settings.append(now)
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
            found[key] = normalised(plain(value, key))
        return found

    def hold(self, held: Iterable[Held]) -> None:
        """Set the states of the object to those that this rank owns."""
        self.client.state.clear()
        super().hold(held)
        self._bind()

    def _bind(self) -> None:
        """Replace the methods of the object, so that it does nothing by itself."""

        def refuse(*_: Any, **__: Any) -> None:
            raise StepError(
                f"an engine trains with this {path_of(self.client)}, and each rank has the states "
                "of some of its parameters; call engine.step(), save with "
                "engine.save_checkpoint(), or whole states in one file with "
                "engine.optimizer.save_state_dict_to_file(), load with engine.load_checkpoint(), "
                "and add groups before initialize()"
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

    def mark_step(self) -> None:
        """Tell the object's schedulers and hooks that an update was made."""
        self._stepping = True
        try:
            self.client.step()
            vars(self.client)["_opt_called"] = True
        finally:
            self._stepping = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction. The object has already set defaults."""
        self.param_groups.append(param_group)


def _before_schedules(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``group``, with its rate before any scheduler."""
    values = of_class(group)
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
