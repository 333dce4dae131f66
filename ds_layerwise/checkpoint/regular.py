"""A rank's record as the ``optimizer_state_dict`` of DeepSpeed's ``*_optim_states.pt``, and back.

Note: one checkpoint group a bucket
    DeepSpeed's ``zero_to_fp32.py`` concatenates the partitions of all ranks, group by group, and cuts them in the
    order of ``param_shapes``; its ``ds_to_universal.py`` reads the fragments that ``param_slice_mappings`` names.
    Both are right when every bucket is a group, partitions hold no padding, and the parameters of a group are listed
    in rank-major order. The converter knows the states ``exp_avg`` and ``exp_avg_sq`` only, so a first moment
    travels under the first name, and a missing second one as zeros that take one element on disk.

Only tensors, builtins and DeepSpeed's own ``fragment_address`` are pickled: those scripts run without this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from deepspeed.checkpoint.constants import (BASE_OPTIMIZER_STATE, GROUP_PADDINGS, PARAM_SLICE_MAPPINGS, PARTITION_COUNT,
                                            SINGLE_PARTITION_OF_FP32_GROUPS)
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from ds_layerwise.checkpoint.record import PieceRecord, ShardRecord
from ds_layerwise.errors import LayerwiseError

#: Our own key beside DeepSpeed's, and the version of what is under it.
KEY = "layerwise"
FORMAT = 1

#: State keys that DeepSpeed's converter does not know, and the names they travel under.
_TRAVELS_AS = {"momentum_buffer": "exp_avg"}
_CONVERTED = ("exp_avg", "exp_avg_sq")


def to_state_dict(record: ShardRecord, *, num_buckets: int, param_groups: Sequence[Mapping[str, Any]],
                  step: int) -> dict[str, Any]:
    """The part of ``optimizer_state_dict`` that describes masters and states. Tensors are copies on the CPU.

    Args:
        param_groups: what the user's groups say, without their parameters.
        step: the number of updates so far, for buckets whose optimizer does not count itself.
    """
    buckets: list[list[PieceRecord]] = [[] for _ in range(num_buckets)]
    for piece in record.pieces:
        buckets[piece.bucket].append(piece)
    return {
        BASE_OPTIMIZER_STATE: {
            "state": {i: _bucket_state(pieces, step) for i, pieces in enumerate(buckets)},
            "param_groups": [{"params": [i]} for i in range(num_buckets)],
        },
        SINGLE_PARTITION_OF_FP32_GROUPS: [_joined([p.master for p in pieces]) for pieces in buckets],
        GROUP_PADDINGS: [0] * num_buckets,
        PARTITION_COUNT: [record.world_size] * num_buckets,
        PARAM_SLICE_MAPPINGS: [_fragments(pieces) for pieces in buckets],
        KEY: {
            "format": FORMAT,
            "rank": record.rank,
            "world_size": record.world_size,
            "layout": record.layout_json,
            "layout_digest": record.layout_digest,
            "param_groups": [dict(group) for group in param_groups],
            "step": step,
            "state_keys": {p.name: sorted(p.state) for p in record.pieces},
            "param_starts": {p.name: p.param_start for p in record.pieces},
        },
    }


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros(0)
    return torch.cat([part.detach().cpu().float() for part in parts])


def _bucket_state(pieces: Sequence[PieceRecord], step: int) -> dict[str, Tensor]:
    numel = sum(p.master.numel() for p in pieces)
    state: dict[str, Tensor] = {}
    for key in sorted({k for p in pieces for k in p.state} - {"step"}):
        state[_TRAVELS_AS.get(key, key)] = _joined([p.state[key] for p in pieces])
    for key in _CONVERTED:
        if key not in state:
            state[key] = torch.zeros(1).expand(numel)
    state["step"] = torch.tensor(float(step))
    return state


def _fragments(pieces: Sequence[PieceRecord]) -> dict[str, Any]:
    fragments, start = {}, 0
    for piece in pieces:
        fragments[piece.name] = fragment_address(numel=piece.master.numel(), start=start)
        start += piece.master.numel()
    return fragments


def read_all(folder: Path) -> list[dict[str, Any]]:
    """The ``optimizer_state_dict`` of every rank that saved into ``folder``, in rank order, tensors mapped from files.

    Raises:
        LayerwiseError: a file is missing, unreadable or of another save; names it.
    """
    files = sorted(folder.glob("*zero_pp_rank_0_mp_rank_00_optim_states.pt"))
    if len(files) != 1:
        raise LayerwiseError(f"{folder} has {len(files) or 'no'} files named *zero_pp_rank_0_mp_rank_00_optim_states.pt"
                             ", so no optimizer states to load; for the weights alone, load_checkpoint(..., "
                             "load_optimizer_states=False)")
    first = _read(files[0])
    dicts = [first]
    for rank in range(1, ours_of(first, files[0])["world_size"]):
        path = files[0].with_name(files[0].name.replace("zero_pp_rank_0_", f"zero_pp_rank_{rank}_"))
        dicts.append(_read(path))
    for rank, state_dict in enumerate(dicts):
        ours = ours_of(state_dict, files[0])
        expected = {"rank": rank, **{k: ours_of(first, files[0])[k] for k in ("world_size", "layout_digest", "step")}}
        for key, value in expected.items():
            if ours[key] != value:
                raise LayerwiseError(f"the optimizer states of rank {rank} in {folder} say {key} {ours[key]}, expected "
                                     f"{value}; the files are not of one save")
    return dicts


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise LayerwiseError(f"{path} is missing; the checkpoint is not whole")
    try:
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, fragment_address]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        found: dict[str, Any] = content["optimizer_state_dict"]
    except (RuntimeError, EOFError, KeyError, ValueError, UnpicklingError) as e:
        raise LayerwiseError(f"{path} cannot be read: {type(e).__name__}: {str(e).splitlines()[0]}") from e
    return found


def ours_of(state_dict: Mapping[str, Any], where: object = "this optimizer checkpoint") -> dict[str, Any]:
    """What this package wrote beside DeepSpeed's own keys.

    Raises:
        LayerwiseError: nothing, or in a newer format.
    """
    ours: dict[str, Any] | None = state_dict.get(KEY)
    if ours is None:
        raise LayerwiseError(f"{where} was not written by ds_layerwise; load the weights alone with "
                             "load_checkpoint(..., load_optimizer_states=False)")
    if ours["format"] > FORMAT:
        raise LayerwiseError(f"{where} has format {ours['format']}, newer than {FORMAT}, the newest that this version "
                             "of ds_layerwise reads; upgrade it")
    return ours


def from_state_dict(state_dict: Mapping[str, Any]) -> ShardRecord:
    """The record that :func:`to_state_dict` was given.

    Raises:
        LayerwiseError: the file was not written by this package, or by a newer format of it.
    """
    ours = ours_of(state_dict)
    pieces = []
    for bucket, fragments in enumerate(state_dict[PARAM_SLICE_MAPPINGS]):
        masters = state_dict[SINGLE_PARTITION_OF_FP32_GROUPS][bucket]
        states = state_dict[BASE_OPTIMIZER_STATE]["state"][bucket]
        for name, fragment in fragments.items():
            cut = slice(fragment.start, fragment.start + fragment.numel)
            state = {key: states["step"] if key == "step" else states[_TRAVELS_AS.get(key, key)][cut]
                     for key in ours["state_keys"][name]}
            pieces.append(PieceRecord(name, bucket, ours["param_starts"][name], masters[cut], state))
    return ShardRecord(ours["rank"], ours["world_size"], ours["layout"], ours["layout_digest"], tuple(pieces))
