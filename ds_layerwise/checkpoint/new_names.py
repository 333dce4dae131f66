"""New names for the parameters of a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ds_layerwise.checkpoint.record import BY_NAME, Header, Pieces, Saved
from ds_layerwise.errors import LayerWiseError, few
from ds_layerwise.output import announce

#: The settings that let a load continue if parameters are missing or unexpected.
LENIENT = "load_module_strict=False (strict=False for one file or a sharded checkpoint)"

#: The parts of names that come from wrappers of modules: torch.compile, activation checkpointing,
#: DistributedDataParallel, PEFT.
_WRAPPER = re.compile(
    r"(?<![^.])(?:_orig_mod|_checkpoint_wrapped_module|module|base_layer|base_model\.model)\."
)

_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")


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


def bare(name: str) -> str:
    """Return ``name`` without the parts that wrappers add."""
    return _WRAPPER.sub("", name)


def check_names(
    what: str,
    saved: Set[str],
    needed: Set[str],
    known: Set[str],
    *,
    rename: Mapping[str, str] | None,
    strict: bool,
    quiet: bool,
) -> None:
    """Compare the names in a checkpoint with those of the model.

    Args:
        what: the checkpoint, or the part of it that has the names ``saved``, for the error.
        needed, known: the names that a load needs, and all names of the model.
        rename: ``layerwise.rename``, which has made ``saved``; None if it is not supported.
        strict: False to report what keeps its values, unless ``quiet``.

    Raises:
        LayerWiseError: with ``strict``, names differ; says which entries of ``layerwise.rename``
            mend those that differ only by wrappers.
    """
    lacking = needed - saved
    unknown = saved - known
    told = f"{what} has {few(sorted(unknown))}, which the model lacks"
    if lacking:
        told = f"{what} lacks {few(sorted(lacking))}, which the model has"
    if strict and (lacking or unknown):
        way_out = f"load what fits with {LENIENT}"
        if rename is not None:
            way_out = f"rename it with layerwise.rename, or {way_out}"
        if rename == {} and (entries := _entries(saved, unknown, [*known, *lacking])):
            text = json.dumps({"rename": entries})
            way_out = f'set "layerwise": {text}; what differs even so needs {LENIENT}'
        raise LayerWiseError(f"{told}; {way_out}")
    if lacking and not quiet:
        announce(f"ds_layerwise: {told}: these keep their own values")


def _entries(saved: Set[str], unknown: Set[str], wanted: Iterable[str]) -> dict[str, str]:
    """Return entries of ``layerwise.rename`` for those of ``unknown`` that differ from a name of
    the model by wrappers alone.
    """
    by_bare = {bare(name): name for name in wanted}
    found = {}
    for old in unknown:
        if new := by_bare.get(bare(old)):
            tail = min(_WRAPPER.split(old)[-1], _WRAPPER.split(new)[-1], key=len)
            found[f"{old.removesuffix(tail)}*"] = f"{new.removesuffix(tail)}*"
    # The first match wins.
    entries = {old: found[old] for old in sorted(found, key=lambda old: (-len(old), old))}
    numbered = {_NUMBER.sub("*", old): _NUMBER.sub("*", new) for old, new in entries.items()}
    with suppress(LayerWiseError):
        if new_names(saved, numbered) == new_names(saved, entries):
            return numbered
    return entries


_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


def expert_names(
    ep_size: Mapping[str, int], stacks: Container[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the names of each parameter in a checkpoint, in which experts are numbered over all
    ranks: one name for each of the ranks that hold different experts under the parameter's.

    Experts in a list have names of their own. A stack of experts has one name, and the stacks of
    all ranks are one parameter in a checkpoint; see :func:`place_of`.

    Args:
        ep_size: the number of consecutive ranks that hold different experts under a name, for every
            parameter; see :class:`.plan.layout.layout.ParamSpec`.
        stacks: the parameters whose first axis goes over the experts of a rank.

    Raises:
        LayerWiseError: a parameter differs by rank and is neither in a list of experts nor a stack.
    """
    names = {name: (name,) * ranks for name, ranks in ep_size.items()}
    experts: dict[str, re.Match[str]] = {}
    counts: dict[str, int] = {}
    for name, ranks in ep_size.items():
        if ranks == 1 or name in stacks:
            continue
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise LayerWiseError(
                f"{name} is a different parameter on each of {ep_size[name]} ranks, but is not in "
                "a deepspeed.moe.layer.MoE, so a checkpoint cannot tell them apart; build experts "
                "with that layer, or let DeepSpeed's expert_parallel section do it"
            )
        experts[name] = match
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    for name, match in experts.items():
        before, number, after = match.groups()
        names[name] = tuple(
            f"{before}{ep_rank * counts[before] + int(number)}{after}"
            for ep_rank in range(ep_size[name])
        )
    return names


def place_of(names: Sequence[str], rank: int) -> tuple[str, int]:
    """Return the name in a checkpoint of what ``rank`` holds of a parameter, and the number of
    parts of equal size before it under that name.

    Args:
        names: those of :func:`expert_names`.
    """
    ep_rank = rank % len(names)
    name = names[ep_rank]
    return name, names[:ep_rank].count(name)


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
        known = {**header.shapes, **(header.cuts or {})}
        renamed = new_names(known, rename, use_all=use_all)
        self._saved = saved
        self._old = {new: old for old, new in renamed.items()}
        self.header: Header = self.of(header, renamed.__getitem__)

    @staticmethod
    def of(header: Header, called: Callable[[str], str]) -> Header:
        """Return ``header`` with its names replaced by ``called``."""
        renamed: dict[str, Any] = {}
        for key in BY_NAME:
            if (values := getattr(header, key)) is not None:
                renamed[key] = {called(name): of for name, of in values.items()}
        return replace(header, **renamed)

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """See :meth:`.record.Saved.pieces`."""
        return self._saved.pieces(self._old[name], start, stop)
