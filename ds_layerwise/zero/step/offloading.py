"""What an engine holds on its device, moved to the host for a while: ``engine.offload_states``, and
back.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import FlatBuffer
from ds_layerwise.ranks.owned.host_memory import Parking
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.ranks.sync.param_sync import ParamSync


class Offloading:
    """Moves parameters, gradients, masters and states to the host, kind by kind, and brings them
    back.

    Args:
        params: the trained parameters by name, which look into ``values``.
        values, grads: their memory and that of their gradients; None where gradients are only at
            their owners.
        owned: masters, averaged gradients and states.
        cuts: where this rank adds up gradients on their way to owners.
        param_sync: what may have parameters under way.
        model: what holds the parameters; its ``state_dict()`` is refused while they are away.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        values: FlatBuffer,
        grads: FlatBuffer | None,
        owned: Owned,
        param_sync: ParamSync,
        cuts: Sequence[Tensor],
        *,
        model: nn.Module,
    ) -> None:
        self._params, self._values, self._grads, self._owned, self._cuts = (
            params,
            values,
            grads,
            owned,
            cuts,
        )
        self._param_sync, self._shapes = (
            param_sync,
            {name: param.shape for name, param in params.items()},
        )
        self.parking = Parking()
        trained = set(params.values())
        # Nothing can be hooked to a scripted module.
        self._holders = [
            module
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            and trained.intersection(module._parameters.values())
        ]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def offload(self, include: Container[Any] | None = None, *, pin_memory: bool = True) -> None:
        """Move what ``include`` names to the host; see
        :meth:`.LayerWiseZeroOptimizer.offload_states`.

        Raises:
            LayerWiseError: on every rank, if the host of any rank has no such memory left; nothing
                has moved then.
        """
        self._param_sync.finish()
        with comm.Alike(None):
            room = self.parking.find_room(
                {
                    kind.value: tensors
                    for kind, tensors in self.memory().items()
                    if include is None or kind in include
                },
                pin_memory=pin_memory,
            )
        self.parking.park(room)
        if OffloadStateTypeEnum.lp_params.value in self.parking.kinds:
            for param in self._params.values():
                # Whoever uses it meets an error of its shape.
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)
            if not self._hooks:
                self._hooks += [
                    module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
                    for module in self._holders
                ]
        get_accelerator().empty_cache()

    def reload(self) -> None:
        """Bring back what :meth:`offload` has moved.

        Raises:
            LayerWiseError: on every rank, if the device of any rank has no memory for it.
        """
        with comm.Alike(None):
            self.parking.unpark()
        for name, param in self._params.items():
            if not param.numel():
                param.data = self._values.param(name).view(self._shapes[name])
        while self._hooks:
            self._hooks.pop().remove()

    def check_not_offloaded(self) -> None:
        """Refuse to go on without what is away.

        Raises:
            StepError: something is.
        """
        if self.parking.kinds:
            raise StepError(
                f"{', '.join(self.parking.kinds)} are offloaded; call engine.reload_states() first"
            )

    def memory(self) -> dict[OffloadStateTypeEnum, list[Tensor]]:
        """Every tensor on the device by its kind; memory that two kinds share belongs to the
        first.
        """
        kind, owned = OffloadStateTypeEnum, self._owned
        tensors = {
            kind.lp_params: self._values.tensors,
            kind.contiguous_grad_buffer: () if self._grads is None else self._grads.tensors,
            kind.lp_grads: (*owned.reduced.tensors, *self._cuts),
            kind.hp_params: owned.masters,
            kind.optim_states: [
                value for state in owned.states.values() for value in state.values() if value.dim()
            ]
            + list(owned.scales),
        }
        taken = {t.untyped_storage()._cdata for t in owned.host.tensors}
        memory: dict[OffloadStateTypeEnum, list[Tensor]] = {}
        for each, those in tensors.items():
            memory[each] = [t for t in those if t.untyped_storage()._cdata not in taken]
            taken |= {t.untyped_storage()._cdata for t in memory[each]}
        return memory


def _refuse(*_: object) -> None:
    """What a module of which parameters are away says instead of its state, which would have none
    of them.
    """
    raise StepError(
        "parameters are offloaded, so state_dict() would have none of them, nor what "
        "save_16bit_model() writes; call engine.reload_states() first"
    )
