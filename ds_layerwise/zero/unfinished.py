"""A step that is not over when a checkpoint is written: what is saved of it, and what a run goes on from.

Note: what counts
    The engine counts a micro-batch in ``step()``, and its gradients are there before, from the end of its backward
    pass on. So a micro-batch counts here once a backward pass of it has ended. A run resumed from what was saved goes
    on with the one after the last that counts, which is number ``global_steps * gas + micro_steps % gas`` of the whole
    run. From the end of the last backward pass of a step on, and where the sums are not those of whole passes, none of
    the step counts: it is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ds_layerwise.checkpoint import regular
from ds_layerwise.checkpoint.names import new_names
from ds_layerwise.checkpoint.regular import RegularCheckpoint
from ds_layerwise.errors import LayerWiseError, StepError
from ds_layerwise.ranks import comm
from ds_layerwise.ranks.bucket_order import Gradients
from ds_layerwise.ranks.owned import Owned
from ds_layerwise.ranks.sync import EagerGradSync, GradSync
from ds_layerwise.zero.in_vain import warn_once
from ds_layerwise.zero.settings import Settings

#: A script that has had so many times the backward passes of a step, and no step, does not mean to.
_PASSES_IN_VAIN = 16


@dataclass(frozen=True, slots=True)
class Accumulated:
    """What a step that was not over had accumulated, for this rank to go on from."""

    micro_batches: int
    passes: int
    gradients: list[tuple[str, int, Tensor]]
    """Name, first element and values of what this rank adds up."""
    got: frozenset[str]
    """The parameters that got any of it."""
    logits: list[Mapping[str, Tensor]]
    """What ranks had noted of attention; see :meth:`.zero.attention_logits.AttentionLogits.noted`."""
    scale: float
    """What their sum is multiplied with, so that the average over all ranks is what it was."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where in a step an engine is."""

    micro_batches: int = 0
    """How many micro-batches of the step at hand count."""
    passes: int = 0
    """How many backward passes of it have ended."""
    dropped: str = ""
    """Why its gradients cannot be saved, so that the step is repeated; empty if they can."""


class Progress:
    """How far training is: the updates that were made, and the backward passes of the step at hand."""

    def __init__(self) -> None:
        self.updates = 0
        """How many updates there were; a step that is skipped makes none."""
        self.updating = False
        """Whether an update is under way, or has failed and left the engine between two steps."""
        # In which step there were reductions, how many, and in which micro-batch the last: also of gradients that were
        # dropped since.
        self._step, self._reductions, self._last_reduced = -1, 0, -1
        self._first, self._passes_at_start = "", 0
        self.restart()

    def restart(self, *, passes: int = 0) -> None:
        """Forget the step at hand, or start in the middle of one, after ``passes``."""
        self.passes, self._last_pass, self._complete = passes, -1, False
        self.in_pass = False
        """Whether a backward pass has left gradients and has not ended, as where an exception has ended it."""
        self.outside = False
        """Whether the engine knew of no backward pass when the last gradient came."""

    def gradient_came(self, name: str, engine: Callable[[], Any], *, inside: bool) -> None:
        """Take note of a gradient, ``inside`` a pass that the engine knows of; tell who makes passes, and no step."""
        self.in_pass, self.outside = True, not inside
        self._first = self._first or name
        if name != self._first or self.updates:
            return
        self._passes_at_start += 1
        its = engine()
        if its and is_managed(its) and not its.micro_steps and (
                self._passes_at_start == _PASSES_IN_VAIN * its.gradient_accumulation_steps()):
            warn_once(f"{self._passes_at_start} backward passes, and no engine.step(): no weight has moved, and "
                      "global_steps is 0; call engine(inputs), engine.backward(loss) and engine.step(), in place of "
                      "another optimizer's step()")

    def pass_ended(self, engine: Any) -> None:
        """Take note of the end of a backward pass."""
        self.passes += 1
        self.in_pass = False
        self._last_pass = engine.micro_steps
        # One block of coalesce_grad_reduction is one step, and inside_no_sync_ctxt is true in there, too.
        self._complete = engine.optimizer._coalesce_grad_reduction or (
            engine.is_gradient_accumulation_boundary() and not engine.inside_no_sync_ctxt)

    def reduces(self, engine: Any) -> None:
        """Take note of a reduction, in which all ranks have a part."""
        step = _first_of_step(engine)
        self._step, self._reductions = step, 1 + (self._reductions if self._step == step else 0)
        self._last_reduced = engine.micro_steps

    def forget_reductions(self, engine: Any, *, but: int = 0) -> None:
        """Take no reduction for one of the step at hand, but the first so many."""
        self._step, self._reductions, self._last_reduced = _first_of_step(engine), but, -1

    def missed(self, engine: Any, *, stage: int) -> int:
        """In how many reductions of the step at hand, which is to end now, this rank has had no part.

        The others count on it in each of their backward passes, and where its own loss reached none of the parameters,
        and engine.backward() was not what was called, there was no pass here that anybody could have noticed. At stage
        2 they have one a micro-batch.
        """
        if stage == 1:
            return int(self._last_reduced != engine.micro_steps)
        first = _first_of_step(engine)
        return max(0, int(engine.micro_steps) - first + 1 - (self._reductions if self._step == first else 0))

    def where(self, engine: Any, gradients: Gradients, *, inside_pass: bool, is_pipeline: bool) -> Point:
        """Where ``engine`` is now.

        Args:
            gradients: what there is of them.
            inside_pass: whether that is in a backward pass, so that the sums are not those of whole ones.

        Raises:
            StepError: inside an update.
        """
        if self.updating:
            raise StepError("a checkpoint cannot be saved inside engine.step(), or after one that failed on the way, "
                            "when not all parameters have moved; let a signal handler set a flag and save after "
                            "step(), and after an error load a checkpoint")
        if self._complete or gradients is Gradients.AVERAGES:
            return Point(dropped="between the last backward pass of a step and engine.step()")
        if inside_pass or gradients is Gradients.UNDER_WAY:
            return Point(dropped="inside a backward pass, or after one that failed")
        if is_pipeline:
            return Point(dropped="inside train_batch()" if self.passes else "")
        if not is_managed(engine):
            return Point(self.passes, self.passes)
        counted = engine.micro_steps % engine.gradient_accumulation_steps() + (self._last_pass == engine.micro_steps)
        return Point(counted, self.passes)


def _first_of_step(engine: Any) -> int:
    """The number of the first micro-batch of the step at hand."""
    return int(engine.micro_steps - (engine.micro_steps % engine.gradient_accumulation_steps() if is_managed(engine)
                                     else 0))


def is_managed(engine: Any) -> bool:
    """Whether the engine says where a step ends; 0.18.9 knows no other way."""
    return bool(getattr(engine, "managed_gradient_accumulation", lambda: True)())


def agree(point: Point, steps: tuple[int, int]) -> Point:
    """The point that all ranks are at.

    Args:
        steps: how many steps the engine, and how many updates the optimizer has counted.

    Raises:
        LayerWiseError: on every rank, if they are not at the same step.
    """
    everyone = comm.gather_objects((point, steps), group=None)
    for rank, (_, other) in enumerate(everyone):
        if other != everyone[0][1]:
            raise LayerWiseError(f"rank {rank} saves after {other[0]} steps, rank 0 after {everyone[0][1][0]}; call "
                                 "save_checkpoint() at the same point of the script on every rank")
    points: list[Point] = [point for point, _ in everyone]
    dropped = next((point for point in points if point.dropped), None)
    if dropped is None and any(point != points[0] for point in points):
        dropped = Point(dropped="at different points of a step on different ranks")
    return dropped or points[0]


def to_record(point: Point, grad_sync: GradSync | EagerGradSync, *, engine: Any, owned: Owned,
              settings: Settings, logits: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """What the file of this rank says of the gradients so far; None between two steps. Tensors share their memory.

    Args:
        logits: what was noted of attention in the step at hand.
    """
    if point.dropped:
        # Ranks may be at different points, and sums that are in cuts take all of them.
        return None
    gradients = grad_sync.accumulated()
    if not (point.micro_batches or gradients):
        return None
    starts = {owned.saved_as[piece.name]: piece.param_start for pieces in owned.pieces for piece in pieces
              } if settings.stage == 2 else {}
    return {"micro_batches": point.micro_batches, "of": engine.gradient_accumulation_steps(), "passes": point.passes,
            "got": [owned.saved_as[name] for name in sorted(grad_sync.got)], "starts": starts,
            "divide_by": settings.divide_by, "logits": dict(logits),
            "gradients": {owned.saved_as[name]: regular.alone(values) for name, values in gradients.items()}}


def from_records(saved: RegularCheckpoint, *, engine: Any, owned: Owned, settings: Settings, rank: int, world_size: int,
                 rename: Mapping[str, str], names: Mapping[str, object]) -> Accumulated | None:
    """What ``rank`` goes on from of the step in ``saved``; None if that was saved between two.

    Args:
        names: every parameter of all ranks by its name in a checkpoint.

    Raises:
        LayerWiseError: this run accumulates another number of micro-batches, or has experts elsewhere.
    """
    first = saved.ours["accumulated"]
    if first is None:
        return None
    # Owners need their part of everything; at stage 1 each rank stands in for some of those that saved.
    ranks = range(saved.world_size) if settings.stage == 2 else range(rank, saved.world_size, world_size)
    found = [entry for each in ranks if (entry := saved.accumulated(each)) is not None]
    gas = engine.gradient_accumulation_steps()
    if first["of"] != gas:
        raise LayerWiseError(f"the checkpoint was saved after {first['micro_batches']} of {first['of']} "
                             f"micro-batches of a step, and this run accumulates {gas}; resume with "
                             f"gradient_accumulation_steps {first['of']}")
    renamed = new_names(saved.header.shapes, rename)
    known = {saved_as: name for name, saved_as in owned.saved_as.items()}
    gradients = [(renamed[name], entry["starts"].get(name, 0), values)
                 for entry in found for name, values in entry["gradients"].items()]
    if settings.stage == 1 and (foreign := {name for name, *_ in gradients if name in names} - known.keys()):
        raise LayerWiseError(f"the checkpoint was saved within a step on {saved.world_size} ranks, and what rank "
                             f"{rank} would go on with has gradients of {min(foreign)}, an expert of another rank; "
                             "load it on as many ranks, or load one that was saved between two steps")
    # Version 0.1 of this package counted no passes, and did not say who got a gradient.
    got = {renamed[name] for entry in found for name in entry.get("got", entry["gradients"])}
    return Accumulated(first["micro_batches"], first.get("passes", first["micro_batches"]),
                       [(known[name], start, values) for name, start, values in gradients if name in known],
                       frozenset(known[name] for name in got if name in known),
                       [entry.get("logits", {}) for entry in found],
                       settings.divide_by / first["divide_by"])


def resume(accumulated: Accumulated | None, *, engine: Any, progress: Progress, grad_sync: GradSync | EagerGradSync,
           scale_before: float, scale_now: float) -> None:
    """Take the step up where it was; the gradients of another one have been forgotten before.

    Args:
        scale_before, scale_now: what the loss was multiplied with when it was saved, and what the update divides by.
    """
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    # The engine's count of passes where it does not say where a step ends.
    engine._unmanaged_backward_count = 0
    progress.updating = False
    progress.forget_reductions(engine)
    if accumulated is None:
        return
    if is_managed(engine):
        engine.micro_steps += accumulated.micro_batches
    else:
        engine._unmanaged_backward_count = accumulated.passes
    progress.restart(passes=accumulated.passes)
    progress.forget_reductions(engine, but=accumulated.micro_batches)
    scale = accumulated.scale * scale_now / scale_before
    for name, start, values in accumulated.gradients:
        grad_sync.restore(name, start, values * scale if scale != 1 else values)
    grad_sync.got = set(accumulated.got)
