"""Masters and states by parameter name, without padding. Every format converts from and to this
form.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.optimizers.any_torch import are_one_family, family_at
from ds_layerwise.optimizers.recipe import Shape, State

#: The text in a header for a save between the first micro-batch of a step and its update.
WITHIN_STEP = "within a step"


#: The states that DeepSpeed's converter keeps.
CONVERTED = ("exp_avg", "exp_avg_sq", "step")


def travels_as(keys: Iterable[str]) -> dict[str, str]:
    """Return those of ``keys`` that DeepSpeed's converter can keep, each with its name there."""
    keys = {*keys}
    names = {key: key for key in CONVERTED if key in keys}
    if "exp_avg" not in keys and "momentum_buffer" in keys:
        names["momentum_buffer"] = "exp_avg"
    return names


def step_tensor(number: int) -> Tensor:
    """Return the number of updates in the form of a state."""
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class PieceRecord:
    """The part of one parameter that one rank, or one file, holds. Tensors may be views into live
    memory or into a file.

    ``master`` is 1-D float32, the elements ``[param_start, param_start + master.numel())`` of the
    flattened parameter. ``state`` maps torch's state keys to tensors. A state with one element per
    element of the parameter is 1-D and as long as ``master``. Any other state, such as a 0-d
    ``step`` or a preconditioner, has any shape; then the piece is the whole parameter, or every
    piece has the same tensor.
    """

    name: str
    param_start: int
    master: Tensor
    state: State

    @property
    def tensors(self) -> State:
        """The states by key, and the master under the empty key."""
        return {"": self.master, **self.state}

    def values_of(self, key: str) -> Tensor:
        """Return the state ``key``, or the master for the empty key.

        Raises:
            LayerWiseError: the file lacks it.
        """
        if key and key not in self.state:
            raise LayerWiseError(
                f"the checkpoint lacks {key} of {self.name}, though it names the optimizer that "
                "has it"
            )
        return self.tensors[key]

    def is_elementwise(self, key: str) -> bool:
        """Tell whether :meth:`tensor` has one element per element of ``master``."""
        value = self.tensors[key]
        return value.dim() == 1 and value.numel() == self.master.numel()

    def convertible(self) -> dict[str, str]:
        """Return the states that DeepSpeed's converter can keep; see :func:`travels_as`."""
        return travels_as(key for key in self.state if key == "step" or self.is_elementwise(key))


#: Pieces of one parameter.
Pieces = Sequence[PieceRecord]


def fits(saved: Sequence[int], own: Sequence[int]) -> bool:
    """Tell whether a tensor of the shape ``saved`` is one of the shape ``own``: ZeRO stage 3 makes
    0-d parameters 1-D.
    """
    return (tuple(saved) or (1,)) == (tuple(own) or (1,))


def in_one_piece(name: str, tensors: Mapping[str, Tensor], shape: Shape) -> Pieces:
    """Return a whole parameter, given by its states and its master under the empty key, as pieces.
    States are 1-D if they have the parameter's ``shape``; one of another shape may have the same
    number of elements by chance.
    """
    state = dict(tensors)
    for key, value in tensors.items():
        if value.dim() and tuple(value.shape) == tuple(shape):
            state[key] = value.reshape(-1)
    return [PieceRecord(name, 0, state.pop("").reshape(-1), state)]


def joined(what: str, values: Sequence[Tensor], shape: Shape) -> Tensor:
    """Return the pieces ``values`` as one tensor of ``shape``, without a copy if there is only one.

    Raises:
        LayerWiseError: they have another number of elements; the error calls them ``what``.
    """
    numel = sum(value.numel() for value in values)
    if numel != math.prod(shape):
        raise LayerWiseError(
            f"the checkpoint's files hold {numel} of the {math.prod(shape)} elements of {what}; a "
            "file is missing or belongs to another save"
        )
    whole = values[0]
    if len(values) > 1:
        whole = torch.cat(list(values))
    return whole.view(shape)


@dataclass(frozen=True)
class RuleRecord:
    """The properties of a parameter's optimizer that a checkpoint stores.

    ``family`` is equal for optimizers that read each other's states, such as Adam and AdamW, or one
    class under two of its paths, see :func:`.any_torch.family_at`. ``gradient_average``
    names the state that is an exponential moving average of the gradient; other families may
    continue from it. ``meaning`` describes the meaning of states beyond their names and shapes, and
    ``scale`` the size of updates at a learning rate; empty if there is nothing to add, or it is
    unknown.
    """

    family: str
    state_keys: tuple[str, ...]
    gradient_average: str | None
    meaning: str = ""
    scale: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "family", family_at(self.family))

    def has_states_of(self, saved: RuleRecord) -> bool:
        """Tell whether it is of the family of ``saved`` and has the same states, by name."""
        same_keys = {*self.state_keys} == {*saved.state_keys}
        return same_keys and are_one_family(saved.family, self.family)

    def has_rates_of(self, saved: RuleRecord) -> bool:
        """Tell whether a learning rate means to it the same as to ``saved``, as far as known."""
        return self.has_states_of(saved) and saved.scale in ("", self.scale)


#: The assumed optimizer if a checkpoint has Adam's two moments and no further information.
ADAM = RuleRecord("adam", ("exp_avg", "exp_avg_sq", "step"), "exp_avg")


#: The cuts of tensor parallelism through parameters, trained or not, by name: the axis, and the
#: number of runs of equal length along it, of each of which every part has an equal piece; or the
#: axis, 1, and the lengths of the pieces that parts have; None if parts are something else.
Cuts = Mapping[str, tuple[int, ...] | None]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The part of a checkpoint that is not tensors, equal in the files of all ranks."""

    step: int
    """The number of updates so far."""
    shapes: Mapping[str, Shape]
    """The shape of every parameter for which the checkpoint has at least float32 weights."""
    rules: Mapping[str, RuleRecord]
    """The optimizers, by the name of each parameter with states in the checkpoint."""
    param_groups: Sequence[Mapping[str, Any]] | None = None
    """The groups without their parameters; None if this package did not write them."""
    dtypes: tuple[str, ...] | None = None
    """The dtypes of the model's trainable parameters, by torch's names, and the format to which
    matrices are rounded, if any; None if unknown.
    """
    configured: Sequence[Mapping[str, Any]] | None = None
    """The groups as config and script had set them, without changes by schedulers; None if
    unknown.
    """
    fast_dtypes: tuple[str, ...] | None = None
    """The dtypes in which ``ns_dtype`` "auto" could multiply; None if no recipe left the dtype
    open.
    """
    kept: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The dtypes of states stored in fewer bits than float32, by parameter and state."""
    loss_scaler: Any = None
    overflow: bool = False
    num_parts: int = 1
    """The number of tensor-parallel parts of the model."""
    cuts: Cuts | None = None
    """None if they are unknown, as in checkpoints of earlier versions."""
    repeats: str = ""
    """The point in a step at which it was saved; a resumed run repeats this step, because a
    checkpoint has no gradients. Empty between two steps.
    """

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the empty key, of the master, and the keys of the states of ``name``."""
        if name not in self.rules:
            return ("",)
        return ("", *self.rules[name].state_keys)


#: The fields of a header that are by names of parameters.
BY_NAME = ("shapes", "rules", "kept", "cuts")


class Saved(Protocol):
    """A checkpoint that is open for reading. Tensors are mapped from files: only what is copied is
    read.
    """

    @property
    def header(self) -> Header:
        """The part of the checkpoint that is not tensors."""

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """Return the pieces that contain any of the elements ``[start, stop)`` of ``name``, in
        ascending order of elements.

        Raises:
            LayerWiseError: a file is missing or damaged; names it.
        """


def weights_in(saved: Saved, name: str, shape: Shape) -> Tensor:
    """Return the weights of ``name`` in ``saved`` as one tensor of ``shape``.

    Raises:
        LayerWiseError: some elements are missing.
    """
    return value_in(saved.pieces(name, 0, math.prod(shape)), "", shape)


def value_in(pieces: Pieces, key: str, shape: Shape) -> Tensor:
    """Return the state ``key`` of a parameter of ``shape``, or the master for the empty key, from
    all pieces of it.

    Raises:
        LayerWiseError: some elements are missing.
    """
    values = [piece.values_of(key) for piece in pieces]
    if not pieces[0].is_elementwise(key):
        return values[0]
    return joined(f"{key or 'the weights'} of {pieces[0].name}", values, shape)
