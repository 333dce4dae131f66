"""Muon: momentum, orthogonalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.devices import require
from ds_layerwise.optimizers.rule import Hyper, State, zeros
from ds_layerwise.orthogonalize.batching import MAX_BATCH_NUMEL_CPU, Some, batches, stack, unstack
from ds_layerwise.orthogonalize.newton_schulz import (
    NEED_FLOAT32,
    Coefficients,
    coefficients,
    compute_dtype,
    newton_schulz,
)
from ds_layerwise.orthogonalize.tensor_shards import Peers, newton_schulz_of_shards
from ds_layerwise.plan.routes import Axis, whole_shape
from ds_layerwise.recipes import muon as recipes
from ds_layerwise.recipes.muon import NsDtype, ScaleMode, TpMode
from ds_layerwise.recipes.newton_schulz import MAX_BATCH_NUMEL, NsMethod


def scale_factor(mode: ScaleMode, rows: int, cols: int) -> float:
    """What an orthogonalised ``(rows, cols)`` update is multiplied with.

    ``original`` is Keller Jordan's and DeepSpeed's; ``spectral`` gives every shape an update of RMS 1,
    ``match_rms_adamw`` of about AdamW's 0.2 (arXiv 2502.16982); ``unit_rms_norm`` maps RMS 1 to RMS 1.
    """
    if mode == "original":
        return math.sqrt(max(1, rows / cols))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return (0.2 if mode == "match_rms_adamw" else 1.0) * math.sqrt(max(rows, cols))


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices.

    State: ``momentum_buffer``, like the parameter, an exponential moving average of the gradient. Weight decay is
    decoupled. The leading axis of a ``(batch, rows, cols)`` parameter counts matrices.
    Reference: https://kellerjordan.github.io/posts/muon/
    """

    ns_coefficients: Coefficients
    ns_method: NsMethod = "gram"
    ns_dtype: NsDtype = "auto"
    nesterov: bool = True
    scale_mode: ScaleMode = "original"
    extra_scale_factor: float = 1.0
    tp_mode: TpMode = "duplicated"
    """What happens to parts of matrices, which ``blockwise`` takes for matrices; see
    :mod:`.orthogonalize.tensor_shards`."""
    fast_dtypes: frozenset[torch.dtype] = frozenset()
    """What ``ns_dtype`` "auto" may take; see :func:`.orthogonalize.newton_schulz.compute_dtype`."""
    cut: tuple[Axis, Peers] | None = None
    """The axis of which this rank has a part, and the ranks that have the others; None for whole matrices."""

    @classmethod
    def of(cls, recipe: recipes.Muon) -> Muon:
        """The rule that runs ``recipe``.

        Raises:
            ConfigError: ``ns_coefficients`` is not a known name, or diverges in the ``ns_dtype`` asked for.
        """
        rows, ns_dtype = coefficients(recipe.ns_coefficients, recipe.ns_steps), recipe.ns_dtype
        if recipe.ns_coefficients in NEED_FLOAT32:
            if ns_dtype in ("bf16", "fp16"):
                raise ConfigError(f"ns_coefficients {recipe.ns_coefficients!r} diverges in half precision, got "
                                  f"ns_dtype {ns_dtype!r}; set ns_dtype to 'fp32', or use 'polar_express'")
            ns_dtype = "fp32"
        return cls(ns_coefficients=rows, ns_method=recipe.ns_method, ns_dtype=ns_dtype, nesterov=recipe.nesterov,
                   scale_mode=recipe.scale_mode, extra_scale_factor=recipe.extra_scale_factor,
                   tp_mode=recipe.muon_tp_mode)

    def init_state(self, param: Tensor) -> State:
        """A momentum of zeros."""
        return zeros(recipes.Muon().states(tuple(param.shape)), param)

    def check(self, device: torch.device) -> None:
        """Refuse a device that has no products in ``ns_dtype``.

        Raises:
            ConfigError: see :func:`.optimizers.devices.require`.
        """
        if self.ns_dtype != "auto":
            require(self.products_in, device, key="optimizer.params.ns_dtype", value=self.ns_dtype)

    def on_device(self, fast_dtypes: frozenset[torch.dtype]) -> Muon:
        """This rule where ``fast_dtypes`` are much faster than float32."""
        return replace(self, fast_dtypes=fast_dtypes)

    @property
    def products_in(self) -> torch.dtype:
        """The dtype of the products of Newton-Schulz."""
        return compute_dtype(self.ns_dtype, self.ns_method, self.fast_dtypes)

    def of_shards(self, axis: Axis, peers: Peers) -> Muon:
        """This rule for matrices of which this rank has a tensor shard."""
        return self if self.tp_mode == "blockwise" else replace(self, cut=(axis, peers))

    def update_(self, params: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence[State],
                hyper: Hyper) -> None:
        """Update momenta, then the parameters, batch by batch of equal shape."""
        momenta = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(momenta, list(grads), 1 - hyper.momentum)
        if hyper.weight_decay:
            torch._foreach_mul_(list(params), 1 - hyper.lr * hyper.weight_decay)
        max_numel = MAX_BATCH_NUMEL_CPU if params[0].device.type == "cpu" else MAX_BATCH_NUMEL
        shapes = [tuple(p.shape) if self.cut is None else whole_shape(tuple(p.shape), self.cut[0], self.cut[1].size)
                  for p in params]
        for group in batches(shapes, max_numel):
            batch = [some.of(params) for some in group]
            scale = self.extra_scale_factor * scale_factor(self.scale_mode, *shapes[group[0].tensor][-2:])
            torch._foreach_add_(batch, self._directions(group, grads, momenta, hyper.momentum, like=batch),
                                alpha=-hyper.lr * scale)

    def _directions(self, group: Sequence[Some], grads: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float, *,
                    like: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalised directions of ``group``, shaped ``like`` its parameters.

        Who has no name for them when the next batch begins has no memory for both.
        """
        direction = stack([some.of(momenta) for some in group])
        if self.nesterov:
            direction = torch.lerp(stack([some.of(grads) for some in group]), direction, momentum)
        return unstack(self._orthogonal(direction), like)

    def _orthogonal(self, direction: Tensor) -> Tensor:
        if self.cut is None:
            return newton_schulz(direction, self.ns_coefficients, method=self.ns_method,
                                 dtype=self.products_in)
        axis, peers = self.cut
        return newton_schulz_of_shards(direction, self.ns_coefficients, axis=axis, peers=peers, method=self.ns_method,
                                       distributed=self.tp_mode == "distributed", dtype=self.products_in)
