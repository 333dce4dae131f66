"""What rules have in common whose updates are momenta, orthogonalised by Newton-Schulz."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.decay import WeightDecay
from ds_layerwise.optimizers.devices import require
from ds_layerwise.optimizers.rule import Hyper, State, UpdateRule
from ds_layerwise.optimizers.rules.update_hooks import step_
from ds_layerwise.orthogonalize.batching import Some, batches, max_batch_numel, stack, unstack
from ds_layerwise.orthogonalize.newton_schulz import (
    NEED_FLOAT32,
    Coefficients,
    coefficients,
    compute_dtype,
    newton_schulz,
)
from ds_layerwise.orthogonalize.norms import frobenius_norms
from ds_layerwise.orthogonalize.spectral import capped
from ds_layerwise.orthogonalize.tensor_shards import Peers, newton_schulz_of_shards
from ds_layerwise.plan.routes.routes import Axis, whole_shape
from ds_layerwise.recipes.rules import muon_recipes as recipes
from ds_layerwise.recipes.rules.muon_recipes import NsDtype, ScaleMode

T = TypeVar("T", bound="Orthogonalized")

#: What stands in for a norm of 0: dividing by it keeps zeros.
TINY = torch.finfo(torch.float32).tiny


def scale_factor(mode: ScaleMode, rows: int, cols: int) -> float:
    """What an orthogonalised ``(rows, cols)`` update is multiplied with.

    ``original`` is Keller Jordan's and DeepSpeed's; ``spectral`` gives every shape an update of RMS
    1, ``match_rms_adamw`` of about AdamW's 0.2 (arXiv 2502.16982); ``unit_rms_norm`` maps RMS 1 to
    RMS 1.
    """
    if mode == "original":
        return math.sqrt(max(1, rows / cols))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / cols)
    return (0.2 if mode == "match_rms_adamw" else 1.0) * math.sqrt(max(rows, cols))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Matrices of equal shape that are updated together, k of them: views of the tensors that have
    them.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]
    direction: Tensor
    """``(k, rows, cols)``, read only: what is orthogonalised."""
    shape: tuple[int, int]
    """Of each matrix, whole."""

    def state(self, key: str) -> list[Tensor]:
        """The state ``key`` of each of ``params``, as a view."""
        return [state[key] for state in self.states]


@dataclass(frozen=True, slots=True, kw_only=True)
class Orthogonalized(UpdateRule):
    """Momentum, nesterov, Newton-Schulz in batches of equal shape, weight decay, hooks.

    A subclass says what becomes of an orthogonal matrix (:meth:`adapted_`) and how it is scaled
    (:meth:`scale`). State: ``momentum_buffer``, like the parameter, an exponential moving average
    of the gradient, and what the recipe adds. The leading axis of a ``(batch, rows, cols)``
    parameter counts matrices.
    """

    recipe: recipes.Orthogonalized
    ns_coefficients: Coefficients
    ns_dtype: NsDtype = "auto"
    fast_dtypes: frozenset[torch.dtype] = frozenset()
    """What ``ns_dtype`` "auto" may take; see :func:`.orthogonalize.newton_schulz.compute_dtype`."""
    cut: tuple[Axis, Peers] | None = None
    """The axis of which this rank has a part, and the ranks that have the others; None for whole
    matrices.
    """

    @classmethod
    def of(cls: type[T], recipe: recipes.Orthogonalized) -> T:
        """The rule that runs ``recipe``.

        Raises:
            ConfigError: ``ns_coefficients`` is not a known name, or diverges in the ``ns_dtype``
                asked for.
        """
        rows, ns_dtype = coefficients(recipe.ns_coefficients, recipe.ns_steps), recipe.ns_dtype
        if recipe.ns_coefficients in NEED_FLOAT32:
            if ns_dtype in ("bf16", "fp16"):
                raise ConfigError(
                    f"ns_coefficients {recipe.ns_coefficients!r} diverges in half precision, got "
                    f"ns_dtype {ns_dtype!r}; set ns_dtype to 'fp32', or use 'polar_express'"
                )
            ns_dtype = "fp32"
        return cls(recipe=recipe, ns_coefficients=rows, ns_dtype=ns_dtype)

    def check(self, device: torch.device) -> None:
        """Refuse a device that has no products in ``ns_dtype``.

        Raises:
            ConfigError: see :func:`.optimizers.devices.require`.
        """
        if self.ns_dtype != "auto":
            require(self.products_in, device, key="optimizer.params.ns_dtype", value=self.ns_dtype)

    def on_device(self: T, fast_dtypes: frozenset[torch.dtype]) -> T:
        """This rule where ``fast_dtypes`` are much faster than float32."""
        return replace(self, fast_dtypes=fast_dtypes)

    @property
    def products_in(self) -> torch.dtype:
        """The dtype of the products of Newton-Schulz."""
        return compute_dtype(self.ns_dtype, self.recipe.ns_method, self.fast_dtypes)

    def of_shards(self: T, axis: Axis, peers: Peers) -> T:
        """This rule for matrices of which this rank has a tensor shard."""
        return self if self.recipe.sees_tensor_shards else replace(self, cut=(axis, peers))

    def prepared(self, direction: Tensor) -> Tensor:
        """What is orthogonalised of ``direction``, which is read only."""
        return direction

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """The update of ``batch`` before it is scaled; states of it are updated, ``orthogonal`` may
        be overwritten.
        """
        return orthogonal

    def scale(self, rows: int, cols: int) -> float:
        """What the update of whole ``(rows, cols)`` matrices is multiplied with."""
        raise NotImplementedError

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Update momenta, then the parameters, batch by batch of equal shape."""
        groups = batches(
            [(*p.shape[:-2], *self._whole(p.shape)) for p in params],
            max_batch_numel(params[0].device),
        )
        for group in groups:
            self._update_batch(group, params, grads, states, hyper)
        if self.recipe.spectral_clip is not None:
            for group in groups:
                self._clip_([some.of(params) for some in group], self.recipe.spectral_clip)

    def _update_batch(
        self,
        group: Sequence[Some],
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        mine, gradients = ([some.of(tensors) for some in group] for tensors in (params, grads))
        views = [
            {key: some.within(value) for key, value in states[some.tensor].items()}
            for some in group
        ]
        decay, momenta = WeightDecay.of(self.recipe), [view["momentum_buffer"] for view in views]
        given = decay.gradients(mine, gradients, hyper)
        torch._foreach_lerp_(momenta, given, 1 - hyper.momentum)
        direction = stack(momenta)
        if self.recipe.nesterov:
            direction = torch.lerp(stack(given), direction, hyper.momentum)
        rows, cols = self._whole(direction.shape)
        batch = Batch(
            params=mine, grads=gradients, states=views, direction=direction, shape=(rows, cols)
        )
        update = self.adapted_(self._orthogonal(self.prepared(direction)), batch)
        decay.shrink_(mine, unstack(update, mine), hyper)
        step_(
            self.recipe, mine, update, lr=hyper.lr, scale=self.scale(rows, cols), norms=self.norms
        )

    def _whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The last two of ``shape``, of whole matrices."""
        return whole_shape(
            tuple(shape[-2:]), *((None, 1) if self.cut is None else (self.cut[0], self.cut[1].size))
        )

    def _orthogonal(self, direction: Tensor) -> Tensor:
        if self.cut is None:
            return newton_schulz(
                direction,
                self.ns_coefficients,
                method=self.recipe.ns_method,
                dtype=self.products_in,
            )
        axis, peers = self.cut
        return newton_schulz_of_shards(
            direction,
            self.ns_coefficients,
            axis=axis,
            peers=peers,
            method=self.recipe.ns_method,
            distributed=self.recipe.muon_tp_mode == "distributed",
            dtype=self.products_in,
        )

    def summed(self, value: Tensor) -> Tensor:
        """The sum of ``value`` over the parts of matrices; of whole ones itself."""
        return value if self.cut is None else self.cut[1].sum_(value)

    def norms(self, matrices: Sequence[Tensor]) -> Tensor:
        """The Frobenius norms of ``k`` matrices, ``(k,)``, of the whole ones where these are
        parts.
        """
        own = frobenius_norms(matrices)
        return own if self.cut is None else self.summed(own.square_()).sqrt_()

    def norms_of(self, stacked: Tensor) -> Tensor:
        """:meth:`norms` of ``(k, rows, cols)``, as ``(k, 1, 1)``."""
        return self.norms(list(stacked.unbind())).view(-1, 1, 1)

    def _clip_(self, params: list[Tensor], most: float) -> None:
        """Cut singular values of ``params`` down to ``most``; parts of matrices are gathered for
        it.
        """
        if self.cut is None:
            torch._foreach_copy_(params, unstack(capped(params, most), params))
            return
        axis, peers = self.cut
        whole = torch.cat(peers.gather(stack(params).contiguous()).unbind(), dim=axis)
        mine = capped([whole], most).chunk(peers.size, dim=axis)[peers.rank]
        torch._foreach_copy_(params, unstack(mine, params))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled(Orthogonalized):
    """Orthogonalised momenta that are scaled by the shape of their matrix."""

    recipe: recipes.Scaled

    def scale(self, rows: int, cols: int) -> float:
        """``scale_mode``, times ``extra_scale_factor``."""
        return self.recipe.extra_scale_factor * scale_factor(self.recipe.scale_mode, rows, cols)
