"""What DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*`` functions find on a parameter.

Every rank of the parameter's group must call a getter, as with DeepSpeed's own optimizers; what is
not there is an error on all of them. One thing is each rank's own: at stage 1, between the
micro-batches of a step and inside ``no_sync``, a gradient is what this rank has added up so far, as
in DeepSpeed, where it is on ``param.grad`` then. And at stage 2, where sums are in cuts until the
step, a gradient takes all ranks of the world, also that of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ds_layerwise.errors import StepError
from ds_layerwise.plan.layout.layout import Piece
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.owned import MASTER, Owned

#: Methods that are found on the parameter itself.
_METHODS = ("get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


class StateAccess:
    """One parameter's master, states and averaged gradient, whole, whoever holds them.

    Args:
        local_sum: this rank's own sum by name before a step is reduced; see
            :meth:`.ranks.sync.grad_sync.GradSync.local_sum`.
        gradient_divisor: what this rank's reduced gradient must be divided by now to be the average
            of the step so far.

            Raises :class:`StepError` where there is none.
        wait: returns once no value of the parameter is under way; raises where some of it is away.
    """

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        owned: Owned,
        *,
        group: comm.Group,
        local_sum: Callable[..., Tensor | None],
        gradient_divisor: Callable[..., float],
        wait: Callable[[], None],
    ) -> None:
        self.name, self._param, self._owned, self._group = name, param, owned, group
        self._local_sum, self._gradient_divisor, self._wait = local_sum, gradient_divisor, wait
        bucket = owned.layout.bucket_of(name)
        self._piece = next(
            (piece for piece in owned.pieces[bucket.index] if piece.name == name), None
        )

    def attach(self) -> None:
        """Let DeepSpeed's functions find this on the parameter."""
        self._param.__dict__.update(
            _hp_mapping=self,
            _dp_group=self._group,
            **{name: getattr(self, name) for name in _METHODS},
        )

    def detach(self) -> None:
        """Undo :meth:`attach`."""
        for key in ("_hp_mapping", "_dp_group", *_METHODS):
            self._param.__dict__.pop(key, None)

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the model has no optimizer."""

    def get_full_hp_param(self, optim_state_key: str | None = None) -> Tensor:
        """The float32 master, or the state ``optim_state_key``, in the shape of the parameter; a
        copy. ``step`` is 0-d.

        Muon's momentum also answers to ``exp_avg``.

        Raises:
            StepError: the parameter's optimizer keeps no such state; on every rank.
        """
        self._wait()
        if optim_state_key is None:
            return self._whole(lambda: self._owned.followed(self.name))
        key = self._key(optim_state_key)
        if key == "step":
            step = torch.zeros((), dtype=torch.float32, device=self._param.device)
            if self._piece is not None and self._piece.param_start == 0:
                step.copy_(self._owned.states[self.name][key])
            return comm.sum_over_ranks(step, group=self._group)
        return self._whole(lambda: self._owned.value(self.name, key).view(-1))

    @torch.no_grad()
    def set_full_hp_param(self, value: Tensor, optim_state_key: str | None = None) -> None:
        """Set the master, and with it this rank's copy of the parameter, or the state
        ``optim_state_key``.

        Called with the same value on every rank, all copies of the parameter are the same again at
        once.

        Raises:
            StepError: no such state, or ``value`` has another number of elements; on every rank.
        """
        self._wait()
        if optim_state_key is None:
            self._check(value)
            # Rounded once, as the master will be when it is compared with the parameter.
            value = value.float()
            self._param.data.copy_(value.reshape(self._param.shape))
            self._set(MASTER, value)
            return
        key = self._key(optim_state_key)
        if key != "step":
            self._check(value)
            self._set(key, value)
        elif self._piece is not None:
            self._owned.states[self.name][key].copy_(value)

    def get_full_hp_grad(self) -> Tensor:
        """The gradient, averaged over ranks, of the step so far, float32, in the shape of the
        parameter; a copy.

        At stage 1, before the step is reduced, this rank's own sum in the dtype that it adds up in;
        nothing is sent. In fp16 it still has the loss scale in it.

        Raises:
            StepError: it has not been reduced, or the step is over; on every rank.
        """
        self._wait()
        if (own := self._local_sum(self.name)) is not None:
            return own.view(self._param.shape).clone()
        divisor = self._gradient_divisor()
        # Of ranks that have refused a step some may have averages already.
        return self._whole(lambda: self._owned.reduced.piece(self.name) / divisor)

    @torch.no_grad()
    def set_full_hp_grad(self, value: Tensor) -> None:
        """Replace what :meth:`get_full_hp_grad` gives.

        Raises:
            StepError: there is no gradient now, or ``value`` has another number of elements; on
                every rank.
        """
        self._wait()
        if (own := self._local_sum(self.name, to_write=True)) is not None:
            self._check(value)
            own.copy_(value.reshape(-1))
            return
        divisor = self._gradient_divisor(to_write=True)
        self._check(value)
        if self._piece is not None:
            value = value * divisor if divisor != 1 else value
            self._owned.reduced.piece(self.name).copy_(_part(value, self._piece))

    def _key(self, asked: str) -> str:
        keys = self._owned.state_keys(self.name)
        if asked in keys:
            return asked
        if asked == "exp_avg" and "momentum_buffer" in keys:
            return "momentum_buffer"
        raise StepError(
            f"{self.name} has no state {asked!r}; its optimizer keeps {', '.join(keys) or 'none'}"
        )

    def _check(self, value: Tensor) -> None:
        if value.numel() != self._param.numel():
            raise StepError(
                f"{self.name} has {self._param.numel()} elements, got a value of {value.numel()}"
            )

    def _whole(self, piece: Callable[[], Tensor]) -> Tensor:
        whole = torch.zeros(self._param.numel(), dtype=torch.float32, device=self._param.device)
        if self._piece is not None:
            start = self._piece.param_start
            whole[start : start + self._piece.numel].copy_(piece())
        return comm.sum_over_ranks(whole, group=self._group).view(self._param.shape)

    def _set(self, key: str, value: Tensor) -> None:
        if self._piece is not None:
            self._owned.set_value(self.name, key, _part(value, self._piece))


def _part(value: Tensor, piece: Piece) -> Tensor:
    """What ``piece`` is of the whole parameter ``value``; 1-D."""
    return value.reshape(-1)[piece.param_start : piece.param_start + piece.numel]
