"""The check that a script has not replaced or freed parameters since the last step."""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import is_

from deepspeed.utils import logger
from torch import nn

from ds_layerwise.errors import StepError, few
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.setup.param_owner import has_optimizer


class Guard:
    """Checks before every step that the model's parameters are still those that the optimizer
    trains. Parameters that require a gradient at the start, but are not trained here, are left to
    the user.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._model = run.model
        self._at_start = dict(run.model.named_parameters(remove_duplicate=False))
        self._known: set[nn.Parameter] = set()
        for param in self._at_start.values():
            if param.requires_grad:
                self._known.add(param)
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
