"""A load under way: what its first half has found, and its second takes over once the engine has
loaded the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.new_names import Renamed
from ds_layerwise.checkpoint.record import Header, ShardRecord
from ds_layerwise.checkpoint.reshard import LoadPlan
from ds_layerwise.errors import LayerWiseError, few
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.zero.checkpoint.whole_states import tied


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was found whole and fitting; nothing of it has been taken over."""

    folder: Path
    header: Header
    own: ShardRecord
    """The memory that the copies of ``plan`` write to."""
    plan: LoadPlan
    states: bool
    masters: bool
    universal: bool
    others: dict[str, Tensor]
    """Frozen parameters and buffers that the engine does not load itself."""

    def described(self, fresh_states: dict[str, str], *, out_of: int) -> list[str]:
        """Return what the user must hear of, a line each.

        Args:
            fresh_states: by parameter, on all ranks, why its state is not the checkpoint's.
            out_of: the number of parameters.
        """
        lines = []
        if self.states and self.header.repeats:
            lines.append(
                f"{self.folder} was saved {self.header.repeats}: no gradients are loaded, and "
                "training goes on with the first micro-batch of that step"
            )
        if fresh_states:
            counts = ", ".join(
                f"{count} x {why}" for why, count in sorted(Counter(fresh_states.values()).items())
            )
            lines.append(
                f"{len(fresh_states)} of {out_of} parameters do not go on from the optimizer state "
                f"in {self.folder}: {counts}"
            )
        return lines


@dataclass(slots=True)
class Load:
    """The state that a load of an engine hands from its first half to its second.

    :class:`.checkpointing.Checkpointing` owns it for as long as the engine loads.
    """

    found: Found | None
    """None where nothing but the model is wanted, and once it was taken over: it holds files
    open.
    """
    wants_scheduler: bool | None
    """True if the learning rate scheduler is to go on from the checkpoint, False if afresh; None
    where what is loaded never has its state, and the script sees to it."""
    weights_win: bool = False
    """True if the user loads the model, so that masters follow other weights than were saved."""

    has_no_weights: bool = False
    """True if the trained weights are masters in the checkpoint, and nothing else."""

    alone: bool = False
    """True while an error of this rank is not one that all ranks have agreed on."""


def kept_of(
    routes: Mapping[str, Route], names: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, str]]:
    """Return the dtypes of states in fewer bits than float32, by name in a checkpoint.

    Args:
        names: by parameter, those that its experts have in a checkpoint; one of ``routes`` alone
            has its own.
    """
    found = {}
    for name, route in routes.items():
        kept = {}
        for key, spec in route.states(1).items():
            if spec.kept_as:
                kept[key] = str(spec.kept_as)
        if kept:
            found.update(dict.fromkeys(names.get(name, (name,)), kept))
    return found


def converted(
    header: Header, now: Mapping[str, Mapping[str, str]], fresh: Container[str]
) -> list[str]:
    """A line for each kind of state that was kept in something else than ``now``, where it was
    saved.

    Args:
        fresh: the parameters that do not go on from what was saved.
    """
    counts: Counter[tuple[str, str, str]] = Counter()
    for name in header.rules:
        if name in fresh:
            continue
        kept = header.kept.get(name, {})
        kept_now = now.get(name, {})
        for key in {*kept, *kept_now}:
            before = kept.get(key, "float32")
            after = kept_now.get(key, "float32")
            if before != after:
                counts[key, before, after] += 1
    return [
        f"{key} of {count} parameters was kept in {before!r} where this was saved, and is in "
        f"{after!r} here; it was converted"
        for (key, before, after), count in sorted(counts.items())
    ]


#: What lets a load go on that lacks something, or has more.
LENIENT = "load_module_strict=False (strict=False for one file or a sharded checkpoint)"


def check_names(
    saved: Renamed, folder: Path, here: Set[str], model: nn.Module, *, of_all_stages: Set[str]
) -> None:
    """Compare the names in a universal checkpoint with those ``here``, and those that other stages
    have.

    Raises:
        LayerWiseError: one has what the other lacks; or there are two values for a parameter that
            ``model`` ties.
    """
    if missing := here - saved.header.shapes.keys():
        raise LayerWiseError(
            f"{min(missing)} is not in the checkpoint in {folder}, which has "
            f"{len(saved.header.shapes)} parameters; with {LENIENT} it keeps its weights"
        )
    if unknown := sorted(saved.header.shapes.keys() - of_all_stages - here):
        raise LayerWiseError(
            f"the checkpoint in {folder} has {few(unknown)}, which the model lacks; rename it with "
            f"layerwise.rename, or load what fits with {LENIENT}"
        )
    for second, first in tied(model, here).items():
        # All ranks have the same, which may be large: one of them looks.
        if (
            {first, second} <= saved.header.shapes.keys()
            and comm.rank_of(None) == 0
            and not _are_equal(saved, first, second)
        ):
            raise LayerWiseError(
                f"{first} and {second} are one parameter here, and differ in the checkpoint in "
                f"{folder}; load it into a model that does not tie them, or with {LENIENT}, which "
                f"takes {first}"
            )


def _whole(saved: Renamed, name: str) -> Tensor:
    pieces = saved.pieces(name, 0, math.prod(saved.header.shapes[name]))
    return torch.cat([piece.master for piece in pieces])


def _are_equal(saved: Renamed, first: str, second: str) -> bool:
    shapes = saved.header.shapes
    if shapes[first] != shapes[second]:
        return False
    one = _whole(saved, first)
    other = _whole(saved, second)
    # DeepSpeed's converter may write the second name with the weights of the one parameter: its
    # master, rounded.
    return any(torch.equal(one.to(dtype).to(other.dtype), other) for dtype in DTYPES.values())
