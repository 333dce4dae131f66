"""The agreement of all ranks before the update: whether to make it, how much to clip, and which
parameters to leave out; and the check that a script has not replaced or freed parameters.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import is_

import torch
from deepspeed.utils import logger
from torch import nn

from ds_layerwise.errors import StepError, few
from ds_layerwise.output import announce
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.comm.step_agreement import Agreement
from ds_layerwise.ranks.owned.weight_writes import WholeWeights
from ds_layerwise.ranks.sync.cut_sync import CutSync
from ds_layerwise.ranks.sync.step_state import half_a_pass, nothing_reduced
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.setup.param_owner import has_optimizer
from ds_layerwise.zero.step import clip
from ds_layerwise.zero.step.clip import Decision


class BeforeUpdate:
    """Checks parameters and gradients, and agrees with all ranks of a model on the step."""

    def __init__(self, run: RunState, offloading: Offloading) -> None:
        settings = run.settings
        self._run = run
        self._offloading = offloading
        self.guard = Guard(run)
        self.agreement = Agreement(
            run.ep_sizes,
            group=settings.group,
            model_group=settings.model_group,
            tensor_group=settings.tensor_group,
            tied=run.tied,
        )
        if isinstance(run.param_sync, CutSync):
            self.weights: WholeWeights | CutSync = run.param_sync
        else:
            self.weights = WholeWeights(run.params, run.ep_sizes, group=settings.group)
        self._has_announced = False

    def decide(self, *, clip_grad: float, loss_scale: float) -> Decision:
        """Decide on the gradients of this step. Every rank must call this at the same point.

        Args:
            clip_grad: the bound of the norm; 0 for none.

        Raises:
            LayerWiseError: on every rank, if no rank has had a backward pass, or if on any rank an
                exception ended a backward pass of this step, so that gradients are missing, or
                parameters have changed.
        """
        grad_sync = self._run.grad_sync
        idle = frozenset[str]()
        sums = clip.nothing(self._run)
        error = self._reduce()
        try:
            if error is None:
                self._run.optimizer.check_groups()
                idle = self.guard.check(grad_sync.got)
                clip.fill_(sums, self._run, idle)
        except (RuntimeError, MemoryError) as caught:
            # The other ranks wait in the sum, so this rank must join them, also if its device has
            # no memory left to compute its own sums.
            error = caught
        noticed = torch.stack([self._run.owned.written, self.weights.written()]).float()
        # A script that handles accumulation itself may step at any time. A rank may have no pass of
        # its own.
        begun = bool(self._run.progress.passes or grad_sync.got or grad_sync.by_hand)
        (*summed, followed, written, have_begun), frozen = self.agreement.reach(
            torch.cat([sums, noticed, noticed.new_full((1,), float(begun))]), error, idle
        )
        if not have_begun:
            # The reductions that the engine has made so far count as none, and a gradient that
            # comes later is not too late for them.
            grad_sync.reset()
            self._run.progress.forget_reductions()
            raise nothing_reduced()
        self._settle_writes(bool(followed), bool(written))
        return clip.decide(self._run, summed, frozen, clip_grad=clip_grad, loss_scale=loss_scale)

    def _settle_writes(self, followed: bool, written: bool) -> None:
        """Announce once that masters have followed written weights, and let owners have what any
        rank has seen written. Search for other writes if it is time to.

        Raises:
            StepError: on every rank, if ranks have different weights.
        """
        if followed and not self._has_announced:
            self._has_announced = True
            if comm.rank_of(None) == 0:
                # Printed, because DeepSpeed's logger shows only warnings by default.
                announce(
                    "ds_layerwise: weights were written between two steps; their float32 masters "
                    "were set to them, optimizer states were not changed"
                )
        if written:
            self.weights.take_over()
        every = self._run.config.check_writes
        if every and (self._run.progress.state.updates + 1) % every == 0:
            self.weights.search()

    def _reduce(self) -> Exception | None:
        """Finish the reductions of the step, and return the error of this rank, if there is one. It
        must not raise it, because the other ranks wait in the sum.
        """
        error = None
        for check in (self._run.interrupted.check, self._offloading.check_not_offloaded):
            try:
                check()
            except StepError as caught:
                error = error or caught
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
            return half_a_pass(outside=not broken)
        return None


class Guard:
    """Checks before every step that the model's parameters are still those that the optimizer
    trains. Parameters that require a gradient at the start, but are not trained here, are left to
    the user.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._model = run.model
        self._at_start = dict(run.model.named_parameters(remove_duplicate=False))
        required = []
        for param in self._at_start.values():
            if param.requires_grad:
                required.append(param)
        self._known = {*run.params.values(), *required}
        self._hidden: set[str] = set()
        self._reported: set[str] = set()
        self._take_note()

    def check(self, got: Set[str]) -> frozenset[str]:
        """Return the names of parameters that were trained at the start, are frozen now, and are
        not in ``got``.

        Args:
            got: the parameters that got a gradient.

        Raises:
            StepError: a parameter or its memory was replaced, so that the optimizer would train
                something else; a parameter has a gradient that did not come from a backward pass; a
                parameter requires a gradient now, but was frozen or missing at the start, and no
                engine trains it; or a parameter got no gradient where all must get one.
        """
        content = _content(self._modules)
        if len(content) != len(self._content) or not all(map(is_, content, self._content)):
            self._look_again()
        for name, param in self._frozen.items():
            if param.requires_grad and not has_optimizer(param):
                was = "frozen when" if self._at_start.get(name) is param else "added after"
                raise StepError(
                    f"{name} requires a gradient but has no optimizer, because it was {was} this "
                    "engine was made; freeze it again, or save, and resume in a new engine; if the "
                    "script trains it with another optimizer, let it require a gradient before the "
                    "engine is made"
                )
        if self._uncut is not None:
            raise StepError(
                f"{self._uncut} was added after this engine was made, and is not cut, as ZeRO "
                "stage 3 needs it; build it under deepspeed.zero.Init(), or take it out of the "
                "model"
            )
        idle: list[str] = []
        unused: list[str] = []
        self.check_places()
        for name, param in self._run.params.items():
            if param.grad is not None:
                raise StepError(
                    f"{name}.grad was set after the gradients were reduced, so it would be lost; "
                    "use deepspeed.utils.safe_set_full_grad() between backward and step"
                )
            if name not in got:
                (unused if param.requires_grad else idle).append(name)
        gone = self._hidden - self._reported
        self._warn_of([name for name in unused if name in gone])
        if unused and not self._run.engine().zero_ignore_unused_parameters():
            raise StepError(
                f"{few(unused)} got no gradient in this step, and "
                "zero_optimization.ignore_unused_parameters is false; let the loss depend on all "
                "that is trained, freeze the rest, or remove that key to count zeros"
            )
        return frozenset(idle)

    def check_places(self) -> None:
        """Raise an error if the memory of a trained parameter was replaced. A save would then mix
        two kinds of weights.

        Raises:
            StepError: the memory of a parameter was replaced.
        """
        name = self._run.places.misplaced()
        if name is not None:
            raise _replaced(name)

    def check_names(self) -> None:
        """Refuse to save a model in which a trained parameter now has the name of another one. Its
        weights would be saved under the new name, and its masters and states under the old one.

        Raises:
            StepError: names the first such parameter.
        """
        here = dict(self._model.named_parameters(remove_duplicate=False))
        for name, param in self._run.params.items():
            if here.get(name, param) is not param:
                raise StepError(
                    f"{name} is another parameter than when this engine was made, so a checkpoint "
                    "would mix the weights of one with the masters of the other; put it back for "
                    "the save, or make a new engine"
                )

    def _take_note(self) -> None:
        """Record the content of the model, and the parameters that are neither trained here nor
        left to the user.
        """
        self._modules = list(self._model.modules())
        self._content = _content(self._modules)
        self._frozen = {}
        self._uncut: str | None = None
        for name, param in self._model.named_parameters():
            if param not in self._known:
                self._frozen[name] = param
            if self._run.settings.stage == 3 and not hasattr(param, "ds_id"):
                self._uncut = name

    def _look_again(self) -> None:
        """Record the content of a model that was taken apart and put together again.

        Trained parameters that are no longer in the model count as unused.

        Raises:
            StepError: a parameter that no optimizer trains has replaced a trained one.
        """
        here = dict(self._model.named_parameters(remove_duplicate=False))
        reached = set(here.values())
        trained = set(self._run.params.values())
        for name, new in here.items():
            old = self._at_start.get(name)
            if (
                old in trained
                and old is not new
                and old.requires_grad
                and new not in self._known
                and (old not in reached or new.requires_grad and not has_optimizer(new))
            ):
                raise _replaced(name)
        # A parameter that no module of the model holds may still be used by a module.
        self._hidden = {name for name, param in self._run.params.items() if param not in reached}
        self._take_note()

    def _warn_of(self, gone: Sequence[str]) -> None:
        """Warn once about the parameters ``gone``, which are no longer in the model."""
        if gone and self._run.rank == 0:
            logger.warning(
                f"ds_layerwise: {few(gone)} got no gradient, and is in no module of the model any "
                "more: it counts as unused, with a gradient of zeros; freeze it to leave it "
                "unchanged"
            )
        self._reported.update(gone)


def _replaced(name: str) -> StepError:
    return StepError(
        f"{name} was replaced since this engine was made, so its updates would not reach the "
        "model; write into it in place, as param.data.copy_() and load_state_dict() do, or save, "
        "and resume in a new engine"
    )


def _content(modules: Sequence[nn.Module]) -> list[object]:
    """Return the modules and the parameters of ``modules``, one after the other."""
    # This runs at every step for every module. It uses only the interface that a scripted module's
    # parameter dict has as well.
    content: list[object] = []
    for module in modules:
        content.extend(module._modules.values())
        content.extend(module._parameters.values())
    return content
