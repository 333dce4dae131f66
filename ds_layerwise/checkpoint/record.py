"""Masters and states by parameter name, without padding: the one truth between memory and any
file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ds_layerwise.recipes.rules.any_torch_recipe import are_one_family, family_at

#: The words of a header for a save after some micro-batches of a step, and before its update.
WITHIN_STEP = "within a step"


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """The part of one parameter that one rank, or one file, holds. Tensors may be views into live
    memory or into a file.

    ``master`` is 1-D float32, the elements ``[param_start, param_start + master.numel())`` of the
    flattened parameter. ``state`` maps torch's state keys to tensors: 1-D and as long as ``master``
    where they have one element for each of the parameter, else of any shape, such as a 0-d ``step``
    or a preconditioner, and then the piece is the whole parameter or every piece has the same.
    """

    name: str
    param_start: int
    master: Tensor
    state: dict[str, Tensor]

    def is_elementwise(self, key: str) -> bool:
        """Tell whether the state ``key`` has one element for each of ``master``."""
        return self.state[key].dim() == 1 and self.state[key].numel() == self.master.numel()


def flat(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a state of a whole parameter as :class:`PieceRecord` has it: 1-D where it has the
    ``shape`` of its parameter. Another may have as many elements by chance.
    """
    if value.dim() and tuple(value.shape) == tuple(shape):
        return value.reshape(-1)
    return value


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """The optimizer of a parameter, as far as a checkpoint knows it.

    ``family`` is equal for optimizers that read each other's states, such as Adam and AdamW, or one
    class under two of its paths, see :func:`.any_torch_recipe.family_at`. ``gradient_average``
    names the state that is an exponential moving average of the gradient, which other families may
    go on from. ``meaning`` says in words what states mean beyond their names and shapes; empty if
    that is nothing, or unknown.
    """

    family: str
    state_keys: tuple[str, ...]
    gradient_average: str | None
    meaning: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", family_at(self.family))

    def has_states_of(self, saved: RuleRecord) -> bool:
        """Tell whether it is of the family of ``saved``, and has its states, by their names."""
        same_keys = {*self.state_keys} == {*saved.state_keys}
        return same_keys and are_one_family(saved.family, self.family)


#: The optimizer of whatever holds Adam's two moments and does not say more.
ADAM = RuleRecord("adam", ("exp_avg", "exp_avg_sq", "step"), "exp_avg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The part of a checkpoint beside its tensors, equal in the files of all ranks."""

    step: int
    """Updates so far."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter of which the checkpoint holds at least the weights in
    float32.
    """
    rules: Mapping[str, RuleRecord]
    """The optimizers, by name of a parameter whose state the checkpoint holds."""
    param_groups: Sequence[Mapping[str, Any]] | None
    """The groups without their parameters; None if this package did not write them."""
    dtypes: tuple[str, ...] | None
    """The dtypes of the model's trainable parameters, by torch's names; None if unknown."""
    configured: Sequence[Mapping[str, Any]] | None = None
    """The groups as config and script had given them, before schedules moved them; None if
    unknown.
    """
    unreadable: tuple[str, ...] = ()
    """The keys of groups that only code could restore, left out of ``param_groups``."""
    fast_dtypes: tuple[str, ...] | None = None
    """The dtypes that an ``ns_dtype`` of "auto" could multiply in; None if nothing was left to it.
    """
    kept: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The dtypes of states in fewer bits than float32, by parameter and state."""
    loss_scaler: Any = None
    overflow: bool = False
    has_weights: bool = True
    """False where the trained weights are masters alone, as at ZeRO stage 3."""
    repeats: str = ""
    """The point of a step at which it was saved, which is repeated, as a checkpoint has no
    gradients; empty between two steps.
    """


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Everything that ``rank`` of ``world_size`` owns, in memory order, with the layout that it was
    laid out by.
    """

    rank: int
    world_size: int
    layout_json: str
    layout_digest: str
    pieces: tuple[PieceRecord, ...]
    expert_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names in a checkpoint of the experts that ranks hold under one name of the layout; see
    :func:`.new_names.expert_names`.
    """


class Saved(Protocol):
    """A checkpoint that is open for reading. Tensors are mapped from files: what is not copied is
    not read.
    """

    @property
    def header(self) -> Header:
        """The part of the checkpoint beside its tensors."""

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """Return the pieces with any of the elements ``[start, stop)`` of ``name``, in ascending
        order of elements.

        Raises:
            LayerWiseError: a file is missing or damaged; names it.
        """
