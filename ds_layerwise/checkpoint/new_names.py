"""Other names for the parameters of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ds_layerwise.checkpoint.record import Header, PieceRecord, Saved
from ds_layerwise.errors import LayerWiseError


def new_names(
    names: Iterable[str], rename: Mapping[str, str], *, use_all: bool = False
) -> dict[str, str]:
    """For each of ``names`` its new one, or itself. A ``*`` stands for the same text in both; the
    first glob wins.

    Raises:
        LayerWiseError: two names become one, or, with ``use_all``, a glob matches nothing.
    """
    patterns = [
        (glob, re.compile("(.*)".join(re.escape(part) for part in glob.split("*"))), new)
        for glob, new in rename.items()
    ]
    used: set[str] = set()
    renamed: dict[str, str] = {}
    for name in names:
        renamed[name] = name
        for glob, pattern, new in patterns:
            if match := pattern.fullmatch(name):
                texts = iter(match.groups())
                renamed[name] = "".join(
                    next(texts) if part == "*" else part for part in re.split(r"(\*)", new)
                )
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
                f"layerwise.rename gives {old_of[new]} and {old} of the checkpoint one name, {new}"
            )
        old_of[new] = old
    return renamed


_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


def expert_names(ep_size: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The names in a checkpoint of each parameter that is an expert: experts there are numbered
    over all ranks.

    Args:
        ep_size: of every parameter, how many ranks in a row hold different experts under its name;
            see :class:`.plan.layout.layout.ParamSpec`.

    Raises:
        LayerWiseError: a parameter differs by rank and is not in a list of experts.
    """
    found = {name: _EXPERT.fullmatch(name) for name, count in ep_size.items() if count > 1}
    held: dict[str, int] = {}
    for name, match in found.items():
        if match is None:
            raise LayerWiseError(
                f"{name} is another parameter on every one of {ep_size[name]} ranks, and is not in "
                "a deepspeed.moe.layer.MoE, so that its parts cannot be told apart in a checkpoint"
            )
        held[match[1]] = max(held.get(match[1], 0), int(match[2]) + 1)
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in ep_size}
    for name, match in found.items():
        if match is not None:
            names[name] = tuple(
                f"{match[1]}{ep_rank * held[match[1]] + int(match[2])}{match[3]}"
                for ep_rank in range(ep_size[name])
            )
    return names


def first_expert(name: str) -> str | None:
    """The parameter like ``name`` of the first expert in the same list; None if ``name`` belongs to
    no expert.
    """
    match = _EXPERT.fullmatch(name)
    return None if match is None else f"{match[1]}0{match[3]}"


class Renamed:
    """``saved`` under new names; see :class:`.record.Saved`. ``use_all`` as in
    :func:`new_names`.
    """

    def __init__(self, saved: Saved, rename: Mapping[str, str], *, use_all: bool = False) -> None:
        header = saved.header
        renamed = new_names(header.shapes, rename, use_all=use_all)
        self._saved, self._old = saved, {new: old for old, new in renamed.items()}
        self.header: Header = self.of(header, renamed.__getitem__)

    @staticmethod
    def of(header: Header, called: Callable[[str], str]) -> Header:
        """``header`` with the names that ``called`` has for its own."""
        return replace(
            header,
            shapes={called(name): shape for name, shape in header.shapes.items()},
            rules={called(name): rule for name, rule in header.rules.items()},
            kept={called(name): states for name, states in header.kept.items()},
        )

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """See :meth:`.record.Saved.pieces`."""
        return self._saved.pieces(self._old[name], start, stop)
