"""A load in progress: the findings of its first half, which its second half loads after the engine
has loaded the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ds_layerwise.checkpoint.new_names import LENIENT, Renamed
from ds_layerwise.checkpoint.record import Header, RuleRecord, ShardRecord
from ds_layerwise.checkpoint.reshard import LoadPlan
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.routing.routes import Routes
from ds_layerwise.zero.checkpoint.whole_states import tied


@dataclass(frozen=True)
class Found:
    """A checkpoint that is complete and fits. Nothing of it has been loaded yet."""

    folder: Path
    header: Header
    own: ShardRecord
    """The memory that the copies of ``plan`` write to."""
    plan: LoadPlan
    states: bool
    masters: bool
    universal: bool
    others: dict[str, Tensor]
    """Frozen parameters and buffers that the engine does not load."""

    def described(self, fresh_states: dict[str, str], *, out_of: int) -> list[str]:
        """Return the messages for the user, one line each.

        Args:
            fresh_states: the parameters of all ranks whose state is not the checkpoint's, each with
                the reason.
            out_of: the number of parameters.
        """
        lines = []
        if self.states and self.header.repeats:
            lines.append(
                f"{self.folder} was saved {self.header.repeats}: no gradients are loaded, and "
                "training continues with the first micro-batch of that step"
            )
        if fresh_states:
            counts = ", ".join(
                f"{count} x {why}" for why, count in sorted(Counter(fresh_states.values()).items())
            )
            lines.append(
                f"{len(fresh_states)} of {out_of} parameters do not continue from the optimizer "
                f"state in {self.folder}: {counts}"
            )
        return lines


@dataclass
class Load:
    """The state that the first half of an engine's load passes to the second.

    :class:`.checkpointing.Checkpointing` holds it while the engine loads.
    """

    found: Found | None
    """None if only the model is wanted, and after the load, because it keeps files open."""
    wants_scheduler: bool | None
    """True if the learning rate scheduler continues from the checkpoint; False if it starts afresh;
    None if the checkpoint never has its state, and the script restores it.
    """
    weights_win: bool = False
    """True if the user loads the model, so that masters are set from those weights and not from the
    checkpoint.
    """

    alone: bool = False
    """True while an error of this rank has not been agreed on by all ranks."""

    def agree(self) -> None:
        """Raise an error of any rank on all ranks, which communicate from here on."""
        if self.alone:
            self.alone = False
            comm.raise_on_all_ranks(None)


def rule_records(routes: Routes) -> dict[str, RuleRecord]:
    """Return the optimizers of ``routes`` as a checkpoint stores them, by name."""
    records: dict[object, RuleRecord] = {}
    found: dict[str, RuleRecord] = {}
    for name, route in routes.items():
        # The states of a foreign class may depend on the shape, and each part has states of its
        # own.
        kind = (route.recipe, route.parts, route.matrix_shape, route.is_cut)
        if kind not in records:
            records[kind] = RuleRecord(
                route.recipe.family,
                tuple(sorted(route.states(1))),
                route.recipe.gradient_average,
                route.meaning,
                route.recipe.scale,
            )
        found[name] = records[kind]
    return found


def kept_of(routes: Routes) -> dict[str, dict[str, str]]:
    """Return the dtypes of states stored in fewer bits than float32, by name."""
    found = {}
    for name, route in routes.items():
        kept = {}
        for key, spec in route.states(1).items():
            if spec.kept_as:
                kept[key] = str(spec.kept_as)
        if kept:
            found[name] = kept
    return found


def converted(
    header: Header, now: Mapping[str, Mapping[str, str]], fresh: Container[str]
) -> list[str]:
    """Return a line for each kind of state that was saved in another dtype than ``now``.

    Args:
        fresh: the parameters that do not continue from the checkpoint.
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
        f"{key} of {count} parameters was converted from {before!r} in the checkpoint to "
        f"{after!r} in this run"
        for (key, before, after), count in sorted(counts.items())
    ]


def check_tied(saved: Renamed, folder: Path, here: Container[str], model: nn.Module) -> None:
    """Refuse two values for a parameter that ``model`` ties.

    Args:
        here: the names that parameters are trained under.
    """
    for second, first in tied(model, here).items():
        # All ranks have the same two values, which may be large, so one rank compares them.
        if (
            {first, second} <= saved.header.shapes.keys()
            and comm.rank_of(None) == 0
            and not _are_equal(saved, first, second)
        ):
            raise LayerWiseError(
                f"{first} and {second} are one parameter here, but differ in the checkpoint in "
                f"{folder}; load it into a model that does not tie them, or with {LENIENT}, which "
                f"uses {first}"
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
    # DeepSpeed's converter may store the rounded master of the parameter under its second name.
    return any(torch.equal(one.to(dtype).to(other.dtype), other) for dtype in DTYPES.values())
