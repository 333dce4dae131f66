"""The recipes of the Muon family: momenta of whole matrices, orthogonalised by Newton-Schulz."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ds_layerwise.optimizers.base.fields import Decay, Positive
from ds_layerwise.optimizers.base.low_bit_settings import KeptMomentum
from ds_layerwise.optimizers.base.recipe import HyperText, Shape, States, StateSpec
from ds_layerwise.optimizers.recipes.update_hook_settings import UpdateHooks
from ds_layerwise.orthogonalize.newton_schulz_cost import (
    FULL_BATCH_NUMEL,
    NsMethod,
    newton_schulz_flops,
    newton_schulz_workspace,
)
from ds_layerwise.orthogonalize.tensor_shards import Axis

NsDtype = Literal["auto", "bf16", "fp16", "fp32"]
ScaleMode = Literal["original", "spectral", "unit_rms_norm", "match_rms_adamw"]
TpMode = Literal["duplicated", "distributed", "blockwise"]
Line = Literal["row", "column", "longer_side"]
#: The coefficients of one step per row: the a, b and c of aX + b(XX')X + c(XX')(XX')X.
Rows = tuple[tuple[float, float, float], ...]


class Orthogonalized(UpdateHooks, KeptMomentum):
    """The settings of a momentum and of its orthogonalisation; see
    :class:`ds_layerwise.optimizers.rules.muon_family.Orthogonalized`.
    """

    whole = True
    gradient_average = "momentum_buffer"
    as_adamw = "matrix_optimizer to 'adamuon'"
    hyper = ("momentum",)
    full_batch_numel = FULL_BATCH_NUMEL

    nesterov: bool = True
    ns_method: NsMethod = "gram"
    ns_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    ns_coefficients: Annotated[
        str | Annotated[Rows, Field(min_length=1)],
        Field(json_schema_extra={"expects": "a name or a list of [a, b, c]"}),
    ] = "simple"
    ns_dtype: NsDtype = "auto"
    muon_tp_mode: TpMode = "duplicated"
    """The method for matrices that tensor parallelism has cut; see
    :mod:`.orthogonalize.tensor_shards`.
    """

    def states(self, shape: Shape) -> States:
        """Return the momentum."""
        return self.like(shape, "momentum_buffer")

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of the Newton-Schulz iteration and of hooks."""
        *batch, rows, cols = shape
        return newton_schulz_flops(
            rows, cols, steps=self.ns_steps, method=self.ns_method, batch=math.prod(batch)
        ) + self.hook_flops(shape)

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

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Refuse nothing: Newton-Schulz also takes tensor shards."""
        return None

    @property
    def sees_tensor_shards(self) -> bool:
        """True with ``muon_tp_mode`` "blockwise"."""
        return self.muon_tp_mode == "blockwise"

    def summary(self, hyper: HyperText) -> str:
        """Return the momentum, the scale of the update, and the hooks as text."""
        nesterov = ", nesterov" * self.nesterov
        return f"momentum {hyper('momentum')}{nesterov}{self.scale_summary()}{self.hook_summary()}"

    def scale_summary(self) -> str:
        """Return the recipe's own part of :meth:`summary`: empty, or a text that starts with a
        comma.
        """
        return ""


class Scaled(Orthogonalized):
    """An orthogonalised momentum that is scaled by the shape of its matrix."""

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


def _times(factor: float) -> str:
    if factor == 1:
        return ""
    return f" x {factor:g}"


class Muon(Scaled):
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices; see
    :class:`ds_layerwise.optimizers.rules.muon_family.Muon`.
    """

    rule = "muon"
    family = "muon"


class Adaptive(Scaled):
    """An orthogonalised momentum that is divided by the root of a second moment."""

    moment2_beta: Decay = 0.95
    """The fraction of the second moment that is kept at a step."""
    moment2_eps: Positive = 1e-8
    """Added to the root of the second moment."""

    def scale_summary(self) -> str:
        """Return the scale and the average as text."""
        return f"{super().scale_summary()}, moment2_beta {self.moment2_beta:g}"


class NorMuon(Adaptive):
    """Muon whose rows are normalised by a second moment of each; see
    :class:`ds_layerwise.optimizers.rules.muon_family.NorMuon`.
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


class AdaMuon(Adaptive):
    """Muon divided by the root of a second moment of every element; see
    :class:`ds_layerwise.optimizers.rules.muon_family.AdaMuon`.
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


class Namo(Adaptive):
    """Muon scaled by the norm of the momentum divided by that of gradients; see
    :class:`ds_layerwise.optimizers.rules.muon_family.Namo`.
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


class PolarGrad(Orthogonalized):
    """Muon scaled by the nuclear norm of the momentum: steepest descent in the spectral norm; see
    :class:`ds_layerwise.optimizers.rules.muon_family.PolarGrad`.
    """

    rule = "polargrad"
    family = "muon"
    only_sizes = True

    extra_scale_factor: Positive = 1.0

    def scale_summary(self) -> str:
        """Return the scale as text."""
        return f", nuclear norm{_times(self.extra_scale_factor)}"


class Scion(Orthogonalized):
    """Muon in a ball of the spectral norm; see
    :class:`ds_layerwise.optimizers.rules.muon_family.Scion`.
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
