"""A rank's record as the ``optimizer_state_dict`` of DeepSpeed's ``*_optim_states.pt``, and back.

Note: one checkpoint group per parameter
    DeepSpeed's ``zero_to_fp32.py`` concatenates the partitions of all ranks, group by group, and
    cuts them in the order of ``param_shapes``. Its ``ds_to_universal.py`` reads the fragments that
    ``param_slice_mappings`` names. Both are right if partitions have no padding and the parameters
    of a group are listed in rank-major order. With one group per parameter both conditions always
    hold, and every tensor is saved in place, without a copy. The converter only knows the states
    ``exp_avg`` and ``exp_avg_sq``. So a first moment is saved under the first name, a missing
    second one as zeros that take one element on disk, and everything else under a key of this
    package.

Only tensors, builtins and DeepSpeed's own ``fragment_address`` are pickled, because those scripts
run without this package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.utils.tensor_fragment import fragment_address
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ds_layerwise.checkpoint.new_names import place_of
from ds_layerwise.checkpoint.plain_values import check_format, load_safely, naming
from ds_layerwise.checkpoint.record import (
    BY_NAME,
    Header,
    PieceRecord,
    Pieces,
    RuleRecord,
    step_tensor,
    travels_as,
)
from ds_layerwise.errors import LayerWiseError
from ds_layerwise.plan.layout.layout import Layout

#: The key of this package beside DeepSpeed's, and the version of its content.
KEY = "layerwise"
FORMAT = 2

_RULES = TypeAdapter(dict[str, RuleRecord])
_HEADER = TypeAdapter(Header)

#: A bound that no run reaches.
_MOST_RANKS = 1 << 20


def to_state_dict(
    record: Iterable[PieceRecord],
    header: Header,
    layout: Layout,
    rank: int,
    *,
    names: Mapping[str, tuple[str, ...]],
    lanes: tuple[int, int],
    save_id: str,
) -> dict[str, Any]:
    """Return the part of ``optimizer_state_dict`` with masters and states. Tensors share the
    record's memory.

    Args:
        record: all that ``rank`` of ``layout`` owns.
        names: the checkpoint names of each parameter; see :func:`.new_names.expert_names`.
        lanes: the number of tensor-parallel ranks among which experts are dealt out, and the number
            of the record's.
        save_id: the identifier of the save, the same in the files of all ranks.
    """
    pieces = {piece.name: piece for piece in record}
    step = step_tensor(header.step)
    zero = torch.zeros(1, dtype=torch.float32, device="cpu")
    nothing = PieceRecord("", 0, torch.zeros(0, dtype=torch.float32, device="cpu"), {})
    states: list[dict[str, Tensor]] = []
    masters: list[Tensor] = []
    fragments: list[dict[str, Any]] = []
    extra: dict[str, dict[str, Tensor]] = {}
    for name in header.shapes:
        piece = pieces.get(name, nothing)
        numel = piece.master.numel()
        keys = piece.convertible()
        zeros = zero.expand(numel) if numel else piece.master
        states.append({"exp_avg": zeros, "exp_avg_sq": zeros, "step": step})
        for key, value in piece.state.items():
            if key in keys:
                states[-1][keys[key]] = alone(value)
            else:
                extra.setdefault(name, {})[key] = alone(value)
        masters.append(alone(piece.master))
        fragments.append({name: fragment_address(numel=numel, start=0)} if numel else {})
    # DeepSpeed's own optimizers take the first ones of these. Its schedulers restore a number of
    # steps alone, and not the rate of the next step.
    groups = [dict[str, Any](params=[i]) for i in range(len(states))]
    for values, group in zip(groups, header.param_groups or (), strict=False):
        values["lr"] = group["lr"]
    described = describe(header)
    return {
        **described,
        BASE_OPTIMIZER_STATE: {
            "state": dict(enumerate(states)),
            "param_groups": groups,
        },
        SINGLE_PARTITION_OF_FP32_GROUPS: masters,
        GROUP_PADDINGS: [0] * len(states),
        PARTITION_COUNT: [layout.world_size] * len(states),
        PARAM_SLICE_MAPPINGS: fragments,
        KEY: {
            **described[KEY],
            "save_id": save_id,
            "rank": rank,
            "world_size": layout.world_size,
            "lanes": list(lanes),
            "layout": layout.to_json(),
            "layout_digest": layout.digest(),
            "variants": {name: each for name, each in names.items() if len(each) > 1},
            "param_starts": {name: piece.param_start for name, piece in pieces.items()},
            "extra_states": extra,
        },
    }


def describe(header: Header) -> dict[str, Any]:
    """Return ``header`` as entries of an ``optimizer_state_dict``; :func:`header_of` reads them
    back.
    """
    called: dict[RuleRecord, str] = {}
    for rule in header.rules.values():
        called.setdefault(rule, f"{rule.family} {len(called)}")
    ours = {
        "format": FORMAT,
        **vars(header),
        "rules": {name: asdict(rule) for rule, name in called.items()},
        "rule_of": {name: called[rule] for name, rule in header.rules.items()},
    }
    # DeepSpeed has keys of its own for these.
    return {LOSS_SCALER: ours.pop("loss_scaler"), "overflow": ours.pop("overflow"), KEY: ours}


def header_of(state_dict: Mapping[str, Any]) -> Header:
    """Read the header of ``state_dict`` that :func:`describe` wrote, with the loss scaler that the
    optimizer added.

    Raises:
        ValueError: an entry is missing, or of another kind than was written; names it. Without
            groups, rules or their names it is a ``KeyError``.
    """
    ours = state_dict[KEY]
    try:
        rules = _RULES.validate_python(ours["rules"])
        # The rest was written as it is; keys that a header lacks are ignored.
        content = {
            **ours,
            "rules": {name: rules[key] for name, key in ours["rule_of"].items()},
            "loss_scaler": state_dict.get(LOSS_SCALER),
            "overflow": bool(state_dict.get("overflow")),
        }
        return _HEADER.validate_python(content)
    except ValidationError as e:
        first = e.errors()[0]
        raise ValueError(
            f"{'.'.join(map(str, first['loc']))} is {first['input']!r:.100} ({first['msg']})"
        ) from e


def alone(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on a storage that covers only its own elements, so that only these are
    pickled. It shares memory.
    """
    tensor = tensor.detach()
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    first = tensor.storage_offset() * tensor.element_size()
    covered = storage[first : first + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        covered, 0, tensor.shape, tensor.stride()
    )


class RegularCheckpoint:
    """A checkpoint of this package under DeepSpeed's file names; see :class:`.record.Saved`.

    Files are opened at their first use.

    Args:
        rank: the rank whose file is opened first. If every node has its own disk and the layout is
            the same, this rank needs no other file.
        mp_rank: the number of the piece of a model that is cut over ranks; see
            :class:`ds_layerwise.zero.setup.run_settings.Settings`.
        parts_of_stages: the number of tensor-parallel parts of each pipeline stage, to have the
            parameters of this part of all stages; 0 to have those of ``mp_rank`` alone. The others'
            are in the files of the first stage that holds them; the stage of ``mp_rank``, if there
            are that many, gives the parameter groups and the loss scale.
        alone: True to have no experts of other tensor-parallel ranks.

    Raises:
        LayerWiseError: a file is missing, unreadable, of another save, not ours, or in a newer
            format; names it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int = 0,
        mp_rank: int = 0,
        parts_of_stages: int = 0,
        alone: bool = False,
    ) -> None:
        others = range(0)
        if parts_of_stages:
            count = mp_size(folder)
            if mp_rank >= count:
                mp_rank = mp_rank % parts_of_stages % count
            others = range(mp_rank % parts_of_stages, count, parts_of_stages)
        self._folder = folder
        self._ending = f"_mp_rank_{mp_rank:02d}_optim_states.pt"
        self._prefix = _prefix(folder, self._ending)
        self._dicts: dict[int, dict[str, Any]] = {}
        self._ours: dict[str, Any] = {}
        if not self.path(rank).exists():
            rank = 0
        state_dict = self.state_dict(rank)
        self._ours = state_dict[KEY]
        self.save_id = self._ours["save_id"]
        with naming(self.path(rank)):
            self.header = header_of(state_dict)
            self.world_size: int = self._ours["world_size"]
            layout = Layout.from_json(self._ours["layout"])
            if not 0 < self.world_size == layout.world_size <= _MOST_RANKS:
                raise ValueError(
                    f"world_size is {self.world_size!r:.100}, but {layout.world_size} in its layout"
                )
        self._indices = {name: index for index, name in enumerate(self.header.shapes)}
        self.holders: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        """The rank, the first element and the number of elements of every piece in the files of
        ``mp_rank``, by parameter.
        """
        expert_names: Mapping[str, Sequence[str]] = self._ours["variants"]
        lanes, lane = self._ours.get("lanes", (1, 0))
        for holder in range(self.world_size):
            for piece in layout.pieces(holder):
                names = expert_names.get(piece.name, (piece.name,))
                name, before = place_of(names, holder * lanes + lane)
                start = before * layout.slot(piece.name).numel + piece.param_start
                # What another stage saves is in its files alone.
                if name in self._indices:
                    self.holders[name].append((holder, start, piece.numel))
        self._others: dict[str, list[RegularCheckpoint]] = defaultdict(list)
        """The stages, or the tensor-parallel ranks with other experts, that also have pieces, by
        parameter.
        """
        if lanes > 1:
            others = range(lanes)
        dealt_out = frozenset(chain.from_iterable(expert_names.values()))
        for number in () if alone else others:
            if number != mp_rank:
                other = RegularCheckpoint(folder, rank=rank, mp_rank=number, alone=True)
                self._join(other, rank, dealt_out)

    def _join(self, other: RegularCheckpoint, rank: int, dealt_out: Set[str]) -> None:
        """Add the parameters that only ``other`` has, and its pieces of those ``dealt_out``."""
        for key in ("step", "save_id"):
            if other._ours[key] != self._ours[key]:
                raise LayerWiseError(
                    f"{other.path(rank)} and {self.path(rank)} are not of one save"
                )
        for name in other.header.shapes:
            if name in dealt_out or name not in self._indices:
                self._others[name].append(other)
        merged: dict[str, Any] = {}
        for key in BY_NAME:
            own = getattr(self.header, key)
            theirs = getattr(other.header, key)
            merged[key] = None
            if own is not None and theirs is not None:
                merged[key] = {**theirs, **own}
        self.header = replace(self.header, **merged)

    def path(self, rank: int) -> Path:
        """Return the path of the file that ``rank`` saved."""
        return self._folder / f"{self._prefix}zero_pp_rank_{rank}{self._ending}"

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of ``rank``, with tensors mapped from its file."""
        if rank not in self._dicts:
            path = self.path(rank)
            found = read(path)
            with naming(path):
                ours = found[KEY]
                expected = {**ours, **self._ours, "rank": rank}
                for key in ("rank", "world_size", "layout_digest", "step", "save_id"):
                    if ours[key] != expected[key]:
                        raise LayerWiseError(
                            f"{path} says {key} {ours[key]}, expected {expected[key]}; the files "
                            "are not of one save"
                        )
            self._dicts[rank] = found
        return self._dicts[rank]

    def open_all(self) -> None:
        """Open the files of all ranks.

        Raises:
            LayerWiseError: one is missing, unreadable, or of another save; names it.
        """
        for rank in range(self.world_size):
            self.state_dict(rank)

    def pieces(self, name: str, start: int, stop: int) -> Pieces:
        """See :meth:`.record.Saved.pieces`."""
        found: list[PieceRecord] = []
        for other in self._others.get(name, ()):
            found += other.pieces(name, start, stop)
        for rank, first, numel in self.holders.get(name, ()):
            if first < stop and start < first + numel:
                state_dict = self.state_dict(rank)
                with naming(self.path(rank)):
                    found.append(self._piece(rank, state_dict, name, first, numel))
        return sorted(found, key=lambda piece: piece.param_start)

    def _piece(
        self, rank: int, state_dict: Mapping[str, Any], name: str, start: int, numel: int
    ) -> PieceRecord:
        """Read the part of ``name`` in the file of ``rank``: ``numel`` elements from ``start`` on.

        Raises:
            LayerWiseError: the file holds another part.
        """
        index = self._indices[name]
        fragment = state_dict[PARAM_SLICE_MAPPINGS][index].get(name)
        param_start = state_dict[KEY]["param_starts"].get(name)
        if fragment is None or (param_start, fragment.numel) != (start, numel):
            raise LayerWiseError(
                f"{self.path(rank)} does not hold the part of {name} that its layout says; the "
                "files are not of one save"
            )
        master = state_dict[SINGLE_PARTITION_OF_FP32_GROUPS][index]
        saved = state_dict[BASE_OPTIMIZER_STATE]["state"][index]
        extra = state_dict[KEY]["extra_states"].get(name, {})
        names = travels_as(set(self.header.rules[name].state_keys) - extra.keys())
        states = {key: saved[carried] for key, carried in names.items()}
        piece = PieceRecord(name, start, master, {**states, **extra})
        for key, value in piece.tensors.items():
            is_free = key in extra or key == "step"
            if not isinstance(value, Tensor) or not is_free and value.shape != (numel,):
                raise ValueError(
                    f"{key or 'the weights'} of {name} is {getattr(value, 'shape', value)!r:.100}, "
                    f"but has {numel} elements in the file's own list"
                )
        return piece


def mp_size(folder: Path) -> int:
    """Return the number of parts of the model in ``folder``; 1 if it is unknown, or the parts are
    merged.
    """
    if (folder / "zero").is_dir():
        return 1
    files = folder.glob("*mp_rank_*_model_states.pt")
    return len({path.name.rpartition("mp_rank_")[2] for path in files}) or 1


def parts_in(folder: Path) -> int:
    """Return the number of tensor-parallel parts of the model, or of each stage of a pipeline, in
    the regular checkpoint ``folder``.

    Raises:
        LayerWiseError: a file is unreadable, or not ours.
    """
    count = mp_size(folder)
    if count > 1:
        # They are parts, or stages of a pipeline.
        prefix = _prefix(folder, "_optim_states.pt")
        path = next(folder.glob(f"{prefix}zero_pp_rank_*_optim_states.pt"))
        count = int(read(path)[KEY]["num_parts"])
    return count


def refuse_parts(folder: Path) -> None:
    """Refuse a model that is cut: its files do not tell the axes of the cuts.

    Raises:
        LayerWiseError: ``folder`` has such a model.
    """
    if (pieces := mp_size(folder)) > 1:
        raise LayerWiseError(
            f"{folder} holds a model that is cut into {pieces} parts; put them together with "
            "DeepSpeed's ds_to_universal.py, which knows how AutoTP cuts and reads "
            "universal_checkpoint_info"
        )


def _prefix(folder: Path, ending: str) -> str:
    """Return the prefix of DeepSpeed's file names in ``folder``: ``bf16_`` or nothing."""
    files = folder.glob(f"*zero_pp_rank_*{ending}")
    found = {path.name.partition("zero_pp_rank_")[0] for path in files}
    if len(found) != 1:
        raise LayerWiseError(
            f"{folder} has {'two kinds of' if found else 'no'} files named "
            f"*zero_pp_rank_*{ending}, so no optimizer states to load, and no weights that are in "
            "them alone: of ZeRO stage 3, of another number of parts, or of a module that layers "
            "of a pipeline share; for other weights, load_checkpoint(..., "
            "load_optimizer_states=False)"
        )
    return found.pop()


def read(path: Path) -> dict[str, Any]:
    """Read the ``optimizer_state_dict`` in ``path``, which this package wrote.

    Raises:
        LayerWiseError: see :func:`load_safely` and :func:`ours_of`.
    """
    content = load_safely(path, with_objects=True)
    found = None
    if isinstance(content, dict):
        found = content.get(OPTIMIZER_STATE_DICT)
    if not isinstance(found, dict):
        raise LayerWiseError(
            f"{path} has no {OPTIMIZER_STATE_DICT}; it is not a file of a ZeRO checkpoint"
        )
    with naming(path):
        ours_of(found, path)
    return found


def ours_of(state_dict: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values that this package wrote beside DeepSpeed's own keys, in the file ``path``.

    Raises:
        LayerWiseError: there are none, or they have another format.
    """
    ours: dict[str, Any] | None = state_dict.get(KEY)
    if ours is None:
        raise LayerWiseError(
            f"{path} was not written by ds_layerwise; for AdamW's states, convert its folder with "
            "`python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
            "FOLDER --output_folder NEW` and load NEW with layerwise.on_optimizer_change set to "
            "'keep_shared'; it does not convert stock Muon's: load only the weights with "
            "load_checkpoint(..., load_optimizer_states=False)"
        )
    check_format(ours["format"], FORMAT, path)
    return ours
