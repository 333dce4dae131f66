"""A comparison over ranks of weights that a script has written between two steps. Each rank steps
from its own part of them, so they must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ds_layerwise.errors import StepError
from ds_layerwise.output import announce
from ds_layerwise.plan.forecast.cost import CHECKED_WORDS
from ds_layerwise.ranks.comm import comm

#: An odd number of 63 bits, which spreads the bits of what is multiplied with it, modulo 2^64.
_SPREAD = 0x1E3779B97F4A7C15


class SameWeights:
    """A comparison over ranks of weights written through parameters.

    Note: which writes are noticed
        A parameter counts writes through itself (``load_state_dict``, any in-place operation), but
        not writes through its ``data``. Ranks may write in different ways, for example one from a
        file and the others by a broadcast. Only the final values are compared.

    Args:
        params: the trained parameters by name.
        ep_size: the number of consecutive ranks that hold different experts under a parameter's
            name.
        group: the ranks with the same part of the model.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], ep_size: Mapping[str, int], *, group: comm.Group
    ) -> None:
        self._params = params
        self._group = group
        self._ep_size = ep_size
        self._seen = {name: param._version for name, param in params.items()}
        self._said = False

    def noticed(self, followed: Tensor) -> Tensor:
        """Return flags, each 0 or 1, to be summed over all ranks for :meth:`settle`.

        Args:
            followed: 0-d bool, True if masters have followed written weights on this rank.
        """
        return torch.stack([followed, torch.full_like(followed, bool(self.written()))]).float()

    def settle(self, followed: bool, written: bool) -> None:
        """Announce once that masters have followed written weights, and compare the weights if any
        rank has written some.

        Raises:
            StepError: see :meth:`check`.
        """
        if followed and not self._said:
            self._said = True
            if comm.rank_of(None) == 0:
                # Printed, because DeepSpeed's logger shows only warnings by default.
                announce(
                    "ds_layerwise: weights were written between two steps; their float32 masters "
                    "were set to them, optimizer states were not changed"
                )
        if written:
            self.check()

    def written(self) -> list[str]:
        """List the parameters written on this rank since the last :meth:`check`."""
        found = []
        for name, param in self._params.items():
            if param._version != self._seen[name]:
                found.append(name)
        return found

    def check(self) -> None:
        """Compare the weights that any rank has written. Every rank of every group must call this
        at the same point.

        Raises:
            StepError: ranks have different values. Most of them would be lost.
        """
        everywhere = comm.gather_objects(self.written(), group=self._group)
        anywhere = dict.fromkeys(chain(*everywhere))
        check_same({name: self._params[name] for name in anywhere}, self._ep_size, self._group)
        self._seen = {name: param._version for name, param in self._params.items()}


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
        mine = {name: checksum_of(value).tolist() for name, value in params.items()}
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
                    raise StepError(
                        f"{name} was written since the last step, and is not the same on ranks "
                        f"{first} and {rank}; write the same values on every rank, or broadcast "
                        "them"
                    )


@torch.no_grad()
def checksum_of(values: Tensor) -> Tensor:
    """Return two integers that distinguish tensors of one shape and dtype, also by the positions of
    values: int64, (2,), on the device of ``values``.
    """
    dtype = torch.int32 if values.element_size() == 4 else torch.int16
    bits = values.detach().reshape(-1).view(dtype)
    in_a_word = 8 // bits.element_size()
    total = torch.zeros(2, dtype=torch.int64, device=values.device)
    for first in range(0, -(-bits.numel() // in_a_word), CHECKED_WORDS):
        part = bits[first * in_a_word :][: CHECKED_WORDS * in_a_word]
        # A copy, which has whole words and begins at one.
        words = pad(part, (0, -part.numel() % in_a_word)).view(torch.int64)
        places = torch.arange(first + 1, first + 1 + words.numel(), device=values.device)
        # Sums of products alone would be the same where values change places symmetrically.
        mixed = places.mul_(_SPREAD).bitwise_xor_(words)
        plain = words.sum()
        # So that the last values of words, too, change all bits of a product.
        torch.bitwise_right_shift(mixed, 32, out=words)
        mixed.bitwise_xor_(words).mul_(_SPREAD)
        torch.bitwise_right_shift(mixed, 29, out=words)
        total += torch.stack([plain, words.bitwise_xor_(mixed).sum()])
        # So that the next ones have their memory.
        del words, places, mixed
    return total
