"""A recipe: an optimizer with all its settings, its states and costs as a function of the shape,
and its update. It knows neither ranks nor buckets.

Note: weight decay
    It draws weights towards zero in addition to a rule's update, the same for all rules. With W the
    weights, g their gradient, wd ``weight_decay``, lr the learning rate that the rule updates W
    with, and u the direction of the update, W <- W - lr u::

        decoupled    W <- W - lr wd W    AdamW, arXiv 1711.05101
        independent  W <- W - wd W       arXiv 1711.05101 with its own schedule
        l2           g <- g + wd W       torch.optim.Adam; before moments and momentum
        palm         W <- W - lr^2 wd W  PaLM, arXiv 2204.02311

    ``cautious``: an element decays only where sign(u) sign(W) >= 0 (arXiv 2510.12402), which is
    where u draws it towards zero, too, or is zero: as the paper and microsoft/dion have it for
    every rule, and modded-nanogpt for its matrices (its Adam leaves elements alone whose u is
    zero). u is that of this step, and W what it was before: decay and update are both subtracted
    from the same W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.dtypes import StateDtype, state_bytes, torchao_maps
from ds_layerwise.optimizers.fields import Section
from ds_layerwise.optimizers.scalars import Scalar, multiply_, plus
from ds_layerwise.orthogonalize.batching import Tensors
from ds_layerwise.orthogonalize.tensor_shards import Axis, Shards

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """The settings of a parameter group at this step. A scheduler may change any of them between
    steps.
    """

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    of_client: Mapping[str, Any] = field(default_factory=dict)
    """All settings in the group of a client optimizer, under the names of its class; empty for
    other optimizers.
    """
    register: Callable[[Callable[[Hyper], float]], Tensor] | None = None
    """Makes a number on the device of a function, which is called for each replay of a captured
    update; None if the update is not captured.
    """

    def of(self, function: Callable[[Hyper], float]) -> Scalar:
        """Return ``function`` of these settings, which is called once an update. If the update is
        captured, return the place on the device for its result instead, which is not there yet.
        """
        return function(self) if self.register is None else self.register(function)

    def may(self, value: float) -> bool:
        """Tell whether ``value`` is not zero, or may be at a replay of a captured update."""
        return self.register is not None or value != 0


@dataclass(frozen=True)
class Site:
    """The place where an update runs."""

    fast_dtypes: frozenset[torch.dtype] = frozenset()
    """The dtypes in which the device multiplies much faster than in float32; see
    :func:`.optimizers.devices.fast_dtypes`.
    """
    cut: Shards | None = None
    """The axis along which tensor parallelism has cut the matrices, and the ranks with the other
    shards; None for whole matrices.
    """


#: The place of whole matrices, on a device on which no dtype is faster than float32.
ANYWHERE = Site()


class UpdateError(StepError):
    """An update that a rule cannot make.

    Args:
        index: the index of the parameter in the rule's lists. A rule does not know names.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


Shape = tuple[int, ...]

#: A function that returns the text of a group's hyper-parameter.
HyperText = Callable[[str], str]


@dataclass(frozen=True)
class StateSpec:
    """A tensor that an optimizer keeps for a parameter between steps."""

    shape: Shape
    dtype: str = "float32"
    """The dtype in which a rule gets it, by torch's name."""
    on_host: bool = False
    """True if it is always in host memory, like torch's 0-d ``step``."""
    kept_as: StateDtype | None = None
    """The dtype in which it is stored between updates, if that is not ``dtype``. ``dtype`` is then
    float32.
    """
    signed: bool = True
    """False if it is never negative."""

    @property
    def nbytes(self) -> int:
        """The bytes of its stored form."""
        return state_bytes(math.prod(self.shape), self.kept_as or self.dtype)


States = dict[str, StateSpec]

WeightDecayMethod = Literal["decoupled", "independent", "l2", "palm"]


class Recipe(Section):
    """The rule of a parameter with all its settings. Equal recipes compute the same.

    Each subclass is one optimizer. Its fields are the settings of a run, or of the parameters that
    an override names. Values that a parameter group may change between steps (``hyper``) are not
    fields. Shapes are those that the rule sees: ``(rows, cols)`` or ``(batch, rows, cols)`` for a
    whole parameter, ``(numel,)`` for a piece of a split one.
    """

    rule: ClassVar[str]
    """The name in configs and in the registry."""
    whole: ClassVar[bool]
    """True if it needs whole parameters; False if they may be cut anywhere."""
    family: ClassVar[str]
    """The family. Recipes of one family can continue from each other's states."""
    own_shapes: ClassVar[bool] = False
    """True if it sees whole parameters in their own shapes, vectors too, and not as matrices."""
    gradient_average: ClassVar[str | None] = None
    """The state that is an exponential moving average of the gradient; other families may continue
    from it.
    """
    lr_ratio: ClassVar[Literal["matrix_lr_ratio", "scalar_lr_ratio"]] = "matrix_lr_ratio"
    """The key of a parameter group with the factor of ``lr``: the ratio of ``muon_lr``, or of
    ``adam_lr``.
    """
    as_adamw: ClassVar[str] = ""
    """The setting, with its value, that makes the recipe use AdamW's learning rates, if its own
    differ.
    """
    hyper: ClassVar[tuple[str, ...]] = ()
    """The keys of a parameter group that the rule uses in addition to ``lr`` and ``weight_decay``:
    some of ``momentum, betas, eps``.
    """

    update_size: ClassVar[Literal["normalised", "gradient"] | None] = None
    """The size of element-wise updates: the same for all sizes of gradients, or in proportion to
    them; None if ``layerwise.mup`` is not to scale its rates. See :mod:`.config.mup`.
    """
    can_be_captured: ClassVar[bool] = False
    """True if an update reads nothing on the host, and takes all numbers from :meth:`Hyper.of`."""
    full_batch_numel: ClassVar[int] = 0
    """The number of elements of matrices of one shape up to which a larger batch is faster; 0 for
    never.
    """

    weight_decay_method: WeightDecayMethod = "decoupled"
    """The method of weight decay; see the note on weight decay."""
    cautious_weight_decay: bool = False
    """Decay only the elements that the update also draws towards zero."""

    def states(self, shape: Shape) -> States:
        """Return the states of a parameter of ``shape``, by torch's names."""
        raise NotImplementedError

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of one update, without the work on every element. They balance
        owners.
        """
        return 0

    def shared_work(self, shape: Shape, axis: Axis | None, size: int) -> tuple[int, int]:
        """Return :meth:`work` of a rank for whole matrices of ``shape``, and the bytes that it
        sends for them, if tensor parallelism has cut them along ``axis`` for ``size`` ranks.
        """
        return self.work(shape), 0

    def workspace(self, shape: Shape) -> int:
        """Return the most bytes that an update needs in addition to the parameter, gradient and
        states.
        """
        # l2 needs a copy of the gradient, cautious two of the update.
        copies = 1 + (self.weight_decay_method == "l2") + 2 * self.cautious_weight_decay
        return 4 * math.prod(shape) * copies

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Return why the rule cannot update whole matrices of ``shape``, as the part of an error
        after the parameter; None if it can.

        Args:
            cut_axis: the axis that tensor parallelism has cut. ``shape`` is that of all shards
                together.
        """
        if cut_axis is None:
            return None
        return (
            f"is cut by tensor parallelism, and {self.rule} needs whole matrices; send it to "
            "'muon' or 'adamw' with layerwise.overrides"
        )

    @property
    def meaning(self) -> str:
        """The settings that determine the meaning of states, but not their names and shapes, in
        words.
        """
        return ""

    @property
    def scale(self) -> str:
        """The settings that determine the size of updates at a learning rate, with the rule, in
        words; empty if the family alone does.
        """
        return ""

    def low_bit_dtypes(self) -> dict[str, StateDtype]:
        """Return the dtypes of states that are stored in fewer bits than float32, by state."""
        dtypes: dict[str, StateDtype] = {}
        for state, key in KEPT_BY.items():
            dtype: StateDtype = getattr(self, key, "float32")
            if dtype != "float32":
                dtypes[state] = dtype
        return dtypes

    def like(self, shape: Shape, *names: str) -> States:
        """Return states of the parameter's own shape, with the dtypes in the fields."""
        specs = dict.fromkeys(names, StateSpec(shape))
        for name, dtype in self.low_bit_dtypes().items():
            if name in specs:
                specs[name] = replace(specs[name], kept_as=dtype, signed=name != "exp_avg_sq")
        return specs

    @property
    def rounds_by_chance(self) -> bool:
        """True if bfloat16 states use stochastic rounding; False if they round to nearest."""
        return bool(getattr(self, "stochastic_rounding", False))

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """Return the fraction of itself that ``state`` keeps in a step."""
        if state == "momentum_buffer":
            return float(hyper["momentum"])
        return float(hyper["betas"][state == "exp_avg_sq"])

    def kept_summary(self) -> str:
        """Return the states in fewer bits for the start-up table; empty if there are none."""
        dtypes = self.low_bit_dtypes()
        by_chance = self.rounds_by_chance and "bfloat16" in dtypes.values()
        states = ", ".join(f"{state} in {dtype}" for state, dtype in dtypes.items())
        return states + " rounded by chance" * by_chance

    @property
    def sees_tensor_shards(self) -> bool:
        """True if the rule treats a tensor shard of a matrix as a matrix."""
        return False

    @property
    def for_matrices(self) -> bool:
        """True if it follows ``muon_lr``; False for a recipe of the rest, or of everything."""
        return self.lr_ratio == "matrix_lr_ratio"

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True if a learning rate for AdamW also suits this recipe."""
        return not self.whole

    @property
    def own_weight_decay(self) -> float | None:
        """The weight decay that replaces that of the parameter group; None for that of the
        group.
        """
        return None

    def summary(self, hyper: HyperText) -> str:
        """Return one line for the start-up table, without the name. ``hyper`` returns the text of a
        group's hyper-parameter.
        """
        return ", ".join(f"{key} {hyper(key)}" for key in self.hyper)

    def settings(self) -> dict[str, Any]:
        """Return every setting by its name in a config."""
        return dict(iter(self))

    def check(self, device: torch.device | None) -> None:
        """Refuse settings that nothing, or not ``device``, can run.

        Raises:
            ConfigError: names the setting.
        """

    def products_in(self, fast_dtypes: frozenset[torch.dtype]) -> torch.dtype | None:
        """Return the dtype of matrix products on a device that multiplies in ``fast_dtypes`` much
        faster than in float32; None if there are none, or no choice of dtype.
        """
        return None

    @model_validator(mode="after")
    def _can_decay_so(self) -> Recipe:
        if self.cautious_weight_decay and self.weight_decay_method == "l2":
            raise ValueError(
                f"cautious_weight_decay is true, and weight_decay_method of {self.rule} is 'l2', "
                "which adds weight decay to the gradient before there is an update to compare "
                "signs with; set weight_decay_method to 'decoupled', 'independent' or 'palm', or "
                "cautious_weight_decay to false"
            )
        return self

    def with_l2(self, params: Tensors, grads: Tensors, hyper: Hyper) -> Tensors:
        """Return the gradients for a rule: ``grads`` themselves or, with l2, new tensors."""
        if self.weight_decay_method != "l2" or not hyper.may(hyper.weight_decay):
            return grads
        return plus(grads, params, hyper.of(lambda now: now.weight_decay))

    def decay_(self, params: Tensors, directions: Tensors, hyper: Hyper) -> None:
        """Decay ``params`` in place. With l2 this does nothing, because :meth:`with_l2` has done
        it.

        Args:
            directions: the updates that are subtracted from ``params`` next, up to a factor that is
                not negative. They are only read, and only with ``cautious_weight_decay``.
        """
        if self.weight_decay_method == "l2" or not hyper.may(self.decay_share(hyper)):
            return
        kept = hyper.of(lambda now: 1 - self.decay_share(now))
        if not self.cautious_weight_decay:
            multiply_(params, kept)
            return
        # One after another, so that temporaries are at most twice the largest parameter.
        for param, direction in zip(params, directions, strict=True):
            # Use signs, because a product of small numbers may round to zero.
            agree = torch.sign(param).mul_(torch.sign(direction)) >= 0
            param.mul_(torch.where(agree, kept * param.new_ones(()), 1.0))

    def decay_share(self, hyper: Hyper) -> float:
        """Return the fraction of itself that a weight loses in a step."""
        lr = hyper.lr
        rates = {"decoupled": lr, "independent": 1.0, "palm": lr * lr, "l2": 0.0}
        return rates[self.weight_decay_method] * hyper.weight_decay

    def decay_summary(self) -> str:
        """Return the method of weight decay as text, if it is not this optimizer's default; else
        empty.
        """
        method = self.weight_decay_method
        default = type(self).model_fields["weight_decay_method"].default
        return ", ".join([method] * (method != default) + ["cautious"] * self.cautious_weight_decay)

    def init_state(self, param: Tensor) -> State:
        """Return the state before the first update: zeros with the names, shapes and dtypes of
        :meth:`states`, on the device of ``param`` or on the host.
        """
        state = {}
        for name, spec in self.states(tuple(param.shape)).items():
            state[name] = torch.zeros(
                spec.shape,
                dtype=getattr(torch, spec.dtype),
                device="cpu" if spec.on_host else param.device,
            )
        return state

    def update_(
        self,
        params: Tensors,
        grads: Tensors,
        states: Sequence[State],
        hyper: Hyper,
        site: Site = ANYWHERE,
    ) -> None:
        """Make one step, in place in ``params`` and ``states``; ``grads`` are only read. The lists
        are not empty. Here one parameter is updated after another, by :meth:`step_`.

        Parameters are float32 masters: matrices ``(rows, cols)`` or batches ``(batch, rows, cols)``
        for a rule that needs whole ones; 1-D pieces, cut anywhere, for an element-wise one.

        Raises:
            UpdateError: it cannot update one of them; others may be updated.
        """
        for index, (param, grad, state) in enumerate(zip(params, grads, states, strict=True)):
            try:
                self.step_(param, grad, state, hyper)
            except StepError as error:
                raise UpdateError(index, str(error)) from error

    def step_(self, param: Tensor, grad: Tensor, state: State, hyper: Hyper) -> None:
        """Make a step of one parameter, in place in ``param`` and ``state``; ``grad`` is only read.

        Raises:
            StepError: it cannot be made.
        """
        raise NotImplementedError


class KeptStates(Recipe):
    """A recipe with a field for each state that may be stored in fewer bits."""

    stochastic_rounding: bool = False
    """Use stochastic rounding for bfloat16 states, so that small changes add up."""

    def check(self, device: torch.device | None) -> None:
        """Refuse "8bit" without torchao.

        Raises:
            ConfigError: names the setting.
        """
        if "8bit" in self.low_bit_dtypes().values():
            torchao_maps()


class KeptMomentum(KeptStates):
    """A recipe with a ``momentum_buffer``."""

    momentum_dtype: StateDtype = "float32"
    """The dtype of the momentum between updates."""


class KeptAverage(KeptStates):
    """A recipe with an ``exp_avg``."""

    exp_avg_dtype: StateDtype = "float32"
    """The dtype of the average of gradients."""


class KeptMoments(KeptAverage):
    """A recipe with an ``exp_avg`` and an ``exp_avg_sq``."""

    exp_avg_sq_dtype: StateDtype = "float32"
    """The dtype of the average of squared gradients."""


#: The state that counts steps.
COUNT = {"step": StateSpec((), on_host=True)}

#: The field with the dtype of each state that may be stored in fewer bits than float32.
KEPT_BY = {
    "momentum_buffer": "momentum_dtype",
    "exp_avg": "exp_avg_dtype",
    "exp_avg_sq": "exp_avg_sq_dtype",
}
