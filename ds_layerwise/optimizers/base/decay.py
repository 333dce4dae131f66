"""Weight decay: it draws weights towards zero in addition to a rule's update, the same for all
rules.

With W the weights, g their gradient, wd ``weight_decay``, lr the learning rate that the rule
updates W with, and u the direction of the update, W <- W - lr u::

    decoupled    W <- W - lr wd W    AdamW, arXiv 1711.05101
    independent  W <- W - wd W       arXiv 1711.05101 with its own schedule
    l2           g <- g + wd W       torch.optim.Adam; before moments and momentum
    palm         W <- W - lr^2 wd W  PaLM, arXiv 2204.02311

``cautious``: an element decays only where sign(u) sign(W) >= 0 (arXiv 2510.12402), which is where u
draws it towards zero, too, or is zero: as the paper and microsoft/dion have it for every rule, and
modded-nanogpt for its matrices (its Adam leaves elements alone whose u is zero). u is that of this
step, and W what it was before: decay and update are both subtracted from the same W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from ds_layerwise.optimizers.base.fields import Section
from ds_layerwise.optimizers.base.one_step import Hyper

WeightDecayMethod = Literal["decoupled", "independent", "l2", "palm"]


class WeightDecay(Section):
    """The settings of weight decay. A rule calls :meth:`with_l2`, then :meth:`decay_`."""

    rule: ClassVar[str]
    """The name in configs and in the registry."""

    weight_decay_method: WeightDecayMethod = "decoupled"
    """The method of weight decay; see :mod:`ds_layerwise.optimizers.base.decay`."""
    cautious_weight_decay: bool = False
    """Decay only the elements that the update also draws towards zero."""

    @model_validator(mode="after")
    def _can_decay_so(self) -> WeightDecay:
        if self.cautious_weight_decay and self.weight_decay_method == "l2":
            raise ValueError(
                f"cautious_weight_decay is true, and weight_decay_method of {self.rule} is 'l2', "
                "which adds weight decay to the gradient before there is an update to compare "
                "signs with; set weight_decay_method to 'decoupled', 'independent' or 'palm', or "
                "cautious_weight_decay to false"
            )
        return self

    def with_l2(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], hyper: Hyper
    ) -> list[Tensor]:
        """Return the gradients for a rule: ``grads`` themselves or, with l2, new tensors."""
        if self.weight_decay_method != "l2" or not hyper.weight_decay:
            return list(grads)
        return list(torch._foreach_add(list(grads), list(params), alpha=hyper.weight_decay))

    def decay_(self, params: Sequence[Tensor], directions: Sequence[Tensor], hyper: Hyper) -> None:
        """Decay ``params`` in place. With l2 this does nothing, because :meth:`with_l2` has done
        it.

        Args:
            directions: the updates that are subtracted from ``params`` next, up to a factor that is
                not negative. They are only read, and only with ``cautious_weight_decay``.
        """
        kept = 1 - self.decay_share(hyper)
        if kept == 1:
            return
        if not self.cautious_weight_decay:
            torch._foreach_mul_(list(params), kept)
            return
        # One after another, so that temporaries are at most twice the largest parameter.
        for param, direction in zip(params, directions, strict=True):
            # Use signs, because a product of small numbers may round to zero.
            agree = torch.sign(param).mul_(torch.sign(direction)) >= 0
            param.mul_(torch.where(agree, param.new_full((), kept), 1.0))

    def decay_share(self, hyper: Hyper) -> float:
        """Return the fraction of itself that a weight loses in a step."""
        lr = hyper.lr
        rates = {"decoupled": lr, "independent": 1.0, "palm": lr * lr, "l2": 0.0}
        return rates[self.weight_decay_method] * hyper.weight_decay

    def decay_summary(self) -> str:
        """Return the method of weight decay as text, if it is not this optimizer's default; else
        empty.
        """
        method = self.weight_decay_method
        default = type(self).model_fields["weight_decay_method"].default
        return ", ".join([method] * (method != default) + ["cautious"] * self.cautious_weight_decay)
