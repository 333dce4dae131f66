"""Moves states of an engine between its device and the host, for ``engine.offload_states``."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.instance_patches import refusing
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.host_memory import Parking
from ds_layerwise.zero.run_state import RunState


class Offloading:
    """Moves parameters, gradients, masters and states to the host, kind by kind, and back. While
    parameters are on the host, the model's ``state_dict()`` raises an error.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self.parking = Parking()
        trained = set(run.params.values())
        # A scripted module takes no hooks.
        self._holders = [
            module
            for module in run.model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            and trained.intersection(module._parameters.values())
        ]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def offload(self, include: Container[Any] | None, *, pin_memory: bool) -> None:
        """Move the kinds in ``include`` to the host; see
        :meth:`.LayerWiseZeroOptimizer.offload_states`.

        Raises:
            LayerWiseError: on every rank, if the host of any rank lacks the memory; nothing has
                moved then.
        """
        self._run.param_sync.finish()
        with comm.errors_on_all_ranks():
            wanted = {}
            for kind, tensors in self.memory().items():
                if include is None or kind in include:
                    wanted[kind.value] = tensors
            room = self.parking.find_room(wanted, pin_memory=pin_memory)
        if OffloadStateTypeEnum.lp_params.value in room:
            # Before their memory moves, of which an error may leave a part.
            self._run.places.take_away()
            if not self._hooks:
                for module in self._holders:
                    register: Any = module.register_state_dict_pre_hook
                    self._hooks.append(register(_refuse))
        with comm.errors_on_all_ranks():
            self.parking.park(room)
        get_accelerator().empty_cache()

    def reload(self) -> None:
        """Bring back everything that :meth:`offload` has moved.

        Raises:
            LayerWiseError: on every rank, if the device of any rank lacks the memory.
        """
        with comm.errors_on_all_ranks():
            self.parking.unpark()
        self._run.places.put_back()
        while self._hooks:
            self._hooks.pop().remove()

    @property
    def has_gradients(self) -> bool:
        """True if memory of gradients is on the host."""
        kinds = OffloadStateTypeEnum
        gradients = {kinds.contiguous_grad_buffer.value, kinds.lp_grads.value}
        return not gradients.isdisjoint(self.parking.kinds)

    def check_not_offloaded(self, *, gradients_alone: bool = False) -> None:
        """Raise an error if anything is on the host, or if memory of gradients is.

        Raises:
            StepError: something is offloaded.
        """
        if self.has_gradients or (self.parking.kinds and not gradients_alone):
            raise StepError(
                f"{', '.join(self.parking.kinds)} are offloaded; call engine.reload_states() first"
            )

    def memory(self) -> dict[OffloadStateTypeEnum, list[Tensor]]:
        """Return all tensors on the device by kind. Memory that two kinds share counts for the
        first.
        """
        kind = OffloadStateTypeEnum
        run = self._run
        owned = run.owned
        masters: list[Tensor] = []
        for own in owned.masters:
            masters += own.tensors
        tensors = {
            kind.lp_params: run.places.tensors,
            kind.contiguous_grad_buffer: () if run.grads is None else run.grads.tensors,
            kind.lp_grads: (*owned.reduced.tensors, *run.grad_sync.cuts),
            kind.hp_params: masters,
            kind.optim_states: [*filter(Tensor.dim, owned.stored)],
        }
        first: dict[int, object] = {t.untyped_storage()._cdata: None for t in owned.host.tensors}
        memory = {}
        for key, candidates in tensors.items():
            memory[key] = [
                t for t in candidates if first.setdefault(t.untyped_storage()._cdata, key) is key
            ]
        return memory


_refuse = refusing(
    "parameters are offloaded, so state_dict() and save_16bit_model() would lack them; call "
    "engine.reload_states() first"
)
