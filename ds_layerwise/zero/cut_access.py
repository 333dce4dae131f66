"""The access of DeepSpeed's ``safe_get_*`` and ``safe_set_*`` functions to parameters at ZeRO stage
3. There, the functions ask one object for all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.setup.param_cuts import ParamCuts
from ds_layerwise.zero.state_access import StateAccess


def attach_all(
    accesses: Iterable[StateAccess], params: Iterable[nn.Parameter], cuts: ParamCuts
) -> None:
    """Let DeepSpeed's functions find ``accesses`` on all ``params`` of a model."""
    found = CutAccess(accesses, cuts)
    for param in params:
        param._z3_optimizer = found  # type: ignore[attr-defined]


def detach_all(params: Iterable[nn.Parameter]) -> None:
    """Undo :func:`attach_all`."""
    for param in params:
        vars(param).pop("_z3_optimizer", None)


class CutAccess:
    """The masters, states and averaged gradients of all parameters, whole or as this rank's cut,
    under the names of DeepSpeed's optimizer at stage 3. A parameter that is not trained has none,
    as at stages 1 and 2: getters return None, and setters do nothing.
    """

    def __init__(self, accesses: Iterable[StateAccess], cuts: ParamCuts) -> None:
        self._cuts = cuts
        self.by_param = {access.param: access for access in accesses}

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of the model has no optimizer."""

    def get_full_hp_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """See :meth:`.StateAccess.get_full_hp_param`."""
        if access := self.by_param.get(param):
            return access.get_full_hp_param(optim_state_key)
        return None

    def set_full_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """See :meth:`.StateAccess.set_full_hp_param`."""
        if access := self.by_param.get(param):
            access.set_full_hp_param(value, optim_state_key)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """See :meth:`.StateAccess.get_full_hp_grad`."""
        if access := self.by_param.get(param):
            return access.get_full_hp_grad()
        return None

    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """See :meth:`.StateAccess.set_full_hp_grad`."""
        if access := self.by_param.get(param):
            access.set_full_hp_grad(value)

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[Tensor, nn.Parameter], Tensor], params: Sequence[nn.Parameter]
    ) -> None:
        """Replace the gradient of each of ``params`` by the return value of ``update``."""
        for param in params:
            if access := self.by_param.get(param):
                access.set_full_hp_grad(update(access.get_full_hp_grad(), param))

    def get_local_fp32_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """Return a copy of this rank's cut of the master, or of the state ``optim_state_key``: 1-D,
        of as many elements as DeepSpeed's cut of the weights, zeros past the parameter's end.
        ``step`` is 0-d.

        A matrix is whole on its owner, so all ranks must call this and the other ``local`` methods.
        """
        whole = self.get_full_hp_param(param, optim_state_key)
        if whole is None or optim_state_key == "step":
            return whole
        return self._cut_of(param, whole)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """Return a copy of this rank's cut of the averaged gradient; see
        :meth:`get_local_fp32_param`.
        """
        grad = self.get_fp32_grad_for_param(param)
        return None if grad is None else self._cut_of(param, grad)

    def set_local_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Set the master or a state from the cuts ``value`` of all ranks; see
        :meth:`get_local_fp32_param`.

        Raises:
            StepError: on every rank, if a value has not as many elements as its cut.
        """
        if access := self.by_param.get(param):
            if optim_state_key != "step":
                value = self._whole_of_cuts(access, value)
            access.set_full_hp_param(value, optim_state_key)

    def set_local_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """Replace the averaged gradient by the cuts ``value`` of all ranks; see
        :meth:`set_local_hp_param`.
        """
        if access := self.by_param.get(param):
            access.set_full_hp_grad(self._whole_of_cuts(access, value))

    def _cut_of(self, param: nn.Parameter, whole: Tensor) -> Tensor:
        return self._cuts.part(param, whole.reshape(-1))

    def _whole_of_cuts(self, access: StateAccess, cut: Tensor) -> Tensor:
        expected = access.param.ds_tensor.numel()  # type: ignore[attr-defined]
        with comm.errors_on_all_ranks():
            if cut.numel() != expected:
                raise StepError(
                    f"{access.name}: this rank's cut has {expected} elements, got a value of "
                    f"{cut.numel()}; pass a tensor of the size that safe_get_local_* returns"
                )
        return self._cuts.together(access.name, cut.detach().float())
