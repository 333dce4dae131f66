"""The one truth between memory and any file: masters and states by parameter name, without
padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ds_layerwise.recipes.rules.any_torch_recipe import are_one_family, family_at

#: How a header calls it that some of a step was done, and its update was not.
WITHIN_STEP = "within a step"


@dataclass(frozen=True, slots=True)
class PieceRecord:
    """What one rank, or one file, holds of one parameter. Tensors may be views into live memory or
    into a file.

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
        """Whether the state ``key`` has one element for each of ``master``."""
        return self.state[key].dim() == 1 and self.state[key].numel() == self.master.numel()


def flat(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A state out of a file that holds whole parameters, as :class:`PieceRecord` has it: 1-D where
    it has the ``shape`` of its parameter, so that it has one element for each. Another may have as
    many elements by chance."""
    return value.reshape(-1) if value.dim() and tuple(value.shape) == tuple(shape) else value


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """What a checkpoint knows of the optimizer of a parameter.

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
        """Whether it is of the family of ``saved``, and has its states, by their names."""
        return are_one_family(saved.family, self.family) and {*self.state_keys} == {
            *saved.state_keys
        }


#: The optimizer of whatever holds Adam's two moments and does not say more.
ADAM = RuleRecord("adam", ("exp_avg", "exp_avg_sq", "step"), "exp_avg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a checkpoint says beside its tensors; equal in the files of all ranks."""

    step: int
    """Updates so far."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter of which the checkpoint holds at least the weights in
    float32.
    """
    rules: Mapping[str, RuleRecord]
    """By name of a parameter whose state the checkpoint holds."""
    param_groups: Sequence[Mapping[str, Any]] | None
    """What the groups say, without their parameters; None if this package did not write them."""
    dtypes: tuple[str, ...] | None
    """The dtypes of the model's trainable parameters, by torch's names; None if unknown."""
    configured: Sequence[Mapping[str, Any]] | None = None
    """What the config and the script had given the groups, before schedules moved it; None if
    unknown.
    """
    unreadable: tuple[str, ...] = ()
    """What the groups said that only code could restore, left out of ``param_groups``."""
    fast_dtypes: tuple[str, ...] | None = None
    """In what an ``ns_dtype`` of "auto" could multiply, by torch's names; None if nothing was left
    to it.
    """
    kept: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By name of a parameter, the states that are kept in fewer bits than float32, and in what."""
    loss_scaler: Any = None
    overflow: bool = False
    repeats: str = ""
    """Where in a step it was saved, which is repeated, as a checkpoint has no gradients; empty
    between two steps.
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
    """By the name of an expert in the layout, the names in a checkpoint of those that ranks hold
    under it; see :func:`.new_names.expert_names`."""


class Saved(Protocol):
    """A checkpoint that is open for reading. Tensors are mapped from files: what is not copied is
    not read.
    """

    @property
    def header(self) -> Header:
        """What the checkpoint says beside its tensors."""

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """What holds any of the elements ``[start, stop)`` of ``name``, in ascending order of
        elements.

        Raises:
            LayerWiseError: a file is missing or damaged; names it.
        """
