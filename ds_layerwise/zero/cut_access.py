"""The access of DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*`` functions to parameters at
ZeRO stage 3. There, the functions ask one object for all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.zero.state_access import StateAccess


def attach_all(accesses: Iterable[StateAccess], params: Iterable[nn.Parameter]) -> None:
    """Let DeepSpeed's functions find ``accesses`` on all ``params`` of a model."""
    found = CutAccess(accesses)
    for param in params:
        param._z3_optimizer = found  # type: ignore[attr-defined]


def detach_all(params: Iterable[nn.Parameter]) -> None:
    """Undo :func:`attach_all`."""
    for param in params:
        vars(param).pop("_z3_optimizer", None)


class CutAccess:
    """The masters, states and averaged gradients of all parameters, whole, under the names of
    DeepSpeed's optimizer at stage 3. A parameter that is not trained has none, as at stages 1
    and 2: getters return None, and setters do nothing.
    """

    def __init__(self, accesses: Iterable[StateAccess]) -> None:
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

    def get_local_fp32_param(self, param: nn.Parameter, *_: Any) -> None:
        """Refuse where there is something, for masters, states and gradients are whole."""
        if access := self.by_param.get(param):
            raise StepError(
                f"{access.name}: masters, states and gradients of matrices are whole on one rank, "
                "so there are no local parts; use safe_get_full_* and safe_set_full_* on all ranks"
            )

    get_local_fp32_grad_for_param = get_local_fp32_param

    def set_local_hp_param(self, _: Tensor, param: nn.Parameter, *__: Any) -> None:
        """Refuse like :meth:`get_local_fp32_param`."""
        self.get_local_fp32_param(param)

    set_local_grad_for_param = set_local_hp_param
