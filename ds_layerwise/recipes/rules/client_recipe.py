"""Optimizer objects that a script gives to ``deepspeed.initialize``: one recipe for each of their
parameter groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import new_class
from typing import Any, ClassVar, Literal

from ds_layerwise.errors import ConfigError
from ds_layerwise.recipes.base.fields import Section
from ds_layerwise.recipes.rules.any_torch_recipe import AnyTorch

#: Whether a rank owns whole parameters, or as many elements of each as any other rank.
ClientSplit = Literal["whole", "element"]

#: What a parameter group calls that, and the section below.
SPLIT = "split"


class ClientOptimizerConfig(Section):
    """``layerwise.client_optimizer``: what the script cannot say of the optimizer that it gives."""

    example = "{'split': 'whole'}"

    split: ClientSplit = "whole"
    """What a rank owns: whole parameters, or "element", evenly cut pieces, which an element-wise
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
    """By name, what the group has set, as text that is equal on ranks that were given the same."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What its group has set."""
        return dict(self.told)

    def summary(self, hyper: Callable[[str], str]) -> str:
        """What its group has set, but for switches that are off."""
        return ", ".join(
            f"{key} {value}" for key, value in self.told.items() if value not in ("None", "False")
        )

    def settings(self) -> dict[str, Any]:
        """What its group has set; overrides can change none of it."""
        return dict(self.told)


def client_recipe(
    path: str, prototype: Any, told: Mapping[str, str], *, split: ClientSplit
) -> ClientTorch:
    """The recipe of one group of an object whose class is at ``path``. Its states are of use to
    that class alone.
    """
    made = new_class(
        path,
        (ClientTorch,),
        exec_body=lambda body: body.update(
            rule=path,
            family=path,
            whole=split == "whole",
            prototype=prototype,
            told=dict(told),
            __module__=__name__,
            __doc__=ClientTorch.__doc__,
            __annotations__={
                "rule": ClassVar[str],
                "family": ClassVar[str],
                "whole": ClassVar[bool],
                "prototype": ClassVar[Any],
                "told": ClassVar[Mapping[str, str]],
            },
        ),
    )
    found: ClientTorch = made()
    return found


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
