"""What ranks look at and agree on before anything is updated: whether to, how much to clip, and what to leave out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.ranks import comm
from ds_layerwise.ranks.agreement import Agreement
from ds_layerwise.ranks.buffers import FlatBuffer
from ds_layerwise.ranks.owned import Owned
from ds_layerwise.ranks.same_weights import SameWeights
from ds_layerwise.ranks.sync import EagerGradSync, GradSync
from ds_layerwise.zero.guard import Guard
from ds_layerwise.zero.interrupted import Interrupted
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.planned import Planned
from ds_layerwise.zero.settings import Settings

#: What parallel groups add to a norm's denominator so that clipping to the norm itself changes nothing.
_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do with the averaged gradients of a step."""

    factor: float
    """What they are multiplied with, which undoes the loss scale and clips."""
    frozen: frozenset[str]
    """The parameters that no rank updates."""
    overflow: bool = False
    """Whether the step is skipped."""
    norm: float | None = None
    """The norm of the raw averages, without the loss scale; None if nobody asked for it."""


class BeforeUpdate:
    """Looks at parameters and gradients, and agrees with all ranks of a model on what to do.

    Args:
        params: the trained parameters of ``model`` by name, which look into ``values``.
        given: the parameters that the user gave to the optimizer, frozen ones included.
        tied: parameters that other stages of a pipeline hold, too, and the ranks of those stages.
    """

    def __init__(self, model: nn.Module, params: Mapping[str, nn.Parameter], values: FlatBuffer, owned: Owned, *,
                 planned: Planned, settings: Settings, given: Iterable[Tensor],
                 tied: Sequence[tuple[str, comm.Group]], grad_sync: GradSync | EagerGradSync, offloading: Offloading,
                 interrupted: Interrupted) -> None:
        ep_size = {spec.name: spec.ep_size for spec in planned.specs}
        self._owned, self._grad_sync, self._settings = owned, grad_sync, settings
        self._offloading, self._interrupted = offloading, interrupted
        self._counted_elsewhere = planned.counted_elsewhere
        self._guard = Guard(model, params, values, given, may_be_unused=settings.may_be_unused)
        self._agreement = Agreement(ep_size, group=settings.group, model_group=settings.model_group,
                                    tensor_group=settings.tensor_group, tied=tied)
        self.same_weights = SameWeights(params, ep_size, group=settings.group)

    def decide(self, *, clip_grad: float, loss_scale: float) -> Decision:
        """Find out what to do with the gradients of this step. Every rank must call this at the same point.

        Args:
            clip_grad: the bound of the norm; 0 for none.

        Raises:
            LayerWiseError: on every rank, if on any gradients have not been reduced, or parameters are not what they
                were.
        """
        error: Exception | None = None
        idle, squares = frozenset[str](), torch.zeros(2, device=self._owned.device, dtype=widest_float())
        try:
            self._interrupted.check()
            self._offloading.check_not_offloaded()
        except RuntimeError as found:
            error = found
        try:
            # What else it may raise ends a collective, in which the others are: they are not on their way to the sum.
            self._grad_sync.finish(aside=error is not None)
        except StepError as found:
            error = error or found
        try:
            if error is None:
                idle = self._guard.check(self._grad_sync.got)
                if self._settings.compute_grad_norm or self._settings.check_overflow:
                    squares = self._squares()
        except (RuntimeError, MemoryError) as found:
            # The others are on their way to the sum, and some device may have no memory left for what is summed.
            error = error or found
        noticed = self.same_weights.noticed(self._owned.written)
        sums, frozen = self._agreement.reach(torch.cat([squares, noticed]), error, idle)
        self.same_weights.settle(*map(bool, sums[2:]))
        if not (self._settings.compute_grad_norm or self._settings.check_overflow):
            return Decision(1 / loss_scale, frozen)
        norm = math.sqrt(sums[0]) / loss_scale
        overflow = self._settings.check_overflow and not math.isfinite(sums[1])
        clip = (norm + _CLIP_EPS) / clip_grad if clip_grad > 0 else 1.0
        shown = (math.inf if overflow else norm) if self._settings.compute_grad_norm else None
        return Decision(1 / (loss_scale * (clip if clip > 1 else 1.0)), frozen, overflow, shown)

    def _squares(self) -> Tensor:
        """Sums of squares of this rank's averaged gradients: what the norm counts, and what must be finite.

        Where a model is cut, what several of its ranks hold alike counts once, but any of them may find it not finite.
        """
        counted = self._owned.sum_of_squares(leave_out=self._counted_elsewhere)
        return torch.stack([counted, self._owned.sum_of_squares() if self._counted_elsewhere else counted])
