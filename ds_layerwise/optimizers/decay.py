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
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_layerwise.optimizers.base.recipe import Recipe, WeightDecayMethod
from ds_layerwise.optimizers.rule import Hyper


@dataclass(frozen=True)
class WeightDecay:
    """A method of weight decay. A rule calls :meth:`gradients`, then :meth:`shrink_`."""

    method: WeightDecayMethod = "decoupled"
    cautious: bool = False

    @classmethod
    def of(cls, recipe: Recipe) -> WeightDecay:
        """Return the decay that ``recipe`` uses."""
        return cls(recipe.weight_decay_method, recipe.cautious_weight_decay)

    def gradients(
        self, params: Sequence[Tensor], grads: Sequence[Tensor], hyper: Hyper
    ) -> list[Tensor]:
        """Return the gradients for a rule: ``grads`` themselves or, with l2, new tensors."""
        if self.method != "l2" or not hyper.weight_decay:
            return list(grads)
        return list(torch._foreach_add(list(grads), list(params), alpha=hyper.weight_decay))

    def shrink_(
        self,
        params: Sequence[Tensor],
        directions: Sequence[Tensor],
        hyper: Hyper,
    ) -> None:
        """Decay ``params`` in place. With l2 this does nothing, because :meth:`gradients` has done
        it.

        Args:
            directions: the updates that are subtracted from ``params`` next, up to a factor that is
                not negative. They are only read, and only if ``cautious``.
        """
        kept = 1 - self.share(hyper)
        if kept == 1:
            return
        if not self.cautious:
            torch._foreach_mul_(list(params), kept)
            return
        # One after another, so that temporaries are at most twice the largest parameter.
        for param, direction in zip(params, directions, strict=True):
            # Use signs, because a product of small numbers may round to zero.
            agree = torch.sign(param).mul_(torch.sign(direction)) >= 0
            param.mul_(torch.where(agree, param.new_full((), kept), 1.0))

    def share(self, hyper: Hyper) -> float:
        """Return the fraction of itself that a weight loses in a step."""
        lr = hyper.lr
        rates = {"decoupled": lr, "independent": 1.0, "palm": lr * lr, "l2": 0.0}
        return rates[self.method] * hyper.weight_decay
