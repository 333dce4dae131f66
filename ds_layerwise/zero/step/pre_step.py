"""The agreement of all ranks before the update: whether to make it, how much to clip, and which
parameters to leave out.
"""

from __future__ import annotations

import torch

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.step_agreement import Agreement
from ds_layerwise.ranks.owned.weight_writes import WholeWeights
from ds_layerwise.ranks.sync.cut_sync import CutSync
from ds_layerwise.ranks.sync.step_state import half_a_pass, nothing_reduced
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step import clip
from ds_layerwise.zero.step.clip import Decision
from ds_layerwise.zero.step.param_guard import Guard


class BeforeUpdate:
    """Checks parameters and gradients, and agrees with all ranks of a model on the step."""

    def __init__(self, run: RunState, offloading: Offloading) -> None:
        settings = run.settings
        self._run = run
        self._offloading = offloading
        self.guard = Guard(run)
        self.agreement = Agreement(
            run.planned.names,
            settings.expert_rank,
            group=settings.group,
            model_group=settings.model_group,
            tensor_group=settings.tensor_group,
            tied=run.tied,
        )
        if isinstance(run.param_sync, CutSync):
            self.weights: WholeWeights | CutSync = run.param_sync
        else:
            self.weights = WholeWeights(
                run.params,
                run.ep_sizes,
                group=settings.group,
                model_group=settings.model_group,
                parts=dict.fromkeys(run.params.keys() - run.planned.copied, settings.tp_rank),
            )
        self._has_announced = False

    def decide(self, *, clip_grad: float, loss_scale: float) -> Decision:
        """Decide on the gradients of this step. Every rank must call this at the same point.

        Args:
            clip_grad: the bound of the norm; 0 for none.

        Raises:
            LayerWiseError: on every rank, if no rank has had a backward pass, or if on any rank an
                exception ended a backward pass of this step, so that gradients are missing, or
                parameters have changed, or if ranks have different weights.
        """
        run = self._run
        grad_sync = run.grad_sync
        idle = frozenset[str]()
        sums = clip.nothing(run)
        error = self._reduce()
        try:
            if error is None:
                run.optimizer.check_groups()
                idle = self.guard.check(grad_sync.got)
                clip.fill_(sums, run, idle)
        except (RuntimeError, MemoryError) as caught:
            # The other ranks wait in the sum, so this rank must join them, also if its device has
            # no memory left to compute its own sums.
            error = caught
        noticed = torch.stack([run.owned.written, self.weights.written()]).float()
        # A script that handles accumulation itself may step at any time. A rank may have no pass of
        # its own.
        begun = bool(run.progress.passes or grad_sync.got or grad_sync.by_hand)
        (*summed, followed, written, have_begun), frozen = self.agreement.reach(
            torch.cat([sums, noticed, noticed.new_full((1,), float(begun))]), error, idle
        )
        if not have_begun:
            # The reductions that the engine has made so far count as none, and a gradient that
            # comes later is not too late for them.
            grad_sync.reset()
            run.progress.forget_reductions()
            raise nothing_reduced()
        if followed and not self._has_announced:
            self._has_announced = True
            comm.report(
                "weights were written between two steps; their float32 masters were set to them, "
                "optimizer states were not changed"
            )
        if written:
            self.weights.take_over()
        every = run.config.check_writes
        if every and (run.progress.state.updates + 1) % every == 0:
            self.weights.search()
        return clip.decide(run, summed, frozen, clip_grad=clip_grad, loss_scale=loss_scale)

    def _reduce(self) -> Exception | None:
        """Finish the reductions of the step, and return the error of this rank, if there is one. It
        must not raise it, because the other ranks wait in the sum.
        """
        error = None
        try:
            self._run.interrupted.check()
            self._offloading.check_not_offloaded()
        except StepError as caught:
            error = caught
        if self._offloading.has_gradients:
            # All ranks offload together, so no rank waits for these.
            return error
        try:
            error = error or self._catch_up()
            # Any other exception ended a collective that includes the other ranks, so they do not
            # wait in the sum.
            self._run.grad_sync.finish(aside=error is not None)
        except StepError as caught:
            error = error or caught
        return error

    def _catch_up(self) -> StepError | None:
        """Take part in the reductions that other ranks have made in their backward passes and this
        rank has missed.

        Returns:
            The error of this rank's own passes: an exception ended one, so some gradients are
            missing, or the engine did not know of the last. None if all is well.
        """
        progress = self._run.progress
        broken = bool(progress.unended)
        missed = progress.missed(stage=self._run.settings.stage)
        for _ in range(missed):
            with progress.reduction():
                self._run.grad_sync.reduce()
        if broken or (missed and progress.outside):
            return half_a_pass(outside=progress.outside)
        return None
