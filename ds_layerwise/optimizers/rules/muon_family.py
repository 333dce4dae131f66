"""The Muon family: momenta of whole matrices, orthogonalised by Newton-Schulz and scaled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ds_layerwise.errors import ConfigError
from ds_layerwise.optimizers.devices import has_products
from ds_layerwise.optimizers.fields import Decay, Positive
from ds_layerwise.optimizers.recipe import (
    ANYWHERE,
    Hyper,
    HyperText,
    KeptMomentum,
    Shape,
    Site,
    State,
    States,
    StateSpec,
)
from ds_layerwise.optimizers.rules.update_hooks import UpdateHooks
from ds_layerwise.optimizers.scalars import lerp, lerp_
from ds_layerwise.orthogonalize.batching import (
    FULL_BATCH_NUMEL,
    MAX_BATCH_NUMEL,
    Some,
    Tensors,
    batches,
    frobenius_norms,
    matrices_of,
    max_batch_numel,
    stack,
    unstack,
)
from ds_layerwise.orthogonalize.newton_schulz import (
    NEED_FLOAT32,
    TINY,
    Coefficients,
    NsMethod,
    capped,
    coefficients,
    compute_dtype,
    newton_schulz,
    newton_schulz_flops,
    newton_schulz_workspace,
)
from ds_layerwise.orthogonalize.tensor_modes import Cut, TpMode
from ds_layerwise.orthogonalize.tensor_shards import (
    Axis,
    Shards,
    at_all,
    at_owners,
    newton_schulz_of_shards,
    padded,
    whole_shape,
)

NsDtype = Literal["auto", "bf16", "fp16", "fp32"]
ScaleMode = Literal["original", "spectral", "unit_rms_norm", "match_rms_adamw"]
Line = Literal["row", "column", "longer_side"]


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


@dataclass(frozen=True)
class Batch:
    """``k`` matrices of equal shape that are updated together, as views of their tensors."""

    params: Tensors
    grads: Tensors
    states: list[State]
    direction: Tensor
    """The matrices to orthogonalise: ``(k, rows, cols)``, read only."""
    shape: Shape
    """The shape of each whole matrix."""
    cut: Shards | None
    """See :attr:`.Site.cut`."""

    def state(self, key: str) -> Tensors:
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

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum of ``value`` over the parts of matrices; ``value`` itself for
        whole ones.
        """
        if self.cut is None:
            return value
        _, peers = self.cut
        return peers.sum_(value)

    def norms(self, matrices: Tensors) -> Tensor:
        """Return the Frobenius norms of ``k`` matrices, ``(k,)``; for parts, those of the whole
        matrices.
        """
        own = frobenius_norms(matrices)
        if self.cut is None:
            return own
        return self.summed(own.square_()).sqrt_()

    def norms_of(self, stacked: Tensor) -> Tensor:
        """Return the norms of ``(k, rows, cols)`` as ``(k, 1, 1)``."""
        return self.norms(stacked.unbind()).view(-1, 1, 1)


class MatrixMomentum(UpdateHooks, KeptMomentum):
    """Momentum, nesterov, batches of equal shape, weight decay, hooks.

    A subclass makes other matrices of the momenta (:meth:`directions_of`), turns these into updates
    (:meth:`adapted_`) and scales them (:meth:`scale_of`). State: ``momentum_buffer``, like the
    parameter, an exponential moving average of the gradient, and those of the subclass. The leading
    axis of a ``(batch, rows, cols)`` parameter counts matrices.
    """

    whole = True
    can_be_captured = True
    gradient_average = "momentum_buffer"
    hyper = ("momentum",)
    full_batch_numel = FULL_BATCH_NUMEL

    nesterov: bool = True

    def states(self, shape: Shape) -> States:
        """Return the momentum."""
        return self.like(shape, "momentum_buffer")

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Refuse nothing, tensor shards either."""
        return None

    def summary(self, hyper: HyperText) -> str:
        """Return the momentum, the scale of the update, and the hooks as text."""
        nesterov = ", nesterov" * self.nesterov
        return f"momentum {hyper('momentum')}{nesterov}{self.scale_summary()}{self.hook_summary()}"

    def scale_summary(self) -> str:
        """Return the recipe's own part of :meth:`summary`: empty, or a text that starts with a
        comma.
        """
        return ""

    def prepared(self, direction: Tensor) -> Tensor:
        """Return the matrices to orthogonalise; ``direction`` is read only."""
        return direction

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of ``batch`` before scaling, and update the states of ``batch``.

        ``orthogonal`` may be overwritten.
        """
        return orthogonal

    def scale_of(self, rows: int, cols: int) -> float:
        """Return the factor of the update of whole ``(rows, cols)`` matrices."""
        raise NotImplementedError

    def update_(
        self,
        params: Tensors,
        grads: Tensors,
        states: Sequence[State],
        hyper: Hyper,
        site: Site = ANYWHERE,
    ) -> None:
        """Update momenta, then the parameters, in batches of equal shape."""
        if self.sees_tensor_shards:
            site = replace(site, cut=None)
        shapes = [(*param.shape[:-2], *_whole(param.shape, site.cut)) for param in params]
        groups = batches(shapes, max_batch_numel(params[0].device))
        for mode, together in self._rounds(groups, shapes, site.cut):
            self._update_round(together, mode, params, grads, states, hyper, site)
            self._clip_(together, mode, params, site.cut)

    def _rounds(
        self,
        groups: Sequence[list[Some]],
        shapes: Sequence[Shape],
        cut: Shards | None,
    ) -> list[tuple[TpMode, list[list[Some]]]]:
        """Return the groups to update together, and how: with owners, up to about a full batch for
        each rank.
        """
        if cut is None:
            return [("duplicated", [group]) for group in groups]
        axis, peers = cut
        rounds: list[tuple[TpMode, list[list[Some]]]] = []
        owners = min(peers.size, sum(math.prod(shape[:-2]) for shape in shapes))
        room = 0
        for group in groups:
            shape = shapes[group[0].tensor][-2:]
            mode = self.mode_of(shape, axis, peers.size, owners)
            if mode != "owner":
                rounds.insert(0, (mode, [group]))
                continue
            if room <= 0:
                rounds.append((mode, []))
                room = peers.size * MAX_BATCH_NUMEL
            rounds[-1][1].append(group)
            room -= math.prod(shape) * sum(some.stop - some.start for some in group)
        return rounds

    def mode_of(self, shape: Shape, axis: Axis, size: int, owners: int) -> TpMode:
        """Return the method for ``(rows, cols)`` matrices that are cut along ``axis``."""
        return "duplicated"

    def directions_of(self, matrices: Tensors, mode: TpMode, site: Site) -> list[Tensor]:
        """Return new matrices for ``matrices``, a list of ``(k, rows, cols)`` in float32."""
        raise NotImplementedError

    def _update_round(
        self,
        together: Sequence[list[Some]],
        mode: TpMode,
        params: Tensors,
        grads: Tensors,
        states: Sequence[State],
        hyper: Hyper,
        site: Site,
    ) -> None:
        begun = []
        for group in together:
            mine = [some.of(params) for some in group]
            gradients = [some.of(grads) for some in group]
            views = []
            for some in group:
                state = states[some.tensor]
                views.append({key: some.within(value) for key, value in state.items()})
            momenta = [view["momentum_buffer"] for view in views]
            decayed = self.with_l2(mine, gradients, hyper)
            lerp_(momenta, decayed, hyper.of(lambda now: 1 - now.momentum))
            if self.nesterov:
                ahead = lerp(decayed, momenta, hyper.of(lambda now: now.momentum))
                direction = stack(ahead)
                del ahead
            else:
                direction = stack(momenta)
            shape = _whole(direction.shape, site.cut)
            begun.append(Batch(mine, gradients, views, direction, shape, site.cut))
        del decayed
        matrices = [self.prepared(batch.direction) for batch in begun]
        done = self.directions_of(matrices, mode, site)
        del matrices
        for batch in begun:
            update = self.adapted_(done.pop(0), batch)
            self.decay_(batch.params, unstack(update, batch.params), hyper)
            scale = self.scale_of(*batch.shape)
            self.add_update_(batch.params, update, hyper=hyper, scale=scale, norms=batch.norms)

    def _of_wholes(
        self,
        shards: Sequence[Any],
        function: Callable[[Any], Tensor],
        mode: TpMode,
        cut: Shards | None,
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Return the parts of ``function`` of whole matrices, which has results in ``dtype``."""
        if cut is None:
            return list(map(function, shards))
        axis, peers = cut
        if lengths := peers.lengths:
            shards = [padded(each, axis, max(lengths)) for each in shards]
        place: dict[str, Any] = {"axis": axis, "peers": peers}
        if mode != "owner":
            done = [at_all(each, function, **place) for each in shards]
        else:
            work = [self.work(_whole(each.shape, cut)) for each in shards]
            done = at_owners(shards, function, work=work, **place, dtype=dtype)
        if lengths:
            done = [each.narrow(axis, 0, lengths[peers.rank]) for each in done]
        return done

    def _clip_(
        self,
        together: Sequence[list[Some]],
        mode: TpMode,
        params: Tensors,
        cut: Shards | None,
    ) -> None:
        """Clip the singular values of parameters to ``spectral_clip``."""
        if self.spectral_clip is None:
            return
        own = []
        for group in together:
            own.append([some.of(params) for some in group])
        shards: Sequence[Any] = own
        if cut is not None:
            shards = list(map(stack, own))
        clip = partial(capped, most=self.spectral_clip)
        clipped = self._of_wholes(shards, clip, mode, cut, torch.float32)
        for mine in own:
            torch._foreach_copy_(mine, unstack(clipped.pop(0), mine))


class Orthogonalized(MatrixMomentum):
    """Momenta that are orthogonalised by Newton-Schulz."""

    as_adamw = "matrix_optimizer to 'adamuon'"

    ns_method: NsMethod = "gram"
    ns_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    ns_coefficients: Annotated[
        str | Annotated[Coefficients, Field(min_length=1)],
        Field(json_schema_extra={"expects": "a name or a list of [a, b, c]"}),
    ] = "simple"
    ns_dtype: NsDtype = "auto"
    muon_tp_mode: TpMode = "duplicated"
    """The method for matrices that tensor parallelism has cut; see
    :mod:`.orthogonalize.tensor_shards` and :mod:`.orthogonalize.tensor_modes`.
    """

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of the Newton-Schulz iteration and of hooks."""
        *batch, rows, cols = shape
        flops = newton_schulz_flops(rows, cols, steps=self.ns_steps, method=self.ns_method)
        return math.prod(batch) * flops + self.hook_flops(shape)

    def shared_work(self, shape: Shape, axis: Axis | None, size: int) -> tuple[int, int]:
        """Return the work, and the bytes that are sent, in the mode of ``muon_tp_mode``."""
        if axis is None or self.sees_tensor_shards:
            return super().shared_work(shape, axis, size)
        *batch, rows, cols = shape
        cut = self._cut((rows, cols), axis, size)
        flops, sent = cut.share(cut.mode(self.muon_tp_mode, size), size)
        return math.prod(batch) * flops, math.prod(batch) * sent

    def _cut(self, shape: Shape, axis: Axis, size: int) -> Cut:
        rows, cols = shape
        hooks = self.hook_flops(shape)
        return Cut(rows, cols, axis, size, self.ns_steps, self.ns_method, hooks)

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of Newton-Schulz on as many matrices as it takes at a time, with l2 also
        of the changed gradients; or the bytes of cautious decay or of the hook after it, if these
        are more.
        """
        iteration = newton_schulz_workspace(
            shape,
            method=self.ns_method,
            beside=self.held_beside,
            after=4 if self.cautious_weight_decay else 0,
        )
        return max(iteration, self.hook_workspace(shape))

    @property
    def held_beside(self) -> int:
        """The number of copies of the matrices that an update holds beside Newton-Schulz."""
        return int(self.weight_decay_method == "l2")

    @property
    def sees_tensor_shards(self) -> bool:
        """True with ``muon_tp_mode`` "blockwise"."""
        return self.muon_tp_mode == "blockwise"

    def check(self, device: torch.device | None) -> None:
        """Refuse coefficients that are unknown, or diverge in the chosen ``ns_dtype``, and a device
        without products in it.

        Raises:
            ConfigError: names the setting.
        """
        super().check(device)
        coefficients(self.ns_coefficients, self.ns_steps)
        if self.ns_coefficients in NEED_FLOAT32 and self.ns_dtype in ("bf16", "fp16"):
            raise ConfigError(
                f"ns_coefficients {self.ns_coefficients!r} diverges with ns_dtype "
                f"{self.ns_dtype!r}; set ns_dtype to 'fp32', or ns_coefficients to 'polar_express'"
            )
        dtype = self.products_in(frozenset())
        if device is not None and self.ns_dtype != "auto" and not has_products(dtype, device):
            raise ConfigError(
                f"optimizer.params.ns_dtype is {self.ns_dtype!r}, and {device} has no products in "
                f"{str(dtype).removeprefix('torch.')}; set it to 'auto'"
            )

    def products_in(self, fast_dtypes: frozenset[torch.dtype]) -> torch.dtype:
        """Return the dtype of the products of Newton-Schulz."""
        ns_dtype = "fp32" if self.ns_coefficients in NEED_FLOAT32 else self.ns_dtype
        return compute_dtype(ns_dtype, self.ns_method, fast_dtypes)

    def mode_of(self, shape: Shape, axis: Axis, size: int, owners: int) -> TpMode:
        """Return the mode of ``muon_tp_mode``."""
        return self._cut(shape, axis, size).mode(self.muon_tp_mode, owners)

    def directions_of(self, matrices: Tensors, mode: TpMode, site: Site) -> list[Tensor]:
        """Return them orthogonalised."""
        dtype = self.products_in(site.fast_dtypes)
        rows = coefficients(self.ns_coefficients, self.ns_steps)
        settings: dict[str, Any] = {"coefficients": rows, "method": self.ns_method, "dtype": dtype}
        if mode == "distributed" and site.cut is not None:
            axis, peers = site.cut
            parts = partial(newton_schulz_of_shards, axis=axis, peers=peers, **settings)
            return list(map(parts, matrices))
        return self._of_wholes(matrices, partial(newton_schulz, **settings), mode, site.cut, dtype)


def _whole(shape: Sequence[int], cut: Shards | None) -> Shape:
    """Return the last two sizes of ``shape`` for whole matrices."""
    if cut is None:
        return tuple(shape[-2:])
    axis, peers = cut
    return whole_shape(tuple(shape[-2:]), axis, peers.size, peers.lengths)


class ScaledByShape(MatrixMomentum):
    """Momenta whose updates are scaled by the shape of their matrix."""

    as_adamw = "scale_mode to 'match_rms_adamw'"
    sized_by = ("scale_mode", "extra_scale_factor")

    scale_mode: ScaleMode = "original"
    """See :func:`ds_layerwise.optimizers.rules.muon_family.scale_factor`."""
    extra_scale_factor: Positive = 1.0

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True with ``scale_mode`` "match_rms_adamw", or its equivalent, "spectral" with a factor
        of 0.2; unless a hook determines the size of updates.
        """
        scale = (self.scale_mode, self.extra_scale_factor)
        same = self.scale_mode == "match_rms_adamw" or scale == ("spectral", 0.2)
        return same and self.sizing_hook is None

    def scale_summary(self) -> str:
        """Return the scale as text, unless a hook replaces it."""
        if self.sizing_hook is not None:
            return ""
        return f", scale_mode {self.scale_mode}{_times(self.extra_scale_factor)}"

    def scale_of(self, rows: int, cols: int) -> float:
        """Return the factor of ``scale_mode``, times ``extra_scale_factor``."""
        return self.extra_scale_factor * scale_factor(self.scale_mode, rows, cols)


def _times(factor: float) -> str:
    if factor == 1:
        return ""
    return f" x {factor:g}"


class Muon(ScaledByShape, Orthogonalized):
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices: the update is the orthogonal
    matrix.

    Reference: https://kellerjordan.github.io/posts/muon/
    """

    rule = "muon"
    family = "muon"


class Adaptive(ScaledByShape, Orthogonalized):
    """An orthogonalised momentum that is divided by the root of a second moment."""

    moment2_beta: Decay = 0.95
    """The fraction of the second moment that is kept at a step."""
    moment2_eps: Positive = 1e-8
    """Added to the root of the second moment."""

    def scale_summary(self) -> str:
        """Return the scale and the average as text."""
        return f"{super().scale_summary()}, moment2_beta {self.moment2_beta:g}"


class NorMuon(Adaptive):
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

    rule = "normuon"
    family = "normuon"

    moment2_per: Line = "row"
    """The lines that have a second moment: each row, each column, or each of whichever are more. In
    a layer that stores (outputs, inputs), such as ``nn.Linear``, a row is a neuron; in
    transformers' ``Conv1D`` a column is.
    """

    def states(self, shape: Shape) -> States:
        """Return the momentum, and a number for each row, or column."""
        *batch, rows, cols = shape
        moment2 = (*batch, rows, 1) if self.axis(rows, cols) == -1 else (*batch, 1, cols)
        return {**super().states(shape), "moment2_buffer": StateSpec(moment2)}

    def axis(self, rows: int, cols: int) -> Axis:
        """Return the axis of a ``(rows, cols)`` matrix over which squares are averaged."""
        if self.moment2_per == "row" or self.moment2_per == "longer_side" and rows >= cols:
            return -1
        return -2

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Refuse "longer_side" for a matrix that is cut: its parts do not show the longer side."""
        if cut_axis is None or self.moment2_per != "longer_side" or self.sees_tensor_shards:
            return None
        line = "row" if shape[-2] >= shape[-1] else "column"
        return (
            "is cut by tensor parallelism, and moment2_per is 'longer_side', which the parts of a "
            f"matrix do not show; set moment2_per to '{line}', which means the same for it"
        )

    def scale_summary(self) -> str:
        """Return the scale and the average as text."""
        return f"{super().scale_summary()} per {self.moment2_per}"

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        axis = self.axis(*batch.shape)
        squares = orthogonal.square().sum(axis, keepdim=True)
        if batch.cut is not None and batch.cut[0] == axis:
            squares = batch.summed(squares)
        squares.div_(batch.shape[axis])
        moment2 = batch.follow_("moment2_buffer", squares, 1 - self.moment2_beta)
        norms = batch.norms_of(orthogonal)
        update = orthogonal.div_(moment2.sqrt_().add_(self.moment2_eps))
        return update.mul_(norms / batch.norms_of(update).clamp_min(TINY))


class AdaMuon(Adaptive):
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

    rule = "adamuon"
    family = "adamuon"

    scale_mode: ScaleMode = "match_rms_adamw"
    moment2_rescale: bool = True
    """Rescale the quotient to the Frobenius norm of an orthogonal matrix, the root of its shorter
    side.
    """
    sign_momentum: bool = False
    """Orthogonalise the signs of the momentum instead of the momentum."""

    @property
    def held_beside(self) -> int:
        """Add one with ``sign_momentum``: the momentum beside its signs."""
        return super().held_beside + self.sign_momentum

    def states(self, shape: Shape) -> States:
        """Return two states of the parameter's shape."""
        return self.like(shape, "momentum_buffer", "moment2_buffer")

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True with ``scale_mode`` "match_rms_adamw" and ``moment2_rescale``, its defaults."""
        return super().takes_rate_of_adamw and self.moment2_rescale

    def scale_summary(self) -> str:
        """Return the scale, the average, and the settings as text."""
        rescale = ", not rescaled" * (not self.moment2_rescale)
        return f"{super().scale_summary()}{rescale}{', of signs' * self.sign_momentum}"

    def prepared(self, direction: Tensor) -> Tensor:
        """Return the signs of ``direction`` with ``sign_momentum``, else ``direction`` itself."""
        if self.sign_momentum:
            return direction.sign()
        return direction

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        moments = batch.state("moment2_buffer")
        parts = unstack(orthogonal, moments)
        torch._foreach_mul_(moments, self.moment2_beta)
        torch._foreach_addcmul_(moments, parts, parts, value=1 - self.moment2_beta)
        roots = torch._foreach_sqrt(moments)
        torch._foreach_add_(roots, self.moment2_eps)
        torch._foreach_div_(parts, roots)
        if self.moment2_rescale:
            norms = batch.norms_of(orthogonal)
            wanted = math.sqrt(min(batch.shape))
            # A matrix without a gradient has a norm of 0, and 0 times infinity is NaN.
            orthogonal.mul_(torch.where(norms < wanted * TINY, 0, wanted / norms))
        return orthogonal


class Namo(Adaptive):
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

    rule = "namo"
    family = "namo"
    only_sizes = True

    @model_validator(mode="after")
    def _sees_gradients(self) -> Namo:
        if self.weight_decay_method == "l2":
            raise ValueError(
                "weight_decay_method of namo is 'l2', which would make weight decay a part of the "
                "gradients whose norms it compares; set it to 'decoupled', 'independent' or 'palm'"
            )
        return self

    def states(self, shape: Shape) -> States:
        """Return the momentum, and a number for each matrix."""
        return {**super().states(shape), "moment2_buffer": StateSpec((*shape[:-2], 1, 1))}

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        squares = batch.norms(matrices_of(batch.grads)).square_().view(-1, 1, 1)
        moment2 = batch.follow_("moment2_buffer", squares, 1 - self.moment2_beta)
        roots = moment2.sqrt_().add_(self.moment2_eps)
        return orthogonal.mul_(batch.norms_of(batch.direction) / roots)


class Scion(Orthogonalized):
    """Stochastic conditional gradient with the spectral norm::

        W <- (1 - lr) W - lr radius sqrt(rows / cols) O

    If W starts in the ball, it stays there while lr is at most 1, as far as O is orthogonal.
    Without ``constrained``, W shrinks by ``weight_decay`` as in every other rule, not by lr.

    Reference: arXiv 2502.07529, for layers between the first and the last; Emerging-Optimizers
    0.3.0, which has only the constrained version; and pytorch_optimizer 4.1.0.
    """

    rule = "scion"
    family = "muon"
    only_sizes = True

    nesterov: bool = False
    spectral_radius: Positive = 1.0
    """The spectral norm of the ball, in units of the root of rows over columns."""
    constrained: bool = True
    """Stay in the ball: weights decay by the learning rate, and ``weight_decay`` has no effect.
    False: the ball only bounds the update, and weights decay as in every other optimizer.
    """

    @model_validator(mode="after")
    def _stays_in_the_ball(self) -> Scion:
        for key in ("weight_decay_method", "cautious_weight_decay"):
            value = getattr(self, key)
            if self.constrained and value not in ("decoupled", False):
                raise ValueError(
                    f"{key} of scion is {value!r}, and constrained is true, with which every "
                    "weight decays by the learning rate; leave it out, or set constrained to false"
                )
        return self

    @property
    def own_weight_decay(self) -> float | None:
        """1 with ``constrained``, so that weights decay by the learning rate; else None."""
        return 1.0 if self.constrained else None

    def scale_summary(self) -> str:
        """Return the radius as text, and whether it bounds weights."""
        constrained = "constrained" if self.constrained else "unconstrained"
        return f", spectral_radius {self.spectral_radius:g}, {constrained}"

    def scale_of(self, rows: int, cols: int) -> float:
        """Return ``spectral_radius`` times the factor of "unit_rms_norm"."""
        return self.spectral_radius * scale_factor("unit_rms_norm", rows, cols)


class PolarGrad(Orthogonalized):
    """Steepest descent in the spectral norm: the update is <O, d> O, with O the orthogonalised
    direction d.

    <O, d>, the sum of products of their elements, is the nuclear norm of d as far as O is
    orthogonal. So updates are proportional to gradients.

    Reference: arXiv 2505.21799; Emerging-Optimizers 0.3.0.
    """

    rule = "polargrad"
    family = "muon"
    only_sizes = True

    extra_scale_factor: Positive = 1.0

    def scale_summary(self) -> str:
        """Return the scale as text."""
        return f", nuclear norm{_times(self.extra_scale_factor)}"

    def adapted_(self, orthogonal: Tensor, batch: Batch) -> Tensor:
        """Return the update of the class."""
        # Sum rows first, and each matrix by itself: over a batch, the order of the sum would depend
        # on the batch size.
        of_rows = (orthogonal * batch.direction).sum(-1)
        return orthogonal.mul_(batch.summed(of_rows.sum(-1)).view(-1, 1, 1))

    def scale_of(self, rows: int, cols: int) -> float:
        """Return ``extra_scale_factor``."""
        return self.extra_scale_factor
