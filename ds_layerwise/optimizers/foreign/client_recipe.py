"""The recipes of optimizer objects that a script passes to ``deepspeed.initialize``: one for each
parameter group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.base.fields import Section
from ds_layerwise.optimizers.base.recipe import HyperText
from ds_layerwise.optimizers.foreign.any_torch_recipe import AnyTorch, subclass

#: The unit of ownership: whole parameters, or an equal share of the elements of each.
ClientSplit = Literal["whole", "element"]

#: The key of a parameter group, and of the section below.
SPLIT = "split"


class ClientOptimizerConfig(Section):
    """``layerwise.client_optimizer``: settings for an optimizer object, in addition to its own."""

    example = "{'split': 'whole'}"

    split: ClientSplit = "whole"
    """The unit of ownership: whole parameters, or "element" for evenly cut pieces, which an
    element-wise class can update. A ``split`` in a parameter group replaces it for that group.
    """


class ClientTorch(AnyTorch):
    """The class of an optimizer object, with the settings of one of its parameter groups. A
    subclass stands for one group.

    It sees parameters in their own shapes, with any number of axes.
    """

    prototype: ClassVar[Any]
    """The maker of optimizers like the object; see
    :class:`ds_layerwise.zero.groups.client_object.Prototype`.
    """
    told: ClassVar[Mapping[str, str]] = {}
    """The settings of the group by name, as text that is equal on ranks with the same settings."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings of the group."""
        return dict(self.told)

    def summary(self, hyper: HyperText) -> str:
        """Return the settings of the group as text, without switches that are off."""
        return ", ".join(
            f"{key} {value}" for key, value in self.told.items() if value not in ("None", "False")
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the group. Overrides cannot change any of them."""
        return self.arguments


def client_recipe(
    path: str, prototype: Any, told: Mapping[str, str], *, split: ClientSplit
) -> ClientTorch:
    """Return the recipe of one group of an object whose class is at ``path``. Only that class can
    use its states.
    """
    whole = split == "whole"
    return subclass(ClientTorch, path, whole=whole, prototype=prototype, told=dict(told))()


def check_override(name: str, changes: Mapping[str, Any]) -> None:
    """Refuse override keys that are not possible for a parameter of a client optimizer.

    Raises:
        ConfigError: names the key.
    """
    takes = ("lr", "lr_scale", "min_lr", "weight_decay")
    for key in changes:
        if key not in takes:
            raise ConfigError(
                f"layerwise.overrides sets {key} for {name}, which the optimizer given to "
                f"initialize() trains: they can set {', '.join(takes)}; set the rest in a "
                "parameter group of its own"
            )
