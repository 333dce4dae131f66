"""What ranks look at and agree on before anything is updated: whether to, how much to clip, and
what to leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.step_agreement import Agreement
from ds_layerwise.ranks.owned.buffers import FlatBuffer
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.ranks.owned.weight_checksums import SameWeights
from ds_layerwise.ranks.sync.bucket_scheduler import nothing_reduced
from ds_layerwise.ranks.sync.grad_sync import EagerGradSync, GradSync, half_a_pass
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.setup.run_settings import Settings
from ds_layerwise.zero.step.clip import Decision, Judge
from ds_layerwise.zero.step.interrupted import Interrupted
from ds_layerwise.zero.step.offloading import Offloading
from ds_layerwise.zero.step.param_guard import Guard
from ds_layerwise.zero.step.step_progress import Progress
from ds_layerwise.zero.step.unused_calls import warn_once


class BeforeUpdate:
    """Looks at parameters and gradients, and agrees with all ranks of a model on what to do.

    Args:
        params: the trained parameters of ``model`` by name, which look into ``values``.
        tied: parameters that other stages of a pipeline hold, too, and the ranks of those stages.
        check_groups: refuses what the parameter groups say, if no update could take it.
        inside_pass: whether a backward pass has begun and not ended.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Mapping[str, nn.Parameter],
        values: FlatBuffer,
        owned: Owned,
        *,
        planned: Planned,
        config: LayerWiseConfig,
        settings: Settings,
        tied: Sequence[tuple[str, comm.Group]],
        grad_sync: GradSync | EagerGradSync,
        offloading: Offloading,
        interrupted: Interrupted,
        progress: Progress,
        check_groups: Callable[[], None],
        engine: Callable[[], Any],
        inside_pass: Callable[[], bool],
    ) -> None:
        ep_size = {spec.name: spec.ep_size for spec in planned.specs}
        self._owned, self._grad_sync, self._check_groups = owned, grad_sync, check_groups
        self._offloading, self._interrupted, self._progress = offloading, interrupted, progress
        self._engine, self._inside_pass, self._stage = engine, inside_pass, settings.stage
        self._judge = Judge(owned, planned, config, settings)
        self.guard = Guard(
            model,
            params,
            values,
            may_be_unused=settings.may_be_unused,
            tells=comm.rank_of(settings.group) == 0,
        )
        self.agreement = Agreement(
            ep_size,
            group=settings.group,
            model_group=settings.model_group,
            tensor_group=settings.tensor_group,
            tied=tied,
        )
        self.same_weights = SameWeights(params, ep_size, group=settings.group)

    def decide(self, *, clip_grad: float, loss_scale: float) -> Decision:
        """Find out what to do with the gradients of this step. Every rank must call this at the
        same point.

        Args:
            clip_grad: the bound of the norm; 0 for none.

        Raises:
            LayerWiseError: on every rank, if on any gradients have not been reduced, as an
                exception has ended its backward pass, or parameters are not what they were; or if
                no rank has had a backward pass.
        """
        if not self._progress.updating:
            warn_once(
                "optimizer.step() updates, but the engine counts no step (global_steps), moves no "
                "schedule and ends no gradient accumulation; call engine.step()"
            )
        error: Exception | None = None
        idle, sums = frozenset[str](), self._judge.nothing()
        try:
            self._interrupted.check()
        except RuntimeError as found:
            error = found
        try:
            # All ranks have offloaded alike, so that nobody counts on what is away.
            self._offloading.check_not_offloaded()
            error = error or self._catch_up()
            # What else it may raise ends a collective, in which the others are: they are not on
            # their way to the sum.
            self._grad_sync.finish(aside=error is not None)
        except StepError as found:
            error = error or found
        try:
            if error is None:
                self._check_groups()
                idle = self.guard.check(self._grad_sync.got)
                sums = self._judge.sums(idle)
        except (RuntimeError, MemoryError) as found:
            # The others are on their way to the sum, and some device may have no memory left for
            # what is summed.
            error = error or found
        noticed = self.same_weights.noticed(self._owned.written)
        # A script that takes care of accumulation itself may step at any time. A rank may have no
        # pass of its own.
        begun = bool(self._progress.passes or self._grad_sync.got or self._grad_sync.by_hand)
        (*summed, followed, written, have_begun), frozen = self.agreement.reach(
            torch.cat([sums, noticed, noticed.new_full((1,), float(begun))]), error, idle
        )
        if not have_begun:
            # What the engine has reduced by now is nothing, and no gradient that comes is too late
            # for it.
            self._grad_sync.reset()
            self._progress.forget_reductions(self._engine())
            raise nothing_reduced()
        self.same_weights.settle(bool(followed), bool(written))
        return self._judge.decide(summed, frozen, clip_grad=clip_grad, loss_scale=loss_scale)

    def _catch_up(self) -> StepError | None:
        """Take part in what other ranks reduce in their backward passes, and wait for, if this one
        has not.

        Returns:
            What is wrong with this rank's own pass: an exception has ended it, and not all of its
            gradients are there.
        """
        broken = self._inside_pass() or self._progress.in_pass
        missed = self._progress.missed(self._engine(), stage=self._stage)
        for _ in range(missed):
            self._progress.reduces(self._engine())
            self._grad_sync.reduce()
        return half_a_pass(outside=self._progress.outside) if broken and missed else None
