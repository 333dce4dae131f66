"""A rank's sums for the norm of averaged gradients, and the decision that their totals lead to."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.zero.run_state import RunState

#: Added to a norm before it is compared with a bound, as for parallel groups: clipping to the norm
#: itself changes nothing.
_CLIP_EPS = 1e-6

#: The largest float32 number, and the largest whose square is one: rules compute squares.
_LARGEST = torch.finfo(torch.float32).max
_LARGEST_ROOT = math.sqrt(_LARGEST)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision of all ranks about the averaged gradients of a step."""

    factor: float
    """The factor for all gradients. It undoes the loss scale and clips."""
    frozen: frozenset[str]
    """The parameters that no rank updates in this step."""
    overflow: bool
    """True if the step is skipped because a gradient is not finite, or too large."""
    norm: float | None
    """The norm of the raw averages, without the loss scale; None if no setting needs it."""
    factors: Mapping[str, float]
    """The factors of the parameters that do not use ``factor``, by parameter."""
    norms: Mapping[str, float]
    """The norms of the norm groups, by group."""
    above: float | None
    """The norm, if the step is skipped because it exceeds ``grad_norm_skip_threshold``;
    else None.
    """
    zeros: int | None
    """The number of elements that are zero; None if no setting needs it."""
    loss_scale: float
    """The loss scale that the averages include."""
    clip_grad: float
    """The bound of the norm; 0 for none."""

    @property
    def skipped(self) -> bool:
        """True if nothing is updated."""
        return self.overflow or self.above is not None

    def factor_of(self, name: str) -> float:
        """Return the factor of the averaged gradient of a parameter."""
        return self.factors.get(name, self.factor)


def nothing(run: RunState) -> Tensor:
    """Return the sums of a rank that contributes nothing."""
    config = run.config
    numel = 2 + len(config.norm_groups) + config.log_num_zeros_in_grad
    return torch.zeros(numel, device=run.device, dtype=widest_float())


def fill_(sums: Tensor, run: RunState, idle: Collection[str]) -> None:
    """Write the sums of this rank into ``sums``, which :func:`nothing` has made: the sum of squares
    outside of norm groups, that of all gradients (which must be finite), that of each norm group,
    and the number of zeros.

    A norm is over whole parameters, and each parameter counts once, however it is cut and however
    many ranks have copies. A norm group with a bound of its own counts only in its own norm, as the
    group "mtp" of Megatron-LM does; one without a bound counts in both norms. If the model is cut,
    values that several of its ranks share count once, but any of these ranks may find them not
    finite.

    Args:
        idle: the parameters that are frozen here and got no gradient.
    """
    reduced = run.owned.reduced
    elsewhere = run.planned.counted_elsewhere
    group_of = run.planned.norm_groups
    rest = reduced.sum_of_squares(leave_out={*elsewhere, *group_of})
    groups = []
    for key in run.config.norm_groups:
        others = (name for name in run.pieces if group_of.get(name) != key)
        groups.append(reduced.sum_of_squares(leave_out={*elsewhere, *others}))
    everything = reduced.sum_of_squares() if elsewhere else sum(groups, rest)
    values = [rest, everything, *groups]
    if run.config.log_num_zeros_in_grad:
        values.append(reduced.number_of_zeros(leave_out={*elsewhere, *idle}))
    torch.stack(values, out=sums)


def decide(
    run: RunState,
    sums: Sequence[float],
    frozen: frozenset[str],
    *,
    clip_grad: float,
    loss_scale: float,
) -> Decision:
    """Decide on the step from the ``sums`` over all ranks.

    A finite norm that no float32 number holds skips the step, and so does a clipped one without a
    square: from either, rules would make NaN. This does not depend on ``check_overflow``.

    Args:
        clip_grad: the bound of the norm; 0 for none.
    """
    config = run.config
    settings = run.settings
    rest, everything, *more = sums
    together = []
    norms = {}
    bounded = {}
    for square, (key, group) in zip(more, config.norm_groups.items(), strict=False):
        norms[key] = math.sqrt(square) / loss_scale
        if group.gradient_clipping is None:
            together.append(square)
        else:
            bounded[key] = norms[key], group.gradient_clipping
    norm = math.sqrt(rest + math.fsum(together)) / loss_scale
    factors = {}
    for name, key in run.planned.norm_groups.items():
        if key in bounded:
            factors[name] = _factor(*bounded[key], loss_scale)
    bounded[""] = norm, clip_grad
    overflow = settings.check_overflow and not math.isfinite(everything)
    threshold = config.grad_norm_skip_threshold
    above = zeros = shown = None
    if threshold is not None and threshold < norm <= _LARGEST and not overflow:
        above = norm
    else:
        overflow |= any(
            _LARGEST < norm < math.inf or _LARGEST_ROOT < min(norm, most or math.inf) < math.inf
            for norm, most in bounded.values()
        )
    if config.log_num_zeros_in_grad:
        zeros = round(sums[-1])
    if settings.compute_grad_norm:
        shown = math.inf if overflow else norm
    return Decision(
        factor=_factor(norm, clip_grad, loss_scale),
        frozen=frozen,
        overflow=overflow,
        norm=shown,
        factors=factors,
        norms=norms if settings.compute_grad_norm else {},
        above=above,
        zeros=zeros,
        loss_scale=loss_scale,
        clip_grad=clip_grad,
    )


def _factor(norm: float, most: float, loss_scale: float) -> float:
    """Return the factor that undoes the loss scale and reduces the norm to at most ``most``; a
    ``most`` of 0 is no bound.
    """
    clip = (norm + _CLIP_EPS) / most if most > 0 else 1.0
    return 1 / (loss_scale * max(1.0, clip))
