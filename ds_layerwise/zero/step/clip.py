"""What averaged gradients add up to over all ranks, and what follows from that for a step."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.setup.run_settings import Settings

#: What parallel groups add to a norm's denominator so that clipping to the norm itself changes
#: nothing.
_CLIP_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do with the averaged gradients of a step."""

    factor: float
    """What they are multiplied with, which undoes the loss scale and clips."""
    frozen: frozenset[str]
    """The parameters that no rank updates."""
    overflow: bool = False
    """Whether the step is skipped because not all of them are finite."""
    norm: float | None = None
    """The norm of the raw averages, without the loss scale; None if nobody asked for it."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By parameter, what replaces ``factor`` for it."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """By norm group, what ``norm`` is of all."""
    above: float | None = None
    """The norm, where the step is skipped because it is greater than
    ``grad_norm_skip_threshold``.
    """
    zeros: int | None = None
    """How many elements are zero; None if nobody asked for it."""
    loss_scale: float = 1.0
    """What they have been multiplied with."""

    @property
    def skipped(self) -> bool:
        """Whether nothing is updated."""
        return self.overflow or self.above is not None


class Judge:
    """Says what is added up over all ranks, and reads the sums.

    Norms are of whole parameters, each counted once, however they are cut and whoever has copies. A
    norm group with a bound of its own counts in its own norm alone, as the group "mtp" of
    Megatron-LM does; one without counts in both.
    """

    def __init__(
        self, owned: Owned, planned: Planned, config: LayerWiseConfig, settings: Settings
    ) -> None:
        self._owned, self._config, self._settings = owned, config, settings
        self._elsewhere, self._group_of = planned.counted_elsewhere, planned.norm_groups
        self._members = {
            key: frozenset(name for name, group in self._group_of.items() if group == key)
            for key in config.norm_groups
        }
        self._looks = settings.compute_grad_norm or settings.check_overflow

    def nothing(self) -> Tensor:
        """What a rank adds to the sums that has nothing to add."""
        numel = 2 + len(self._members) + self._config.log_num_zeros_in_grad
        return torch.zeros(numel, device=self._owned.device, dtype=widest_float())

    def sums(self, idle: Collection[str]) -> Tensor:
        """What this rank adds: squares of what is in no norm group, and of what must be finite;
        then of each group.

        Where a model is cut, what several of its ranks hold alike counts once, but any of them may
        find it not finite.

        Args:
            idle: the parameters that are frozen here, and got no gradient.
        """
        reduced, sums = self._owned.reduced, self.nothing()
        if self._config.log_num_zeros_in_grad:
            sums[-1] = reduced.number_of_zeros(leave_out={*self._elsewhere, *idle})
        if self._looks:
            rest = reduced.sum_of_squares(leave_out={*self._elsewhere, *self._group_of})
            groups = [
                reduced.sum_of_squares(leave_out=self._elsewhere, only=each)
                for each in self._members.values()
            ]
            everything = reduced.sum_of_squares() if self._elsewhere else sum(groups, rest)
            sums[: 2 + len(groups)] = torch.stack([rest, everything, *groups])
        return sums

    def decide(
        self, sums: Sequence[float], frozen: frozenset[str], *, clip_grad: float, loss_scale: float
    ) -> Decision:
        """What follows from the sums over all ranks.

        Args:
            clip_grad: the bound of the norm; 0 for none.
        """
        zeros = round(sums[-1]) if self._config.log_num_zeros_in_grad else None
        if not self._looks:
            return Decision(1 / loss_scale, frozen, zeros=zeros, loss_scale=loss_scale)
        squares, groups = dict(zip(self._members, sums[2:], strict=False)), self._config.norm_groups
        norms = {key: math.sqrt(square) / loss_scale for key, square in squares.items()}
        norm = (
            math.sqrt(
                sums[0]
                + math.fsum(square for key, square in squares.items() if not groups[key].is_apart)
            )
            / loss_scale
        )
        overflow = self._settings.check_overflow and not math.isfinite(sums[1])
        most, shown = self._config.grad_norm_skip_threshold, self._settings.compute_grad_norm
        factors = {
            name: _factor(norms[key], bound, loss_scale)
            for name, key in self._group_of.items()
            if (bound := groups[key].gradient_clipping) is not None
        }
        return Decision(
            _factor(norm, clip_grad, loss_scale),
            frozen,
            overflow,
            (math.inf if overflow else norm) if shown else None,
            factors,
            norms if shown else {},
            norm if not overflow and most is not None and most < norm < math.inf else None,
            zeros,
            loss_scale,
        )


def _factor(norm: float, most: float, loss_scale: float) -> float:
    """What gradients of that norm are multiplied with to have at most the norm ``most``, if that is
    not 0.
    """
    clip = (norm + _CLIP_EPS) / most if most > 0 else 1.0
    return 1 / (loss_scale * (clip if clip > 1 else 1.0))
