"""The access of DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*`` functions to a parameter.

Every rank of the parameter's group must call a getter, as with DeepSpeed's own optimizers. If the
requested value does not exist, all of them raise an error. There are two special cases:

* At stage 1, between the micro-batches of a step and inside ``no_sync``, a gradient is the sum of
  this rank alone. In DeepSpeed, ``param.grad`` has it then.
* At stage 2, while sums are in cuts until the step, all ranks of the world must ask for a gradient,
  also for that of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.owned import MASTER
from ds_layerwise.zero.offloading import Offloading
from ds_layerwise.zero.run_state import RunState

#: The methods that DeepSpeed calls on the parameter itself.
_METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


class StateAccess:
    """The master, the states and the averaged gradient of one parameter, whole, whichever rank owns
    them.

    Every method waits for pending collectives of the parameter, and raises an error if its values
    are offloaded.
    """

    def __init__(self, name: str, run: RunState, offloading: Offloading) -> None:
        self.name = name
        self._run = run
        self._offloading = offloading
        self.param = run.params[name]
        self._shape = run.shapes[name]
        self._owned = run.owned
        self._group = run.group_of(name)
        self._piece = run.pieces.get(name)

    def attach(self) -> None:
        """Attach this object to the parameter, where DeepSpeed's functions look for it."""
        self.param.__dict__.update(
            _hp_mapping=self,
            _dp_group=self._group,
            **{name: getattr(self, name) for name in _METHODS},
        )

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for key in ("_hp_mapping", "_dp_group", *_METHODS):
            self.param.__dict__.pop(key, None)

    def __deepcopy__(self, memo: object) -> None:
        """Return None: a copy of the model has no optimizer."""

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor:
        """Return a copy of the float32 master, or of the state ``optim_state_key``, in the shape of
        the parameter. ``step`` is 0-d.

        ``exp_avg`` also names Muon's momentum.

        Raises:
            StepError: on every rank, if the parameter's optimizer keeps no such state.
        """
        self._wait()
        if optim_state_key is None:
            self._run.follow_cuts(self.name)
            return self._whole(self._owned.followed)
        key = self._key(optim_state_key)
        if key == "step":
            step = torch.zeros((), dtype=torch.float32, device=self.param.device)
            if self._piece is not None and self._piece.param_start == 0:
                step.copy_(self._owned.states[self.name][key])
            return comm.sum_over_ranks(step, group=self._group)
        return self._whole(lambda name: self._owned.value(name, key).view(-1))

    @torch.no_grad()
    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Set the state ``optim_state_key``, or the master and with it this rank's copy of the
        parameter.

        If every rank passes the same value, all copies of the parameter agree again at once.

        Raises:
            StepError: on every rank, if there is no such state, or ``value`` has another number of
                elements.
        """
        self._wait()
        key = MASTER if optim_state_key is None else self._key(optim_state_key)
        if key == "step":
            if self._piece is not None:
                self._owned.states[self.name][key].copy_(value)
            return
        if key == MASTER:
            # Round once, as the master is rounded when it is compared with the parameter.
            value = value.float()
        part = self._part(value)
        if key == MASTER:
            self._run.write(self.name, value)
        if part is not None:
            self._owned.set_value(self.name, key, part)

    def get_full_hp_grad(self) -> Tensor:
        """Return a copy of the gradient of the step so far, averaged over ranks, float32, in the
        shape of the parameter.

        At stage 1, before the reduction of the step, it is the sum of this rank in the accumulation
        dtype, and nothing is sent. In fp16 it still includes the loss scale.

        Raises:
            StepError: on every rank, if it has not been reduced, or the step is over.
        """
        self._wait()
        own = self._run.grad_sync.local_sum(self.name)
        if own is not None:
            return own.view(self._shape).clone()
        divisor = self._run.grad_sync.divisor()
        # After a refused step, some ranks may have averages already, and others not.
        return self._whole(lambda name: self._owned.reduced.piece(name) / divisor)

    @torch.no_grad()
    def set_full_hp_grad(self, value: Tensor) -> None:
        """Replace the gradient that :meth:`get_full_hp_grad` returns.

        Raises:
            StepError: on every rank, if there is no gradient now, or ``value`` has another number
                of elements.
        """
        self._wait()
        own = self._run.grad_sync.local_sum(self.name, to_write=True)
        divisor = 1.0 if own is not None else self._run.grad_sync.divisor(to_write=True)
        part = self._part(value)
        if own is not None:
            own.copy_(value.reshape(-1))
        elif part is not None:
            self._owned.reduced.piece(self.name).copy_(part * divisor)

    def _wait(self) -> None:
        self._offloading.check_not_offloaded()
        self._run.param_sync.finish()

    def _key(self, asked: str) -> str:
        keys = self._owned.state_keys(self.name)
        if asked in keys:
            return asked
        if asked == "exp_avg" and "momentum_buffer" in keys:
            return "momentum_buffer"
        raise StepError(
            f"{self.name} has no state {asked!r}; its optimizer keeps {', '.join(keys) or 'none'}"
        )

    def _part(self, value: Tensor) -> Tensor | None:
        """Return this rank's part of the whole parameter ``value``, 1-D; None if it has none."""
        if value.numel() != math.prod(self._shape):
            raise StepError(
                f"{self.name} has {math.prod(self._shape)} elements, got a value of "
                f"{value.numel()}; pass a tensor with the shape of the whole parameter"
            )
        if self._piece is None:
            return None
        start = self._piece.param_start
        return value.reshape(-1)[start : start + self._piece.numel]

    def _whole(self, own: Callable[[str], Tensor]) -> Tensor:
        return self._run.whole(self.name, own).view(self._shape)
