"""Recipes of optimizer objects that a script gives to ``deepspeed.initialize``: one for each
parameter group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import Section
from ds_layerwise.recipes.base.recipe import HyperText
from ds_layerwise.recipes.rules.any_torch_recipe import AnyTorch, subclass

#: Ownership of a rank: whole parameters, or as many elements of each as any other rank.
ClientSplit = Literal["whole", "element"]

#: The key of a parameter group, and of the section below.
SPLIT = "split"


class ClientOptimizerConfig(Section):
    """``layerwise.client_optimizer``: settings of an optimizer object beside its own."""

    example = "{'split': 'whole'}"

    split: ClientSplit = "whole"
    """Ownership of a rank: whole parameters, or "element", evenly cut pieces, which an element-wise
    class can update. A parameter group that says ``split`` says it for itself."""


class ClientTorch(AnyTorch):
    """The class of an optimizer object, as one of its parameter groups has set it. A subclass
    stands for one group.

    Shapes that it sees are those of the parameters themselves, whatever their number of axes.
    """

    prototype: ClassVar[Any]
    """Makes optimizers like the object; see
    :class:`ds_layerwise.optimizers.foreign.client_object.Prototype`.
    """
    told: ClassVar[Mapping[str, str]] = {}
    """Settings of the group by name, as text that is equal on ranks that were given the same."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The settings of the group."""
        return dict(self.told)

    def summary(self, hyper: HyperText) -> str:
        """Name the settings of the group, but for switches that are off."""
        return ", ".join(
            f"{key} {value}" for key, value in self.told.items() if value not in ("None", "False")
        )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the group; overrides can change none of them."""
        return dict(self.told)


def client_recipe(
    path: str, prototype: Any, told: Mapping[str, str], *, split: ClientSplit
) -> ClientTorch:
    """Return the recipe of one group of an object whose class is at ``path``. Its states are of use
    to that class alone.
    """
    whole = split == "whole"
    kind = subclass(ClientTorch, path, whole=whole, prototype=prototype, told=dict(told))
    recipe: ClientTorch = kind()
    return recipe


def check_override(name: str, changes: Mapping[str, Any]) -> None:
    """Refuse what overrides cannot say of a parameter of a client optimizer.

    Raises:
        ConfigError: names the key.
    """
    takes = ("lr", "lr_scale", "min_lr", "weight_decay")
    for key in changes:
        if key not in takes:
            raise ConfigError(
                f"layerwise.overrides sets {key} for {name}, which the optimizer given to "
                f"initialize() trains: they can set {', '.join(takes)}; say the rest in a "
                "parameter group of its own"
            )
