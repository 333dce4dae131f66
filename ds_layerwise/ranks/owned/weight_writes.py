"""Writes into weights that do not come from the optimizer, such as ``load_state_dict`` or a trial
of averaged weights.

A step starts from masters. Without this module it would silently undo the write, or ranks would
step from different weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.optimizers import mxfp8
from ds_layerwise.optimizers.devices import LONGER_ON_DEVICE
from ds_layerwise.ranks.comm import comm

#: The number of elements per comparison, which takes a few bytes of memory for each. They are
#: whole blocks of MXFP8.
_AT_A_TIME = 1 << 22

#: An odd number of 63 bits, which spreads the bits of what is multiplied with it, modulo 2^64.
_SPREAD = 0x1E3779B97F4A7C15


def weights_of(masters: Tensor, dtype: torch.dtype, *, in_mxfp8: bool) -> Tensor:
    """Return the weights that 1-D ``masters`` round to, in ``dtype``; with ``in_mxfp8`` by way of
    MXFP8, in blocks from the first element on.
    """
    return mxfp8.rounded(masters) if in_mxfp8 else masters.to(dtype)


def followed(masters: Tensor, values: Tensor, *, in_mxfp8: bool) -> Tensor:
    """Return ``masters`` itself if it rounds to ``values``, else a copy on the host that follows
    them; see :func:`follow_`.
    """
    if not rounds_elsewhere(masters, values, in_mxfp8=in_mxfp8):
        return masters
    copy = masters.to("cpu", copy=True)
    follow_(copy, values, in_mxfp8=in_mxfp8)
    return copy


def rounds_elsewhere(masters: Tensor, values: Tensor, *, in_mxfp8: bool) -> bool:
    """Tell whether any of 1-D ``masters`` does not round to its value. The host waits."""
    some = _some_at_a_time(masters, values)
    return any(_rounds_elsewhere(*each, in_mxfp8).any() for each in some)


def follow_(
    masters: Tensor, values: Tensor, *, written: Tensor | None = None, in_mxfp8: bool = False
) -> None:
    """Set each master that does not round to its value in ``values`` to that value; with
    ``in_mxfp8`` all masters of a block with such a one.

    It works element by element, or block by block from the start of a parameter, so the result
    does not depend on how parameters are cut, and masters of unchanged weights keep their
    precision.

    Args:
        masters: 1-D float32, written in place.
        values: 1-D, of the same length, in a 16-bit dtype; may be on another device.
        written: 0-d bool, set to True if any master changes. The host does not wait for it.
        in_mxfp8: as in :func:`weights_of`.
    """
    for master, value in _some_at_a_time(masters, values):
        differs = _rounds_elsewhere(master, value, in_mxfp8)
        if _is_host(master) and not differs.any():
            continue
        if written is not None:
            written |= (differs & (value == value)).any().to(written.device)
        torch.where(differs, value, master, out=master)


def _some_at_a_time(masters: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    most = _AT_A_TIME * LONGER_ON_DEVICE ** (not _is_host(masters))
    some = torch.split(masters, most)
    for master, value in zip(some, torch.split(values, most), strict=True):
        yield master, value.to(master.device)


def _is_host(masters: Tensor) -> bool:
    """Tell whether reading a number of ``masters`` costs nothing."""
    return masters.is_cpu


def _rounds_elsewhere(master: Tensor, value: Tensor, in_mxfp8: bool) -> Tensor:
    # Some NaNs round to other bits, depending on their position in a vector.
    found = differs(weights_of(master, value.dtype, in_mxfp8=in_mxfp8), value)
    if in_mxfp8:
        # A weight that was followed is its master, and rounded only when it is sent.
        found = mxfp8.any_of_block(found) & (value != master)
    return found


def differs(values: Tensor, others: Tensor) -> Tensor:
    """Tell for each element whether its bits differ, of tensors of one dtype."""
    return _bits(values) != _bits(others)


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)


class WholeWeights:
    """Weights that every rank has whole, and scripts may write between two steps. Each rank steps
    from its own part of them, so they must be equal.

    Note: which writes are noticed
        A parameter counts writes through itself (``load_state_dict``, any in-place operation), but
        not writes through its ``data``, which :meth:`search` finds. Ranks may write in different
        ways, for example one from a file and the others by a broadcast. Only the final values are
        compared.

    Args:
        params: the trained parameters by name.
        ep_size: the number of consecutive ranks that hold different experts under a parameter's
            name.
        group: the ranks with the same part of the model.
        model_group: the ranks with its other parts; None if each rank has the whole model.
        parts: the number of this rank's tensor shard of each parameter that is cut.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        ep_size: Mapping[str, int],
        *,
        group: comm.Group,
        model_group: comm.Group | None,
        parts: Mapping[str, int],
    ) -> None:
        self._params = params
        self._group = group
        self._model_group = model_group
        self._ep_size = ep_size
        self._parts = parts
        self._device = next(iter(params.values())).device
        self._take_note()

    def _take_note(self) -> None:
        self._seen = {name: param._version for name, param in self._params.items()}

    def _changed(self) -> list[str]:
        """List the parameters written on this rank since :meth:`_take_note`."""
        found = []
        for name, param in self._params.items():
            if param._version != self._seen[name]:
                found.append(name)
        return found

    def written(self) -> Tensor:
        """Tell whether this rank has seen a write since the last :meth:`take_over`: 0-d bool."""
        return torch.full((), bool(self._changed()), dtype=torch.bool, device=self._device)

    def take_over(self) -> None:
        """Compare the weights that any rank has seen written. Every rank of every group must call
        this at the same point.

        Raises:
            StepError: ranks have different values. Most of them would be lost.
        """
        changed = self._changed()
        anywhere = dict.fromkeys(chain(*comm.gather_objects(changed, group=self._group)))
        check_same({name: self._params[name] for name in anywhere}, self._ep_size, self._group)
        self._check_other_parts(changed)
        self._take_note()

    def search(self) -> None:
        """Compare all weights by value. Every rank must call this at the same point.

        Raises:
            StepError: on every rank, if ranks have different values.
        """
        check_same(self._params, self._ep_size, self._group)

    #: Masters are compared with weights in every update.
    reload = search

    def _check_other_parts(self, written: Sequence[str]) -> None:
        """Compare what any part of the model has seen written, where several parts have a parameter
        whole or the same tensor shard of it. Every rank must call this at the same point.

        Others are not compared: on some devices their gradients differ in the last bits.

        Raises:
            StepError: on every rank, if ranks have different values.
        """
        if self._model_group is None:
            return
        anywhere = set(chain(*comm.gather_objects(written, group=self._model_group)))
        mine = {}
        for name in anywhere & self._params.keys():
            mine[name, self._parts.get(name, 0)] = checksum_of(self._params[name])
        everyone = comm.gather_objects(mine, group=self._model_group)
        with comm.errors_on_all_ranks():
            if (found := comm.disagreement(everyone)) is not None:
                (name, _), *ranks = found
                raise _not_the_same(name, *ranks, of="parts of the model on ")


def check_same(params: Mapping[str, Tensor], ep_size: Mapping[str, int], group: comm.Group) -> None:
    """Compare values by name that were written on any rank. Every rank must call this at the same
    point, with the same names.

    Args:
        ep_size: the number of ranks in a row with other experts under a name; 1 where missing.

    Raises:
        StepError: ranks have different names, or different values for a name, of which most would
            be lost.
    """
    with comm.errors_on_all_ranks():
        mine = {name: checksum_of(value) for name, value in params.items()}
    everyone = comm.gather_objects(mine, group=group)
    with comm.errors_on_all_ranks():
        for rank, sums in enumerate(everyone):
            if lonely := everyone[0].keys() ^ sums.keys():
                raise StepError(
                    f"{min(lonely)} is whole on only one of ranks 0 and {rank}: they do not freeze "
                    "the same parameters, or do not run the same modules, as ZeRO stage 3 needs "
                    "it; do so, or set zero_optimization.stage to 2"
                )
        for name in params:
            for rank, sums in enumerate(everyone):
                first = rank % ep_size.get(name, 1)
                if sums[name] != everyone[first][name]:
                    raise _not_the_same(name, first, rank)


def _not_the_same(name: str, first: int, second: int, *, of: str = "") -> StepError:
    return StepError(
        f"{name} was written since the last step, and is not the same on {of}ranks {first} and "
        f"{second}; write the same values on every rank, or broadcast them"
    )


@torch.no_grad()
def checksum_of(values: Tensor) -> int:
    """Return an integer that distinguishes tensors of one shape and dtype, also by the positions of
    values.
    """
    total = 0
    first = 1
    for bits in torch.split(_bits(values.detach().reshape(-1)), _AT_A_TIME):
        places = torch.arange(first, first + bits.numel(), device=bits.device)
        # Sums of products alone would be the same where values change places symmetrically.
        mixed = places.mul_(_SPREAD).bitwise_xor_(bits)
        mixed = (mixed ^ (mixed >> 32)).mul_(_SPREAD)
        total += int((mixed ^ (mixed >> 29)).sum())
        first += bits.numel()
    return total
