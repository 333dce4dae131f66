"""A load under way: what its first half has found, and its second takes over once the engine has loaded the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ds_layerwise.checkpoint.names import Renamed
from ds_layerwise.checkpoint.record import Header
from ds_layerwise.checkpoint.reshard import LoadPlan
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.zero.unfinished import Accumulated


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was found whole and fitting; nothing of it has been taken over."""

    folder: Path
    header: Header
    plan: LoadPlan
    states: bool
    masters: bool
    universal: bool
    others: dict[str, Tensor]
    """Frozen parameters and buffers that the engine does not load itself."""
    accumulated: Accumulated | None

    def described(self, fresh_states: dict[str, str], *, out_of: int, counted: int) -> list[str]:
        """What the user must hear of, a line each.

        Args:
            fresh_states: by parameter, on all ranks, why its state is not the checkpoint's.
            out_of: the number of parameters.
            counted: what the engine counts of the micro-batches of a step that is not over.
        """
        lines, step = [], self.accumulated
        if self.states and self.header.repeats:
            lines.append(f"{self.folder} was saved {self.header.repeats}: the gradients of that step are not in it, "
                         "and training goes on with the first micro-batch of that step")
        if step and step.passes and step.passes != counted:
            lines.append(f"{self.folder} has the gradients of {step.passes} backward passes of a step, of which "
                         f"engine.micro_steps counts {counted}; go on with the pass after those")
        if fresh_states:
            counts = ", ".join(f"{count} x {why}" for why, count in sorted(Counter(fresh_states.values()).items()))
            lines.append(f"{len(fresh_states)} of {out_of} parameters do not go on from the optimizer state in "
                         f"{self.folder}: {counts}")
        return lines


@dataclass(slots=True)
class Load:
    """What a load of an engine hands from one of its halves to the other.

    :class:`.checkpointing.Checkpointing` owns it for as long as the engine loads.
    """

    found: Found | None
    """None where nothing but the model is wanted, and once it was taken over: it holds files open."""
    wants_scheduler: bool
    """Whether the learning rate scheduler is to go on from the checkpoint."""

    def take(self) -> Found:
        """What there is to take over, once.

        Raises:
            LayerWiseError: nothing was looked for.
        """
        found, self.found = self.found, None
        if found is None:
            raise nothing_prepared()
        return found


def nothing_prepared() -> LayerWiseError:
    """The error for a second half without a first."""
    return LayerWiseError("finish_load() without prepare_load(): load through engine.load_checkpoint()")


def check_names(saved: Renamed, folder: Path, here: Set[str], *, of_all_stages: Set[str]) -> None:
    """Compare the names in a universal checkpoint with those ``here``, and those that other stages have.

    Raises:
        LayerWiseError: one has what the other lacks.
    """
    if missing := here - saved.header.shapes.keys():
        raise LayerWiseError(f"{min(missing)} is not in the checkpoint in {folder}, which has "
                             f"{len(saved.header.shapes)} parameters; with load_module_strict=False it keeps its "
                             "weights")
    if unknown := sorted(saved.header.shapes.keys() - of_all_stages - here):
        raise LayerWiseError(f"the checkpoint in {folder} has {', '.join(unknown[:5])}"
                             f"{' and more' * (len(unknown) > 5)}, which the model lacks; rename it with "
                             "layerwise.rename, or load what fits with load_module_strict=False")
