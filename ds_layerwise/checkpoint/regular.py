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
from collections.abc import Iterable, Mapping, Sequence
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
from ds_layerwise.checkpoint.plain_values import load_safely, naming
from ds_layerwise.checkpoint.record import (
    Header,
    PieceRecord,
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
    lanes: int = 1,
    lane: int = 0,
    save_id: str = "",
) -> dict[str, Any]:
    """Return the part of ``optimizer_state_dict`` with masters and states. Tensors share the
    record's memory.

    Args:
        record: all that ``rank`` of ``layout`` owns.
        names: the checkpoint names of each parameter; see :func:`.new_names.expert_names`.
        lanes, lane: the number of tensor-parallel ranks among which experts are dealt out, and the
            number of the record's.
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
    described = describe(header)
    return {
        **described,
        BASE_OPTIMIZER_STATE: {
            "state": dict(enumerate(states)),
            "param_groups": [{"params": [i]} for i in range(len(states))],
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
            "lanes": [lanes, lane],
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
        number = sum(rule.family == other.family for other in called)
        called.setdefault(rule, f"{rule.family} {number}".removesuffix(" 0"))
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
        lacks_weights: True if only the masters have all trained weights that a load needs.
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
        lacks_weights: bool = False,
        alone: bool = False,
    ) -> None:
        count = len(list(folder.glob("*zero_pp_rank_0_mp_rank_*_optim_states.pt")))
        if parts_of_stages and mp_rank >= count:
            mp_rank = mp_rank % parts_of_stages % max(count, 1)
        self._folder = folder
        self._ending = f"_mp_rank_{mp_rank:02d}_optim_states.pt"
        self._prefix = _prefix(folder, self._ending)
        self._dicts: dict[int, dict[str, Any]] = {}
        self._ours: dict[str, Any] = {}
        if not self.path(rank).exists():
            rank = 0
        state_dict = self.state_dict(rank)
        self._ours = state_dict[KEY]
        with naming(self.path(rank)):
            self.header = header_of(state_dict)
            if lacks_weights:
                self.header = replace(self.header, has_weights=False)
            self.world_size: int = self._ours["world_size"]
            layout = Layout.from_json(self._ours["layout"])
            if not 0 < self.world_size == layout.world_size <= _MOST_RANKS:
                raise ValueError(
                    f"world_size is {self.world_size!r:.100}, but {layout.world_size} in its layout"
                )
        self._indices = {name: index for index, name in enumerate(self.header.shapes)}
        self.holders: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        """The rank, the first element and the number of elements of every piece, by parameter."""
        expert_names: Mapping[str, Sequence[str]] = self._ours["variants"]
        lanes, lane = self._ours.get("lanes", (1, 0))
        for holder in range(self.world_size):
            for piece in layout.pieces(holder):
                names = expert_names.get(piece.name, (piece.name,))
                name, before = place_of(names, holder * lanes + lane)
                start = before * layout.slot(piece.name).numel + piece.param_start
                self.holders[name].append((holder, start, piece.numel))
        self._other_stages: dict[str, RegularCheckpoint] = {}
        """The stages with the parameters that this one does not have."""
        self._dealt_out = frozenset(chain.from_iterable(expert_names.values()))
        self._other_lanes: list[RegularCheckpoint] = []
        """The files of tensor-parallel ranks with other experts."""
        if not alone:
            self._add_lanes(lanes, lane, rank)
        if not parts_of_stages:
            return
        for number in range(mp_rank % parts_of_stages, count, parts_of_stages):
            if number != mp_rank:
                self._add_stage(RegularCheckpoint(folder, rank=rank, mp_rank=number))

    def _add_lanes(self, lanes: int, lane: int, rank: int) -> None:
        for number in range(lanes):
            if number == lane:
                continue
            other = RegularCheckpoint(self._folder, rank=rank, mp_rank=number, alone=True)
            if other.identity() != self.identity():
                raise LayerWiseError(
                    f"{other.path(rank)} and {self.path(rank)} are not of one save"
                )
            self._other_lanes.append(other)

    def _add_stage(self, stage: RegularCheckpoint) -> None:
        header = self.header
        if stage.header.step != header.step:
            raise LayerWiseError(
                f"{stage.path(0)} says step {stage.header.step}, expected {header.step}; the files "
                "are not of one save"
            )
        self._other_stages |= dict.fromkeys(stage.header.shapes, stage)
        cuts = None
        if header.cuts is not None and stage.header.cuts is not None:
            cuts = {**header.cuts, **stage.header.cuts}
        self.header = replace(
            header,
            shapes={**header.shapes, **stage.header.shapes},
            rules={**header.rules, **stage.header.rules},
            kept={**header.kept, **stage.header.kept},
            cuts=cuts,
        )

    def identity(self) -> list[str]:
        """Return lines that are equal for all ranks that read the same save."""
        lines = []
        for stage in (self, *dict.fromkeys(self._other_stages.values())):
            lines += [
                f"files of {stage.world_size} ranks",
                f"layout {stage._ours['layout_digest']}",
                f"save {stage._ours['save_id']}",
            ]
        return lines

    def path(self, rank: int) -> Path:
        """Return the path of the file that ``rank`` saved."""
        return self._folder / f"{self._prefix}zero_pp_rank_{rank}{self._ending}"

    def state_dict(self, rank: int) -> dict[str, Any]:
        """Return the ``optimizer_state_dict`` of ``rank``, with tensors mapped from its file."""
        if rank not in self._dicts:
            path = self.path(rank)
            found = read(path)
            with naming(path):
                ours = ours_of(found, path)
                expected = {**ours, **self._ours, "rank": rank}
                for key in ("rank", "world_size", "layout_digest", "step", "save_id"):
                    if ours[key] != expected[key]:
                        raise LayerWiseError(
                            f"{path} says {key} {ours[key]}, expected {expected[key]}; the files "
                            "are not of one save"
                        )
            self._dicts[rank] = found
        return self._dicts[rank]

    def pieces(self, name: str, start: int, stop: int) -> Sequence[PieceRecord]:
        """See :meth:`.record.Saved.pieces`."""
        if name in self._other_stages:
            return self._other_stages[name].pieces(name, start, stop)
        found: list[PieceRecord] = []
        for other in self._other_lanes if name in self._dealt_out else ():
            found += other.pieces(name, start, stop)
        for rank, first, numel in self.holders[name]:
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
        for key, value in {"the weights": master, **states, **extra}.items():
            is_free = key in extra or key == "step"
            if not isinstance(value, Tensor) or not is_free and value.shape != (numel,):
                raise ValueError(
                    f"{key} of {name} is {getattr(value, 'shape', value)!r:.100}, but has {numel} "
                    "elements in the file's own list"
                )
        return PieceRecord(name, start, master, {**states, **extra})


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
    # More are parts, or stages of a pipeline.
    for path in folder.glob("*zero_pp_rank_*_optim_states.pt") if count > 1 else ():
        parts: int = ours_of(read(path), path)["num_parts"]
        return parts
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
            f"*zero_pp_rank_*{ending}, so no optimizer states to load, and no weights that were "
            "saved at ZeRO stage 3; for those of another stage alone, load_checkpoint(..., "
            "load_optimizer_states=False)"
        )
    return found.pop()


def read(path: Path) -> dict[str, Any]:
    """Read the ``optimizer_state_dict`` in ``path``.

    Raises:
        LayerWiseError: see :func:`load_safely`.
    """
    content = load_safely(path, with_objects=True)
    found = None
    if isinstance(content, dict):
        found = content.get(OPTIMIZER_STATE_DICT)
    if not isinstance(found, dict):
        raise LayerWiseError(
            f"{path} has no {OPTIMIZER_STATE_DICT}; it is not a file of a ZeRO checkpoint"
        )
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
            "FOLDER --output_folder NEW` and load NEW; it does not convert stock Muon's: load "
            "only the weights with load_checkpoint(..., load_optimizer_states=False)"
        )
    check_format(ours["format"], path)
    return ours


def check_format(number: int, path: Path) -> None:
    """Compare the format of the file ``path`` with :data:`FORMAT`.

    Raises:
        LayerWiseError: it is another one.
    """
    if number != FORMAT:
        way_out = "resume with the version that wrote it"
        if number > FORMAT:
            way_out = "upgrade ds_layerwise"
        raise LayerWiseError(
            f"{path} has format {number}, and this version of ds_layerwise reads {FORMAT}; "
            f"{way_out}"
        )
