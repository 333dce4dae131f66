"""The access of DeepSpeed's ``safe_get_*`` and ``safe_set_*`` functions to values of parameters.

Every rank of the parameter's group must call a getter, as with DeepSpeed's own optimizers. If the
requested value does not exist, all of them raise an error. There are two special cases:

* At stage 1, between the micro-batches of a step and inside ``no_sync``, a gradient is the sum of
  this rank alone. In DeepSpeed, ``param.grad`` has it then.
* At stage 2, while sums are in cuts until the step, all ranks of the world must ask for a gradient,
  also for that of an expert.

A parameter that is not trained has no values: getters return None, and setters do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.owned import MASTER
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.run_state import RunState

#: The attributes of parameters in which DeepSpeed's functions look for an optimizer.
_ATTRIBUTES = (
    "_z3_optimizer",
    "_hp_mapping",
    "_dp_group",
    "get_full_hp_param",
    "set_full_hp_param",
    "get_full_hp_grad",
    "set_full_hp_grad",
)


class StateAccess:
    """The masters, the states and the averaged gradients of all parameters, whole, whichever rank
    owns them; at ZeRO stage 3 also as this rank's cuts. Its methods have the names of DeepSpeed's
    optimizer at stage 3.

    Every method waits for pending collectives of the parameter, and raises an error if its values
    are offloaded. DeepSpeed's functions find the object: at stage 3 they ask one object for all
    parameters, at stages 1 and 2 each parameter itself.
    """

    def __init__(self, run: RunState, offloading: Offloading) -> None:
        self._run = run
        self._offloading = offloading
        self._owned = run.owned
        self._cuts: Any = run.places
        self._names = {param: name for name, param in run.params.items()}
        if run.settings.stage == 3:
            for param in run.model.parameters():
                param._z3_optimizer = self  # type: ignore[attr-defined]
            return
        for param in self._names:
            self._attach(param)

    def _attach(self, param: nn.Parameter) -> None:
        param.__dict__.update(
            _hp_mapping=self,
            _dp_group=self._run.group_of(self._names[param]),
            get_full_hp_param=partial(self.get_full_hp_param, param),
            set_full_hp_param=lambda value, *key: self.set_full_hp_param(value, param, *key),
            get_full_hp_grad=partial(self.get_fp32_grad_for_param, param),
            set_full_hp_grad=lambda value: self.set_fp32_grad_for_param(value, param),
        )

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for param in {*self._run.model.parameters(), *self._names}:
            for key in _ATTRIBUTES:
                param.__dict__.pop(key, None)

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of the model has no optimizer."""

    def get_full_hp_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """Return a copy of the float32 master, or of the state ``optim_state_key``, in the shape of
        the parameter. ``step`` is 0-d.

        ``exp_avg`` also names Muon's momentum.

        Raises:
            StepError: on every rank, if the parameter's optimizer keeps no such state.
        """
        name = self._name_of(param)
        if name is None:
            return None
        if optim_state_key is None:
            self._run.param_sync.follow_writes(name)
            return self._whole(name, self._owned.followed)
        key = self._key(name, optim_state_key)
        if key == "step":
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            piece = self._run.pieces.get(name)
            if piece is not None and piece.param_start == 0:
                step.copy_(self._owned.states[name][key])
            return comm.sum_over_ranks(step, group=self._run.group_of(name))
        return self._whole(name, lambda name: self._owned.value(name, key).view(-1))

    @torch.no_grad()
    def set_full_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Set the state ``optim_state_key``, or the master and with it this rank's copy of the
        parameter.

        If every rank passes the same value, all copies of the parameter agree again at once.

        Raises:
            StepError: on every rank, if there is no such state, or ``value`` has another number of
                elements.
        """
        name = self._name_of(param)
        if name is None:
            return
        key = MASTER if optim_state_key is None else self._key(name, optim_state_key)
        if key == "step":
            if name in self._run.pieces:
                self._owned.states[name][key].copy_(value)
            return
        if key == MASTER:
            # Round once, as the master is rounded when it is compared with the parameter.
            value = value.float()
        part = self._part(name, value)
        if key == MASTER:
            weights = self._owned.weights_of(name, value.reshape(-1))
            self._run.places.write(name, weights)
            own = self._part(name, weights)
            if own is not None:
                self._run.shards.piece(name).copy_(own)
        if part is not None:
            self._owned.set_value(name, key, part)

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """Return a copy of the gradient of the step so far, averaged over ranks, float32, in the
        shape of the parameter.

        At stage 1, before the reduction of the step, it is the sum of this rank in the accumulation
        dtype, and nothing is sent. In fp16 it still includes the loss scale.

        Raises:
            StepError: on every rank, if it has not been reduced, or the step is over.
        """
        name = self._name_of(param)
        if name is None:
            return None
        own = self._run.grad_sync.local_sum(name)
        if own is not None:
            return own.view(self._run.shapes[name]).clone()
        # It raises an error if there are none.
        self._run.grad_sync.divisor()
        self._owned.reduced.average_over_lanes(name)
        # After a refused step, some ranks may have averages already, and others not.
        return self._whole(name, self._owned.reduced.average)

    @torch.no_grad()
    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """Replace the gradient that :meth:`get_fp32_grad_for_param` returns.

        Raises:
            StepError: on every rank, if there is no gradient now, or ``value`` has another number
                of elements.
        """
        name = self._name_of(param)
        if name is None:
            return
        own = self._run.grad_sync.local_sum(name, to_write=True)
        divisor = 1.0 if own is not None else self._run.grad_sync.divisor(to_write=True)
        part = self._part(name, value)
        if own is not None:
            own.copy_(value.reshape(-1))
        elif part is not None:
            reduced = self._owned.reduced
            reduced.widen(reduced.layout.bucket_of(name).index)
            reduced.piece(name).copy_(part * divisor)

    def update_fp32_grad_for_param_vectorized(
        self, update: Callable[[Tensor, nn.Parameter], Tensor], params: Sequence[nn.Parameter]
    ) -> None:
        """Replace the gradient of each of ``params`` by the return value of ``update``."""
        for param in params:
            grad = self.get_fp32_grad_for_param(param)
            if grad is not None:
                self.set_fp32_grad_for_param(update(grad, param), param)

    # --- cuts of ZeRO stage 3

    def get_local_fp32_param(
        self, param: nn.Parameter, optim_state_key: str | None = None
    ) -> Tensor | None:
        """Return a copy of this rank's cut of the master, or of the state ``optim_state_key``: 1-D,
        of as many elements as DeepSpeed's cut of the weights, zeros past the parameter's end.
        ``step`` is 0-d.

        A matrix is whole on its owner, so all ranks must call this and the other ``local`` methods.
        """
        whole = self.get_full_hp_param(param, optim_state_key)
        return whole if optim_state_key == "step" else self._cut_of(param, whole)

    def get_local_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """Return a copy of this rank's cut of the averaged gradient; see
        :meth:`get_local_fp32_param`.
        """
        return self._cut_of(param, self.get_fp32_grad_for_param(param))

    def set_local_hp_param(
        self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None
    ) -> None:
        """Set the master or a state from the cuts ``value`` of all ranks; see
        :meth:`get_local_fp32_param`.

        Raises:
            StepError: on every rank, if a value has not as many elements as its cut.
        """
        if optim_state_key != "step":
            value = self._whole_of_cuts(param, value)
        self.set_full_hp_param(value, param, optim_state_key)

    def set_local_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        """Replace the averaged gradient by the cuts ``value`` of all ranks; see
        :meth:`set_local_hp_param`.
        """
        self.set_fp32_grad_for_param(self._whole_of_cuts(param, value), param)

    def _cut_of(self, param: nn.Parameter, whole: Tensor | None) -> Tensor | None:
        if whole is None:
            return None
        cut: Tensor = self._cuts.part(param, whole.reshape(-1))
        return cut

    def _whole_of_cuts(self, param: nn.Parameter, cut: Tensor) -> Tensor:
        name = self._names.get(param)
        if name is None:
            return cut
        expected = param.ds_tensor.numel()  # type: ignore[attr-defined]
        with comm.errors_on_all_ranks():
            if cut.numel() != expected:
                raise StepError(
                    f"{name}: this rank's cut has {expected} elements, got a value of "
                    f"{cut.numel()}; pass a tensor of the size that safe_get_local_* returns"
                )
        whole: Tensor = self._cuts.together(name, cut.detach().float())
        return whole

    # --- helpers

    def _name_of(self, param: nn.Parameter) -> str | None:
        """Return the name of a trained parameter, whose values are on the device now; None for
        another one.
        """
        name = self._names.get(param)
        if name is not None:
            self._offloading.check_not_offloaded()
            self._run.param_sync.finish()
        return name

    def _key(self, name: str, asked: str) -> str:
        keys = self._owned.state_keys(name)
        if asked in keys:
            return asked
        if asked == "exp_avg" and "momentum_buffer" in keys:
            return "momentum_buffer"
        raise StepError(
            f"{name} has no state {asked!r}; its optimizer keeps {', '.join(keys) or 'none'}"
        )

    def _part(self, name: str, value: Tensor) -> Tensor | None:
        """Return this rank's part of the whole parameter ``value``, 1-D; None if it has none."""
        numel = math.prod(self._run.shapes[name])
        if value.numel() != numel:
            raise StepError(
                f"{name} has {numel} elements, got a value of "
                f"{value.numel()}; pass a tensor with the shape of the whole parameter"
            )
        piece = self._run.pieces.get(name)
        if piece is None:
            return None
        return value.reshape(-1)[piece.param_start : piece.param_start + piece.numel]

    def _whole(self, name: str, own: Callable[[str], Tensor]) -> Tensor:
        return self._run.whole(name, own).view(self._run.shapes[name])
