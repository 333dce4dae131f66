"""New names for the parameters of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ds_layerwise.checkpoint.record import Header, PieceRecord, Saved
from ds_layerwise.errors import LayerWiseError


def new_names(
    names: Iterable[str], rename: Mapping[str, str], *, use_all: bool = False
) -> dict[str, str]:
    """Return the new name of each of ``names``, or the name itself. A ``*`` stands for the same
    text in both names. The first matching glob wins.

    Raises:
        LayerWiseError: two names become one, or, with ``use_all``, a glob matches nothing.
    """
    patterns = {glob: re.compile(re.escape(glob).replace(r"\*", "(.*)")) for glob in rename}
    used = set()
    renamed = {}
    for name in names:
        renamed[name] = name
        for glob, pattern in patterns.items():
            if match := pattern.fullmatch(name):
                renamed[name] = rename[glob]
                for text in match.groups():
                    renamed[name] = renamed[name].replace("*", text, 1)
                used.add(glob)
                break
    if use_all and (unused := rename.keys() - used):
        raise LayerWiseError(
            f"layerwise.rename[{min(unused)!r}] matches no name in the checkpoint, such as "
            f"{', '.join(sorted(renamed)[:3])}; correct or remove it"
        )
    old_of: dict[str, str] = {}
    for old, new in renamed.items():
        if new in old_of:
            raise LayerWiseError(
                f"{old_of[new]} and {old} of the checkpoint have the same name after "
                f"layerwise.rename, {new}; correct its globs"
            )
        old_of[new] = old
    return renamed


_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


def expert_names(ep_size: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the names of each parameter in a checkpoint, in which experts are numbered over all
    ranks.

    Args:
        ep_size: the number of consecutive ranks that hold different experts under a name, for every
            parameter; see :class:`.plan.layout.layout.ParamSpec`.

    Raises:
        LayerWiseError: a parameter differs by rank and is not in a list of experts.
    """
    experts: dict[str, re.Match[str]] = {}
    counts: dict[str, int] = {}
    for name, ranks in ep_size.items():
        if ranks == 1:
            continue
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise LayerWiseError(
                f"{name} is a different parameter on each of {ep_size[name]} ranks, but is not in "
                "a deepspeed.moe.layer.MoE, so a checkpoint cannot tell them apart; build experts "
                "with that layer"
            )
        experts[name] = match
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in ep_size}
    for name, match in experts.items():
        before, number, after = match.groups()
        names[name] = tuple(
            f"{before}{ep_rank * counts[before] + int(number)}{after}"
            for ep_rank in range(ep_size[name])
        )
    return names


def first_expert(name: str) -> str | None:
    """Return the name of the same parameter in the first expert of the list; None if ``name``
    belongs to no expert.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    return f"{match[1]}0{match[3]}"


class Renamed:
    """The checkpoint ``saved`` under new names; see :class:`.record.Saved`. ``use_all`` is as in
    :func:`new_names`.
    """

    def __init__(self, saved: Saved, rename: Mapping[str, str], *, use_all: bool = False) -> None:
        header = saved.header
        renamed = new_names(header.shapes, rename, use_all=use_all)
        self._saved = saved
        self._old = {new: old for old, new in renamed.items()}
        self.header: Header = self.of(header, renamed.__getitem__)

    @staticmethod
    def of(header: Header, called: Callable[[str], str]) -> Header:
        """Return ``header`` with its names replaced by ``called``."""
        renamed: dict[str, Any] = {}
        for key in ("shapes", "rules", "kept"):
            renamed[key] = {called(name): of for name, of in getattr(header, key).items()}
        return replace(header, **renamed)

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """See :meth:`.record.Saved.pieces`."""
        return self._saved.pieces(self._old[name], start, stop)
