"""The rules of the Muon family: momenta that are orthogonalised by Newton-Schulz and scaled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.decay import WeightDecay
from ds_layerwise.optimizers.devices import has_products
from ds_layerwise.optimizers.recipes import muon_recipes as recipes
from ds_layerwise.optimizers.recipes.muon_recipes import NsDtype, ScaleMode
from ds_layerwise.optimizers.rule import Hyper, State, UpdateRule
from ds_layerwise.optimizers.rules.update_hooks import step_
from ds_layerwise.orthogonalize.batching import (
    Some,
    batches,
    matrices_of,
    max_batch_numel,
    stack,
    unstack,
)
from ds_layerwise.orthogonalize.newton_schulz import (
    NEED_FLOAT32,
    Coefficients,
    coefficients,
    compute_dtype,
    newton_schulz,
)
from ds_layerwise.orthogonalize.norms import frobenius_norms
from ds_layerwise.orthogonalize.spectral import capped
from ds_layerwise.orthogonalize.tensor_shards import (
    Axis,
    Peers,
    newton_schulz_of_shards,
    whole_shape,
)

T = TypeVar("T", bound="Orthogonalized")

#: Replaces a norm of 0 as a divisor, so that zeros stay zeros.
TINY = torch.finfo(torch.float32).tiny


def scale_factor(mode: ScaleMode, rows: int, cols: int) -> float:
    """Return the factor of an orthogonalised ``(rows, cols)`` update.

    ``original`` is Keller Jordan's and DeepSpeed's; ``spectral`` gives every shape an update of RMS
    1, ``match_rms_adamw`` of about AdamW's 0.2 (arXiv 2502.16982); ``unit_rms_norm`` maps RMS 1 to
    RMS 1.
    """
    if mode == "original":
        return math.sqrt(max(1, rows / cols))
    if mode == "unit_rms_norm":
        return math.sqrt(rows / cols)
    longer = math.sqrt(max(rows, cols))
    if mode == "match_rms_adamw":
        return 0.2 * longer
    return longer


@dataclass(frozen=True, kw_only=True)
class Batch:
    """``k`` matrices of equal shape that are updated together, as views of their tensors."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]
    direction: Tensor
    """The matrices to orthogonalise: ``(k, rows, cols)``, read only."""
    shape: tuple[int, int]
    """The shape of each whole matrix."""

    def state(self, key: str) -> list[Tensor]:
        """Return the state ``key`` of each of ``params``, as a view."""
        return [state[key] for state in self.states]

    def follow_(self, key: str, values: Tensor, weight: float) -> Tensor:
        """Update the averages in the state ``key`` with ``values`` and ``weight``. Return them as
        ``(k, ..., ...)``, in new memory.
        """
        averages = self.state(key)
        followed = torch.lerp(stack(averages), values, weight)
        torch._foreach_copy_(averages, unstack(followed, averages))
        return followed


@dataclass(frozen=True, kw_only=True)
class Orthogonalized(UpdateRule):
    """Momentum, nesterov, Newton-Schulz in batches of equal shape, weight decay, hooks.

    A subclass turns an orthogonal matrix into an update (:meth:`adapted_`) and scales it
    (:meth:`scale`). State: ``momentum_buffer``, like the parameter, an exponential moving average
    of the gradient, and the recipe's own. The leading axis of a ``(batch, rows, cols)`` parameter
    counts matrices.
    """

    recipe: recipes.Orthogonalized
    ns_coefficients: Coefficients
    ns_dtype: NsDtype = "auto"
    fast_dtypes: frozenset[torch.dtype] = frozenset()
    """The dtypes that ``ns_dtype`` "auto" may choose; see
    :func:`.orthogonalize.newton_schulz.compute_dtype`.
    """
    cut: tuple[Axis, Peers] | None = None
    """The axis along which matrices are cut, and the ranks with the other parts; None for whole
    matrices.
    """

    @classmethod
    def of(cls: type[T], recipe: recipes.Orthogonalized) -> T:
        """Return the rule that runs ``recipe``.

        Raises:
            ConfigError: ``ns_coefficients`` is not a known name, or diverges in the chosen
                ``ns_dtype``.
        """
        rows = coefficients(recipe.ns_coefficients, recipe.ns_steps)
        ns_dtype = recipe.ns_dtype
        if recipe.ns_coefficients in NEED_FLOAT32:
            if ns_dtype in ("bf16", "fp16"):
                raise ConfigError(
                    f"ns_coefficients {recipe.ns_coefficients!r} diverges with ns_dtype "
                    f"{ns_dtype!r}; set ns_dtype to 'fp32', or ns_coefficients to 'polar_express'"
                )
            ns_dtype = "fp32"
        return cls(recipe=recipe, ns_coefficients=rows, ns_dtype=ns_dtype)

    def check(self, device: torch.device) -> None:
        """Refuse a device without products in ``ns_dtype``.

        Raises:
            ConfigError: names the setting.
        """
        if self.ns_dtype != "auto" and not has_products(self.products_in, device):
            raise ConfigError(
                f"optimizer.params.ns_dtype is {self.ns_dtype!r}, and {device} has no products in "
                f"{str(self.products_in).removeprefix('torch.')}; set it to 'auto'"
            )

    def on_device(self: T, fast_dtypes: frozenset[torch.dtype]) -> T:
        """Return this rule for a device on which ``fast_dtypes`` are much faster than float32."""
        return replace(self, fast_dtypes=fast_dtypes)

    @property
    def products_in(self) -> torch.dtype:
        """The dtype of the products of Newton-Schulz."""
        return compute_dtype(self.ns_dtype, self.recipe.ns_method, self.fast_dtypes)

    def of_shards(self: T, axis: Axis, peers: Peers) -> T:
        """Return this rule for matrices of which this rank has a tensor shard."""
        if self.recipe.sees_tensor_shards:
            return self
        return replace(self, cut=(axis, peers))

    def prepared(self, direction: Tensor) -> Tensor:
        """Return the matrices to orthogonalise; ``direction`` is read only."""
        return direction

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of ``batch`` before scaling, and update the states of ``batch``.

        ``orthogonal`` may be overwritten.
        """
        return orthogonal

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of the update of whole ``(rows, cols)`` matrices."""
        raise NotImplementedError

    def update_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        hyper: Hyper,
    ) -> None:
        """Update momenta, then the parameters, in batches of equal shape."""
        shapes = [(*param.shape[:-2], *self._whole(param.shape)) for param in params]
        groups = batches(shapes, max_batch_numel(params[0].device))
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
        mine = [some.of(params) for some in group]
        gradients = [some.of(grads) for some in group]
        views = []
        for some in group:
            state = states[some.tensor]
            views.append({key: some.within(value) for key, value in state.items()})
        momenta = [view["momentum_buffer"] for view in views]
        decay = WeightDecay.of(self.recipe)
        given = decay.gradients(mine, gradients, hyper)
        torch._foreach_lerp_(momenta, given, 1 - hyper.momentum)
        if self.recipe.nesterov:
            direction = stack(torch._foreach_lerp(given, momenta, hyper.momentum))
        else:
            direction = stack(momenta)
        rows, cols = self._whole(direction.shape)
        batch = Batch(
            params=mine,
            grads=gradients,
            states=views,
            direction=direction,
            shape=(rows, cols),
        )
        update = self.adapted_(self._orthogonal(self.prepared(direction)), batch)
        decay.shrink_(mine, unstack(update, mine), hyper)
        step_(
            self.recipe,
            mine,
            update,
            lr=hyper.lr,
            scale=self.scale(rows, cols),
            norms=self.norms,
        )

    def _whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the last two sizes of ``shape`` for whole matrices."""
        if self.cut is None:
            return tuple(shape[-2:])
        axis, peers = self.cut
        return whole_shape(tuple(shape[-2:]), axis, peers.size)

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
        """Return the sum of ``value`` over the parts of matrices; ``value`` itself for
        whole ones.
        """
        if self.cut is None:
            return value
        _, peers = self.cut
        return peers.sum_(value)

    def norms(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return the Frobenius norms of ``k`` matrices, ``(k,)``; for parts, those of the whole
        matrices.
        """
        own = frobenius_norms(matrices)
        if self.cut is None:
            return own
        return self.summed(own.square_()).sqrt_()

    def norms_of(self, stacked: Tensor) -> Tensor:
        """Return the norms of ``(k, rows, cols)`` as ``(k, 1, 1)``."""
        return self.norms(list(stacked.unbind())).view(-1, 1, 1)

    def _clip_(self, params: list[Tensor], most: float) -> None:
        """Clip the singular values of ``params`` to ``most``. Parts are gathered first."""
        if self.cut is None:
            torch._foreach_copy_(params, unstack(capped(params, most), params))
            return
        axis, peers = self.cut
        whole = torch.cat(peers.gather(stack(params).contiguous()).unbind(), dim=axis)
        mine = capped([whole], most).chunk(peers.size, dim=axis)[peers.rank]
        torch._foreach_copy_(params, unstack(mine, params))


class Scaled(Orthogonalized):
    """Orthogonalised momenta, scaled by the shape of their matrix."""

    recipe: recipes.Scaled

    def scale(self, rows: int, cols: int) -> float:
        """Return the factor of ``scale_mode``, times ``extra_scale_factor``."""
        return self.recipe.extra_scale_factor * scale_factor(self.recipe.scale_mode, rows, cols)


class Muon(Scaled):
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices: the update is the orthogonal
    matrix.

    Reference: https://kellerjordan.github.io/posts/muon/
    """


class NorMuon(Scaled):
    """NorMuon: Muon with each row divided by the root of an average of its squares, and with Muon's
    norm.

    With O orthogonal, the update is |O| / |u| times u::

        v <- beta v + (1 - beta) mean over columns of O^2
        u = O / (sqrt(v) + eps)

    State ``moment2_buffer``: v, ``(rows, 1)``.

    Reference: arXiv 2510.05491, with the norm that the authors' own code keeps (ShizukaKuze/NorMuon
    at 22b57d4, and pytorch_optimizer 4.1.0); the paper's Algorithm 1 gives updates an RMS of 0.2,
    which ``scale_mode`` "match_rms_adamw" comes to but for what five Newton-Schulz steps leave.
    ``moment2_per`` "longer_side" is Emerging-Optimizers' choice (0.3.0), which averages over
    columns where there are at least as many rows, else over rows; it takes max(v, eps) for v.
    """

    recipe: recipes.NorMuon

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        axis = self.recipe.axis(*batch.shape)
        squares = orthogonal.square().sum(axis, keepdim=True)
        if self.cut is not None and self.cut[0] == axis:
            squares = self.summed(squares)
        squares.div_(batch.shape[axis])
        moment2 = batch.follow_("moment2_buffer", squares, 1 - self.recipe.moment2_beta)
        norms = self.norms_of(orthogonal)
        update = orthogonal.div_(moment2.sqrt_().add_(self.recipe.moment2_eps))
        return update.mul_(norms / self.norms_of(update).clamp_min(TINY))


class AdaMuon(Scaled):
    """Muon divided by the root of an average of its own squares, with the norm of an orthogonal
    matrix.

    With O orthogonal, the update is sqrt(min(rows, cols)) / |u| times u, so that with
    ``scale_mode`` "match_rms_adamw" every update has an RMS of 0.2::

        v <- beta v + (1 - beta) O^2
        u = O / (sqrt(v) + eps)

    State ``moment2_buffer``: v.

    Reference: arXiv 2507.11005 as the authors' own code has it (Chongjie-Si/AdaMuon at 3b84e03) and
    pytorch_optimizer 4.1.0; both also correct v for its bias, which the norm takes back but for
    eps. The paper's second version orthogonalises the signs of the momentum (``sign_momentum``).
    Without ``moment2_rescale`` it is what Emerging-Optimizers 0.3.0 calls adamuon: an element's
    first update is 1 / sqrt(1 - beta) whatever its gradient, so that with ``scale_mode`` "spectral"
    updates begin at an RMS of 72 (64 x 256) and end near 16.
    """

    recipe: recipes.AdaMuon

    def prepared(self, direction: Tensor) -> Tensor:
        """Return the signs of ``direction`` with ``sign_momentum``, else ``direction`` itself."""
        if self.recipe.sign_momentum:
            return direction.sign()
        return direction

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        moments = batch.state("moment2_buffer")
        parts = unstack(orthogonal, moments)
        torch._foreach_mul_(moments, self.recipe.moment2_beta)
        torch._foreach_addcmul_(moments, parts, parts, value=1 - self.recipe.moment2_beta)
        roots = torch._foreach_sqrt(moments)
        torch._foreach_add_(roots, self.recipe.moment2_eps)
        torch._foreach_div_(parts, roots)
        if self.recipe.moment2_rescale:
            norms = self.norms_of(orthogonal)
            wanted = math.sqrt(min(batch.shape))
            # A matrix without a gradient has a norm of 0, and 0 times infinity is NaN.
            orthogonal.mul_(torch.where(norms < wanted * TINY, 0, wanted / norms))
        return orthogonal


class Namo(Scaled):
    """NAMO: Muon scaled by the ratio of the momentum's norm to that of gradients, like Adam's
    steps.

    With g the gradient, d the direction that is orthogonalised to O, the update is
    |d| / (sqrt(v) + eps) times O::

        v <- beta v + (1 - beta) |g|^2

    State ``moment2_buffer``: v, one number a matrix.

    Reference: Emerging-Optimizers 0.3.0, after arXiv 2602.17080. The authors' own code
    (minxin-zhg/namo) corrects the bias of both averages, has eps under the root, bounds the step by
    1, scales weight decay with the step, and keeps 99 % of v. Without the correction, the factor
    begins at (1 - momentum) / sqrt(1 - beta), 0.22 without nesterov.
    """

    recipe: recipes.Namo

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        squares = self.norms(matrices_of(batch.grads)).square_().view(-1, 1, 1)
        moment2 = batch.follow_("moment2_buffer", squares, 1 - self.recipe.moment2_beta)
        roots = moment2.sqrt_().add_(self.recipe.moment2_eps)
        return orthogonal.mul_(self.norms_of(batch.direction) / roots)


class Scion(Orthogonalized):
    """Stochastic conditional gradient with the spectral norm::

        W <- (1 - lr) W - lr radius sqrt(rows / cols) O

    If W starts in the ball, it stays there while lr is at most 1, as far as O is orthogonal.
    Without ``constrained``, W shrinks by ``weight_decay`` as in every other rule, not by lr.

    Reference: arXiv 2502.07529, for layers between the first and the last; Emerging-Optimizers
    0.3.0, which has only the constrained version; and pytorch_optimizer 4.1.0.
    """

    recipe: recipes.Scion

    def scale(self, rows: int, cols: int) -> float:
        """Return ``spectral_radius`` times the factor of "unit_rms_norm"."""
        return self.recipe.spectral_radius * scale_factor("unit_rms_norm", rows, cols)


class PolarGrad(Orthogonalized):
    """Steepest descent in the spectral norm: the update is <O, d> O, with O the orthogonalised
    direction d.

    <O, d>, the sum of products of their elements, is the nuclear norm of d as far as O is
    orthogonal. So updates are proportional to gradients.

    Reference: arXiv 2505.21799; Emerging-Optimizers 0.3.0.
    """

    recipe: recipes.PolarGrad

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        # Sum rows first, and each matrix by itself: over a batch, the order of the sum would depend
        # on the batch size.
        of_rows = (orthogonal * batch.direction).sum(-1)
        return orthogonal.mul_(self.summed(of_rows.sum(-1)).view(-1, 1, 1))

    def scale(self, rows: int, cols: int) -> float:
        """Return ``extra_scale_factor``."""
        return self.recipe.extra_scale_factor
