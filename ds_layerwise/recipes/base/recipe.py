"""Recipe: the rule of a parameter with all its settings, and its costs from a shape alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from ds_layerwise.recipes.base.dtypes import StateDtype, state_bytes
from ds_layerwise.recipes.base.fields import Section

#: Ways of weights to decay; :mod:`ds_layerwise.optimizers.decay` has the formulas.
WeightDecayMethod = Literal["decoupled", "independent", "l2", "palm"]


Shape = tuple[int, ...]

#: The axis of rows, or of columns.
Axis = Literal[-2, -1]

#: Returns the text of a group's hyper-parameter.
HyperText = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that an optimizer keeps for a parameter from step to step."""

    shape: Shape
    dtype: str = "float32"
    """The dtype that a rule gets it in, by torch's name."""
    on_host: bool = False
    """True if it lies in host memory for every optimizer, as torch's 0-d ``step`` does."""
    kept_as: StateDtype | None = None
    """The dtype between two updates, if not ``dtype``, which is float32 then."""
    signed: bool = True
    """False if it is never negative."""

    @property
    def nbytes(self) -> int:
        """Bytes of it from step to step."""
        return state_bytes(math.prod(self.shape), self.kept_as or self.dtype)

    @property
    def rule_nbytes(self) -> int:
        """Bytes of it as a rule gets it."""
        return state_bytes(math.prod(self.shape), self.dtype)


States = dict[str, StateSpec]


class Recipe(Section):
    """The rule of a parameter with all its settings. Equal recipes compute the same.

    A subclass is one optimizer: its fields are the settings that hold for a run, or for the
    parameters that an override names. Values that a parameter group may change from step to step
    (``hyper``) are no fields. Shapes are those that the rule sees: of a whole parameter ``(rows,
    cols)`` or ``(batch, rows, cols)``, of a piece of a split one ``(numel,)``.
    """

    rule: ClassVar[str]
    """The name in configs and in the registry."""
    whole: ClassVar[bool]
    """True if it needs whole parameters; else they may be cut anywhere."""
    family: ClassVar[str]
    """Equal for recipes that go on from the states of each other."""
    gradient_average: ClassVar[str | None] = None
    """The state that is an exponential moving average of the gradient: other families may go on
    from it.
    """
    lr_ratio: ClassVar[Literal["matrix_lr_ratio", "scalar_lr_ratio"]] = "matrix_lr_ratio"
    """The factor of ``lr`` in a parameter group: the ratio of ``muon_lr``, or of ``adam_lr``."""
    as_adamw: ClassVar[str] = ""
    """The setting, and its value, with which a recipe that would take other learning rates takes
    AdamW's.
    """
    hyper: ClassVar[tuple[str, ...]] = ()
    """Keys of a parameter group that the rule takes, beside ``lr`` and ``weight_decay``: some of
    ``momentum, betas, eps``.
    """

    full_batch_numel: ClassVar[int] = 0
    """Elements of matrices of one shape up to which a larger batch is faster; 0: never."""

    weight_decay_method: WeightDecayMethod = "decoupled"
    """The factor of ``weight_decay``, and the place where it enters; see
    :mod:`ds_layerwise.optimizers.decay`.
    """
    cautious_weight_decay: bool = False
    """Decay only those elements that the update draws towards zero, too."""

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

    def states(self, shape: Shape) -> States:
        """Return the states of a parameter of ``shape``, by torch's names."""
        raise NotImplementedError

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of one update beyond the work on every element; they balance owners."""
        return 0

    def workspace(self, shape: Shape) -> int:
        """Return the most bytes that an update takes beside the parameter, gradient and states."""
        # With l2 a copy of the gradient, cautious two of the update.
        copies = 1 + (self.weight_decay_method == "l2") + 2 * self.cautious_weight_decay
        return 4 * math.prod(shape) * copies

    def refusal(self, shape: Shape, *, cut_axis: Axis | None = None) -> str | None:
        """Return why the rule cannot update whole matrices of ``shape``, as an error says it after
        the parameter; None if it can.

        Args:
            cut_axis: the axis of them that tensor parallelism has cut; ``shape`` is that of all
                shards together.
        """
        return None

    def state_bytes(self, shape: Shape) -> int:
        """Return the bytes of all states that follow a parameter of ``shape`` to its device."""
        return sum(state.nbytes for state in self.states(shape).values() if not state.on_host)

    @property
    def meaning(self) -> str:
        """The settings, in words, that decide the meaning of states, though not their names and
        shapes.
        """
        return ""

    @property
    def rounds_by_chance(self) -> bool:
        """True if bfloat16 states are rounded by chance, and not to the nearest."""
        return False

    def share_kept(self, state: str, hyper: Mapping[str, Any]) -> float:
        """Return the share of itself that a low-bit ``state`` keeps in a step."""
        raise NotImplementedError

    def kept_summary(self) -> str:
        """Name the states in fewer bits than float32; empty for none."""
        return ""

    @property
    def sees_tensor_shards(self) -> bool:
        """True if the rule takes a tensor shard of a matrix for a matrix."""
        return False

    @property
    def takes_rate_of_adamw(self) -> bool:
        """True if a learning rate that is right for AdamW is right here."""
        return not self.whole

    @property
    def own_weight_decay(self) -> float | None:
        """Weight decay whatever a parameter group says; None: that of the group."""
        return None

    def summary(self, hyper: HyperText) -> str:
        """Return one line for the start-up table, without the name; ``hyper`` gives the text of a
        group's hyper-parameter.
        """
        return ", ".join(f"{key} {hyper(key)}" for key in self.hyper)

    def decay_summary(self) -> str:
        """Name the decay of weights where it is not this optimizer's default; else empty."""
        method = self.weight_decay_method
        default = type(self).model_fields["weight_decay_method"]
        return ", ".join(
            [method] * (method != default.default) + ["cautious"] * self.cautious_weight_decay
        )

    def settings(self) -> dict[str, Any]:
        """Return every setting, by the names that a config uses."""
        return dict(iter(self))


#: The state that counts steps.
COUNT = {"step": StateSpec((), on_host=True)}


def like(shape: Shape, *names: str) -> States:
    """Return float32 states of the parameter's own shape."""
    return dict.fromkeys(names, StateSpec(shape))
