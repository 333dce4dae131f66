"""What a recipe is: the rule of a parameter with all its settings, and what that costs, from a
shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from ds_layerwise.recipes.base.dtypes import StateDtype, state_bytes
from ds_layerwise.recipes.base.fields import Section

#: How weights decay; :mod:`ds_layerwise.optimizers.decay` has the formulas.
WeightDecayMethod = Literal["decoupled", "independent", "l2", "palm"]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One tensor that an optimizer keeps for a parameter from step to step."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    """The dtype that a rule gets it in, by torch's name."""
    on_host: bool = False
    """Whether it lies in host memory for every optimizer, as torch's 0-d ``step`` does."""
    kept_as: StateDtype | None = None
    """What it is kept in between two updates, if not in ``dtype``, which is float32 then."""
    signed: bool = True
    """Whether it may be negative."""

    @property
    def nbytes(self) -> int:
        """Bytes of it from step to step."""
        return state_bytes(math.prod(self.shape), self.kept_as or self.dtype)

    @property
    def rule_nbytes(self) -> int:
        """Bytes of what a rule gets of it."""
        return state_bytes(math.prod(self.shape), self.dtype)


class Recipe(Section):
    """The rule of a parameter with all its settings: what is computed. Equal recipes update
    parameters alike.

    A subclass is one optimizer: its fields are the settings that hold for a run, or for the
    parameters that an override names. What a parameter group may change from step to step
    (``hyper``) is no field. Shapes are those that the rule sees: of a whole parameter ``(rows,
    cols)`` or ``(batch, rows, cols)``, of a piece of a split one ``(numel,)``.
    """

    rule: ClassVar[str]
    """What a config calls it, and the registry finds its code by."""
    whole: ClassVar[bool]
    """Whether it needs whole parameters; else they may be cut anywhere."""
    family: ClassVar[str]
    """Equal for recipes that go on from each other's states."""
    gradient_average: ClassVar[str | None] = None
    """The state that is an exponential moving average of the gradient: other families may go on
    from it.
    """
    lr_ratio: ClassVar[Literal["matrix_lr_ratio", "scalar_lr_ratio"]] = "matrix_lr_ratio"
    """What of a parameter group its ``lr`` is multiplied with: the ratio of ``muon_lr``, or of
    ``adam_lr``.
    """
    as_adamw: ClassVar[str] = ""
    """The setting, and its value, with which a recipe that would take other learning rates takes
    AdamW's.
    """
    hyper: ClassVar[tuple[str, ...]] = ()
    """What a rule takes of a parameter group, beside ``lr`` and ``weight_decay``: some of
    ``momentum, betas, eps``.
    """

    full_batch_numel: ClassVar[int] = 0
    """Elements of matrices of one shape up to which it gains from updating more of them together;
    0: nothing.
    """

    weight_decay_method: WeightDecayMethod = "decoupled"
    """What ``weight_decay`` is multiplied with, and where it enters; see
    :mod:`ds_layerwise.optimizers.decay`.
    """
    cautious_weight_decay: bool = False
    """Whether only those elements decay that the update draws towards zero, too."""

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

    def states(self, shape: tuple[int, ...]) -> dict[str, StateSpec]:
        """By torch's names, what it keeps of a parameter of ``shape``."""
        raise NotImplementedError

    def work(self, shape: tuple[int, ...]) -> int:
        """FLOPs of one update beyond what is done to every element; owners are balanced by it."""
        return 0

    def workspace(self, shape: tuple[int, ...]) -> int:
        """Bytes that an update of a parameter of ``shape`` takes at most, beside the parameter,
        gradient and states.
        """
        # With l2 a copy of the gradient, cautious two of the update.
        return (
            4
            * math.prod(shape)
            * (1 + (self.weight_decay_method == "l2") + 2 * self.cautious_weight_decay)
        )

    def refusal(
        self, shape: tuple[int, ...], *, cut_axis: Literal[-2, -1] | None = None
    ) -> str | None:
        """Why it cannot update whole matrices of ``shape``, as an error says it after the
        parameter; None if it can.

        Args:
            cut_axis: the axis of them that tensor parallelism has cut; ``shape`` is that of all
                parts together.
        """
        return None

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of all states of a parameter of ``shape`` that follow it to its device."""
        return sum(state.nbytes for state in self.states(shape).values() if not state.on_host)

    @property
    def meaning(self) -> str:
        """The settings, in words, that decide what its states mean, though not their names and
        shapes.
        """
        return ""

    @property
    def rounds_by_chance(self) -> bool:
        """Whether what is kept in bfloat16 is rounded by chance, and not to the nearest."""
        return False

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """What ``state``, which is kept in fewer bits, keeps of itself in a step, with such
        hyper-parameters.
        """
        raise NotImplementedError

    def kept_summary(self) -> str:
        """What is kept in fewer bits than float32, in words; empty for nothing."""
        return ""

    @property
    def sees_tensor_shards(self) -> bool:
        """Whether it takes what tensor parallelism leaves of a matrix for a matrix."""
        return False

    @property
    def takes_rate_of_adamw(self) -> bool:
        """Whether a learning rate that is right for AdamW is right for it."""
        return not self.whole

    @property
    def own_weight_decay(self) -> float | None:
        """What its weights decay by, whatever a parameter group says; None: what that says."""
        return None

    def summary(self, hyper: Callable[[str], str]) -> str:
        """One line for the start-up table, without its name; ``hyper`` gives the text of a group's
        hyper-parameter.
        """
        return ", ".join(f"{key} {hyper(key)}" for key in self.hyper)

    def decay_summary(self) -> str:
        """How weights decay, as far as that is not what this optimizer does by default; else
        empty.
        """
        default, said = (
            type(self).model_fields["weight_decay_method"].default,
            self.weight_decay_method,
        )
        return ", ".join([said] * (said != default) + ["cautious"] * self.cautious_weight_decay)

    def settings(self) -> dict[str, Any]:
        """By the names that a config uses, every setting."""
        return {name: getattr(self, name) for name in type(self).model_fields}


#: How many steps there were.
COUNT = {"step": StateSpec((), on_host=True)}


def like(shape: tuple[int, ...], *names: str) -> dict[str, StateSpec]:
    """Float32 states of the parameter's own shape."""
    return {name: StateSpec(shape) for name in names}
