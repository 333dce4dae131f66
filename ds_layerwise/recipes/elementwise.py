"""Optimizers that update every element as if it were alone: AdamW, Adam, Lion, SGD."""

from __future__ import annotations

from typing import ClassVar

from ds_layerwise.recipes.recipe import Recipe, StateSpec, WeightDecayMethod, like


class Elementwise(Recipe):
    """What they have in common: parameters may be cut anywhere, and the rate is ``adam_lr``."""

    whole: ClassVar[bool] = False
    lr_ratio = "scalar_lr_ratio"


class Adam(Elementwise):
    """Adam with L2 regularisation, as :class:`torch.optim.Adam`."""

    rule: ClassVar[str] = "adam"
    family: ClassVar[str] = "adam"
    gradient_average: ClassVar[str | None] = "exp_avg"
    hyper: ClassVar[tuple[str, ...]] = ("betas", "eps")

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """Two moments, and how many steps there were."""
        return {**like(shape, "exp_avg", "exp_avg_sq"), "step": StateSpec((), on_host=True)}


class AdamW(Adam):
    """Adam with decoupled weight decay, as :class:`torch.optim.AdamW`."""

    rule: ClassVar[str] = "adamw"

    weight_decay_method: WeightDecayMethod = "decoupled"


class Lion(Elementwise):
    """Sign of a moving average, with decoupled weight decay (arXiv 2302.06675)."""

    rule: ClassVar[str] = "lion"
    family: ClassVar[str] = "lion"
    gradient_average: ClassVar[str | None] = "exp_avg"
    hyper: ClassVar[tuple[str, ...]] = ("betas",)

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One average."""
        return like(shape, "exp_avg")


class Sgd(Elementwise):
    """SGD with momentum and L2 regularisation, as :class:`torch.optim.SGD`. Its momentum is a sum, no average."""

    rule: ClassVar[str] = "sgd"
    family: ClassVar[str] = "sgd"
    hyper: ClassVar[tuple[str, ...]] = ("momentum",)

    weight_decay_method: WeightDecayMethod = "l2"

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """One momentum."""
        return like(shape, "momentum_buffer")
