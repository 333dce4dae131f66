"""The ``torch.optim.Optimizer`` that users, schedulers and monitors see.

It has only ``param_groups``: as many groups as the user passed, in the same order, the same dict
objects for the whole run. The backend itself decides which parameters of a group are matrices. So a
scheduler that writes one ``lr`` into every group keeps the ratio of ``muon_lr`` to ``adam_lr``,
because the rates are stored as factors of ``lr``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.config.overrides import Override
from ds_layerwise.config.sections import DEFAULT_MUON_LR, HYPER_KEYS, OptimizerConfig, check_hyper
from ds_layerwise.errors import ConfigError, StepError, nearest
from ds_layerwise.instance_patches import refusing
from ds_layerwise.optimizers.fields import check, merged_keys, normalised
from ds_layerwise.optimizers.recipe import Recipe, State
from ds_layerwise.optimizers.registry import recipes_of_settings
from ds_layerwise.routing.routes import OF_OTHER_SCHEDULES, Routes
from ds_layerwise.zero.setup.rate_checks import check_floors, check_peaks, check_taken

#: The rates of a config, each with the group's key for its ratio to ``lr``.
RATIOS = {"muon_lr": "matrix_lr_ratio", "adam_lr": "scalar_lr_ratio"}

#: The keys that a user's group may have. ``muon_lr`` and ``adam_lr`` become the two ratios.
GROUP_KEYS = ("lr", "muon_lr", "adam_lr", "momentum", "weight_decay", "betas", "eps", "use_muon")

#: The options in groups of torch's optimizers that would change the update, with their default
#: values.
_OF_OTHER_OPTIMIZERS: dict[str, tuple[Any, ...]] = {
    "amsgrad": (False,),
    "maximize": (False,),
    "differentiable": (False,),
    "dampening": (0,),
    "decoupled_weight_decay": (True,),
    "correct_bias": (True,),
    "bias_correction": (True,),
    "adjust_lr_fn": (None,),
    "optimizer": (None,),
    "max_grad_norm": (None, 0),
    "torch_adam": (True,),
    "adam_w_mode": (True,),
    "fp32_optimizer_states": (True,),
}

#: The keys that schedulers of torch store in a group.
OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")

#: The keys that overrides set for parameters by name, except those that schedulers store in a
#: group.
_SAID_BY_OVERRIDES = frozenset((*merged_keys(recipes_of_settings()), *Override.change_keys())) - {
    *GROUP_KEYS,
    "optimizer",
    *OF_OTHER_SCHEDULES,
}


#: A negative rate counts as a rounded 0 if it is at most this fraction of the highest rate.
_ROUNDED = 1e-9


#: An engine's optimizer loads no dict of states, and is neither copied nor pickled: each rank has
#: only the states of some parameters, in memory that the engine updates.
refuse_states = refusing(
    "an engine's optimizer accepts no states from load_state_dict(), and cannot be copied or "
    "pickled, because each rank has only those of some parameters; load with "
    "engine.load_checkpoint(), or whole states from one file with "
    "engine.optimizer.load_state_dict_from_file(), as "
    "engine.optimizer.save_state_dict_to_file() writes it"
)


class LayerWiseOptimizer(torch.optim.Optimizer):
    """Parameter groups with ``lr``, ``momentum``, ``weight_decay``, ``betas``, ``eps`` and the two
    ratios.

    Args:
        params: parameters, or groups of them. A group's own ``lr`` replaces ``muon_lr`` and
            ``adam_lr`` for it, as in stock DeepSpeed, unless the group also sets those. A group
            with matrices and an ``lr`` must set ``muon_lr``, or ``use_muon``, which sends its
            parameters to one of the two optimizers. Unknown keys are kept.
        scheduler: the section of the config, if it is used.

    Raises:
        ConfigError: a group's value is out of bounds, a key is similar to a known one, or a key of
            the whole run has another value in a group.
    """

    fixed_keys: frozenset[str] = frozenset()
    """The keys of the whole run, which a group may repeat but not change."""
    recipes_by_group: tuple[Recipe, ...] = ()
    """The recipe of each group's parameters; empty if each parameter has its own."""
    _stepping = False

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        config: OptimizerConfig,
        *,
        scheduler: object = None,
    ) -> None:
        self.config = config
        self._scheduler = scheduler
        groups: list[dict[str, Any]] = []
        loose = []
        for item in params:
            if isinstance(item, dict):
                groups.append(item)
            else:
                loose.append(item)
        if loose or not groups:
            groups.append({"params": loose})
        self.own_keys = list(map(frozenset, groups))
        """The keys that the script has set in each group."""
        for index, group in enumerate(groups):
            groups[index] = _with_ratios(f"param_groups[{index}]", group, config)
        super().__init__(groups, {key: getattr(config, key) for key in HYPER_KEYS})
        self._checked: dict[int, dict[str, Any]] = {}
        self._sent_to = tuple(group.get("use_muon") for group in self.param_groups)
        self.fixed_keys = _of_no_group(config)
        self._take_note(map(_hyper_of, self.param_groups))
        self.own_decay = {i for i, keys in enumerate(self.own_keys) if "weight_decay" in keys}
        """The indices of the groups that set a weight decay themselves."""

    def _take_note(self, settings: Iterable[dict[str, Any]]) -> None:
        """Keep the ``settings`` of the groups, which are complete now."""
        self._built = tuple(self.param_groups)
        self.built_with = tuple(settings)
        """The settings of each group from config and script, without changes by schedulers or a
        checkpoint.
        """
        self.configured = list(map(dict, self.built_with))
        """The hyper-parameters of the run that this one continues, as far as they are used."""

    def groups_now(self) -> list[dict[str, Any]]:
        """Return the settings of groups for the next step: their own, and ``configured_lr``, their
        ``lr`` before any scheduler, in this run or in the one that it continues.
        """
        # torch's schedulers that cycle a momentum leave this key, and change the first of betas.
        settings = []
        for group, known in zip(self.param_groups, self.configured, strict=True):
            now = {**_hyper_of(group), "configured_lr": known["lr"]}
            if "max_momentum" in group:
                now["momentum"] = group["betas"][0]
            settings.append(now)
        return settings

    def check_groups(self) -> None:
        """Refuse values written into a group since the start that no update could use.

        Raises:
            StepError: names the group, the key, the value, and its bound or the way out.
        """
        for i, (group, use_muon) in enumerate(zip(self.param_groups, self._sent_to, strict=True)):
            where = f"param_groups[{i}]"
            known = self._checked.setdefault(i, {})
            for key, ratio in RATIOS.items():
                if key in group:
                    raise StepError(
                        f"{where}.{key} is {group[key]!r}, but has no effect after initialize(): "
                        f"the rate is lr times {ratio}; remove it, and set "
                        f"{where}[{ratio!r}] to the rate divided by lr"
                    )
            if group.get("use_muon") != use_muon:
                raise StepError(
                    f"{where}.use_muon is {group.get('use_muon')!r} and was {use_muon!r} when this "
                    "engine was made; parameters keep their optimizers for the whole run; set it "
                    "back, or save, and resume in a new engine with on_optimizer_change"
                )
            try:
                for key in group.keys() & self.fixed_keys:
                    if key not in known or known[key] is not group[key]:
                        _require_as_the_run(where, key, group[key], self.config)
                        known[key] = group[key]
                for key in HYPER_KEYS:
                    value = group.get(key)
                    # torch's LinearLR ends at -7e-20 instead of 0.
                    if (
                        key == "lr"
                        and isinstance(value, float)
                        and -_ROUNDED * self.built_with[i]["lr"] < value < 0
                    ):
                        continue
                    # A scheduler changes one of them.
                    if type(value) is not float or value != known.get(key):
                        known[key] = check_hyper(
                            f"{where}.{key}", "lr" if key in RATIOS.values() else key, value
                        )
            except ConfigError as error:
                raise StepError(
                    f"{error}; nothing was updated, so set it and call engine.step() again"
                ) from error

    def named(self, given: Mapping[str, Any]) -> dict[str, object]:
        """Return the part of ``given`` that a load compares, under the names of a config."""
        lr = float(given["lr"])
        named: dict[str, object] = {"lr": lr}
        for key, ratio in RATIOS.items():
            if ratio in given:
                # As many digits as survive a product of two rounded numbers.
                named[key] = float(f"{float(given[ratio]) * lr:.12g}")
        for key in given.keys() & set(HYPER_KEYS) - {"lr", *RATIOS.values()}:
            if key == "betas":
                named[key] = tuple(map(float, given[key]))
            else:
                named[key] = float(given[key])
        return named

    def hold(self, states: Mapping[Tensor, State]) -> None:
        """Set the visible states, by parameter, to those that this rank owns."""
        self.state.update(states)

    def require_chosen_rates(self, routes: Routes) -> None:
        """Refuse a group that has matrices and an ``lr`` of its own without ``muon_lr``, a
        ``scheduler`` section that would set rates nobody chose, and a bound above its rate.

        Raises:
            ConfigError: for the first two only if ``scale_mode`` is not "match_rms_adamw", because
                one rate then suits both optimizers.
        """
        kind = self.config.matrix
        for route in routes.values():
            keys = self.own_keys[route.group] & {"lr", "muon_lr", "use_muon"}
            if route.recipe.for_matrices and keys == {"lr"} and not kind.takes_rate_of_adamw:
                lr = self.built_with[route.group]["lr"]
                one_rate = ""
                if kind.as_adamw:
                    one_rate = (
                        f", or set optimizer.params.{kind.as_adamw}, with which lr is right for "
                        "both"
                    )
                raise ConfigError(
                    f"param_groups[{route.group}].lr is {lr:g} without muon_lr, the group "
                    f"has matrices ({route.name}), and {kind.rule.capitalize()}'s rate is far from "
                    f"AdamW's: give the group muon_lr, such as {DEFAULT_MUON_LR}{one_rate}"
                )
        check_taken(self.config, routes, self.own_keys)
        check_floors(routes, self.groups_now())
        used: dict[int, set[str]] = {}
        for route in routes.values():
            used.setdefault(route.group, set()).add(route.recipe.lr_ratio)
        check_peaks(self._scheduler, self.param_groups, self.config, used=used)

    def restore_groups(self) -> None:
        """Restore the groups without parameters, which DeepSpeed removes: users and schedulers rely
        on them.
        """
        self.param_groups[:] = self._built

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. Only the constructor may call this.

        Raises:
            StepError: after construction, because all parameters have their places.
        """
        if hasattr(self, "_built"):
            raise StepError(
                "parameter groups cannot be added to an engine; give all of them to initialize(), "
                "frozen parameters too, or save, unfreeze and resume in a new engine"
            )
        super().add_param_group(param_group)

    #: A copy or a pickle would have only the states of this rank, too.
    load_state_dict = __reduce_ex__ = refuse_states

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Raise an error for users: the engine runs the update.

        Raises:
            StepError: always, unless the backend calls it. It does so once per update, so that
                torch's schedulers see a step.
        """
        if not self._stepping:
            raise StepError("this optimizer only holds the parameter groups; call engine.step()")

    def mark_step(self) -> None:
        """Tell schedulers and hooks that an update was made."""
        self._stepping = True
        try:
            self._tell_of_step()
        finally:
            self._stepping = False

    def _tell_of_step(self) -> None:
        self.step()


def _require_as_the_run(
    where: str,
    key: str,
    value: object,
    config: OptimizerConfig,
) -> None:
    """Refuse a key that is not allowed in a group, unless its value equals that of the run.

    Raises:
        ConfigError: names both values and the way out.
    """
    value = normalised(value)
    if value is None:
        return
    for_the_run = config.for_the_run()
    if key not in for_the_run:
        same = _OF_OTHER_OPTIMIZERS.get(key)
        if same is None:
            raise ConfigError(
                f"{where}.{key} cannot be set in a parameter group, got {value!r}; set it in an "
                "entry of layerwise.overrides for these parameters"
            )
        if value in same:
            return
        if key == "optimizer":
            raise ConfigError(
                f"{where}.optimizer is {value!r}, and groups have no such key; set use_muon to "
                "true or false"
            )
        raise ConfigError(
            f"{where}.{key} is {value!r}, and the whole run has {same[0]!r}, which a group cannot "
            "change; this optimizer has no such switch; remove it"
        )
    # A group may have parameters of both optimizers.
    by_rule = {r.rule: getattr(r, key) for r in config.recipes if key in r.keys()}
    values = list(by_rule.values()) or [for_the_run[key]]
    if all(value == of_run for of_run in values):
        return
    has = repr(values[0])
    if any(of_run != values[0] for of_run in values):
        has = " and ".join(f"{of_run!r} for {rule}" for rule, of_run in by_rule.items())
    raise ConfigError(
        f"{where}.{key} is {value!r}, and the whole run has {has}, which a group cannot change; "
        f"set optimizer.params.{key}"
    )


def _hyper_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in HYPER_KEYS}


def _of_no_group(config: OptimizerConfig) -> frozenset[str]:
    """Return the keys for the whole run only, or for parameters by name only."""
    return _SAID_BY_OVERRIDES | config.for_the_run().keys()


def _with_ratios(where: str, group: Mapping[str, Any], config: OptimizerConfig) -> dict[str, Any]:
    checked = dict(group)
    for key in group:
        if key == "use_muon":
            checked[key] = check(bool, f"{where}.{key}", group[key])
        elif key in GROUP_KEYS:
            checked[key] = check_hyper(f"{where}.{key}", key, group[key])
        elif key in _OF_OTHER_OPTIMIZERS or key in _of_no_group(config):
            _require_as_the_run(where, key, group[key], config)
        elif key not in OF_SCHEDULERS and (
            close := nearest(key, GROUP_KEYS, cutoff=0.8)
            or nearest(key, config.for_the_run(), cutoff=0.85)
        ):
            raise ConfigError(f"{where}.{key} is not an option; did you mean '{close}'?")
    lr = checked.get("lr")
    if lr == 0:
        raise ConfigError(
            f"{where}.lr must be greater than 0, got 0: the learning rates of both optimizers are "
            "kept in ratio to it; freeze parameters that shall not move"
        )
    for key, ratio in RATIOS.items():
        own = getattr(config, key) if lr is None else lr
        checked[ratio] = checked.pop(key, own) / (lr or config.lr)
    return checked
