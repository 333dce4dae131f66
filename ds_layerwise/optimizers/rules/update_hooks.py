"""Hooks on updates of whole matrices before they are added, and on the matrices after.

With W a matrix after its weight decay, u its update, lr the learning rate and norms those of
Frobenius::

    hyperball        W <- R (W - lr R u/|u|) / |W - lr R u/|u||,
                         R the setting or, for "own", |W|; nothing decays
    relative_update  W <- W - lr |W| u/|u|
    radial_brake     |W - lr u| <- |W| + s (|W - lr u| - |W|),
                         s the first setting if the norm grew, else the second
    spectral_clip    at last, singular values of W are cut down to the setting

As in NVIDIA's Emerging-Optimizers at fd77292 (``weight_update_hooks``, and ``spectral_hardcap`` of
``spectral_clipping_utils``), which takes one hook at a time. A norm below :data:`TINY` counts as 0
there and here, and what has it becomes 0. Its 0.3.0 has ``hyperball`` alone: "own" is its default
radius.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_layerwise.optimizers.recipes.update_hook_settings import UpdateHooks
from ds_layerwise.orthogonalize.batching import matrices_of, unstack

#: A Frobenius norm below this counts as 0.
TINY = 1e-15

#: A function that returns the Frobenius norms of ``(rows, cols)`` matrices as ``(k,)``; for parts,
#: those of the whole matrices.
Norms = Callable[[Sequence[Tensor]], Tensor]


def step_(
    hooks: UpdateHooks,
    params: Sequence[Tensor],
    update: Tensor,
    *,
    lr: float,
    scale: float,
    norms: Norms,
) -> None:
    """Subtract ``lr`` times ``scale`` times ``update`` from ``params``, with ``hooks`` except
    ``spectral_clip``.

    Args:
        params: views of equal matrices, ``(rows, cols)`` or ``(batch, rows, cols)``.
        update: ``(k, rows, cols)``; overwritten.
        scale: greater than 0; it has no effect if a hook determines the size of the update.
    """
    if hooks.sizing_hook is None and hooks.radial_brake is None:
        torch._foreach_add_(list(params), unstack(update, params), alpha=-lr * scale)
        return
    matrices = matrices_of(params)
    before = norms(matrices)
    if isinstance(hooks.hyperball, float):
        before = torch.full_like(before, hooks.hyperball)
    if hooks.sizing_hook is not None:
        update.mul_(_ratio(before, norms(list(update.unbind()))).view(-1, 1, 1))
        scale = 1.0
    torch._foreach_add_(list(params), unstack(update, params), alpha=-lr * scale)
    if hooks.hyperball is not None:
        _scale_(matrices, _ratio(before, norms(matrices)))
    if hooks.radial_brake is not None:
        _scale_(matrices, _braked(before, norms(matrices), *hooks.radial_brake))


def _braked(
    before: Tensor,
    after: Tensor,
    outward: float,
    inward: float,
) -> Tensor:
    """Return the factor for matrices whose norms have changed from ``before`` to ``after``."""
    before, after = (torch.where(norm < TINY, 0, norm) for norm in (before, after))
    change = after - before
    return _ratio(before + torch.where(change > 0, outward, inward) * change, after)


def _ratio(wanted: Tensor, norms: Tensor) -> Tensor:
    """Return the factor that brings ``norms`` to ``wanted``; 0 for norms that count as 0."""
    return torch.where(norms < TINY, 0, wanted / norms.clamp_min(TINY))


def _scale_(matrices: Sequence[Tensor], factors: Tensor) -> None:
    torch._foreach_mul_(list(matrices), list(factors.unbind()))
