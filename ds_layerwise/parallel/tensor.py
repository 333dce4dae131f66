"""Checks of tensor parallelism: the ``mpu`` is complete, and copies are equal."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError, LayoutError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.weight_writes import checksum_of
from ds_layerwise.routing.tensor_marks import PART_SHAPES, is_cut

_ASKED = (
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_model_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_data_parallel_group",
)


def check_mpu(mpu: Any, *, autotp_size: int) -> None:
    """Refuse an ``mpu`` of the caller that this backend does not support.

    Args:
        autotp_size: the number of ranks for which AutoTP cuts the model. AutoTP makes groups of its
            own, which the engine then uses instead of those of ``mpu``.

    Raises:
        ConfigError: names what it lacks or has too much, or says that its groups differ from
            AutoTP's.
    """
    if missing := [name for name in _ASKED if not callable(getattr(mpu, name, None))]:
        raise ConfigError(
            f"mpu has no {missing[0]}(); it must have the methods {', '.join(_ASKED)}"
        )
    if (stages := bwc_pipeline_parallel_world_size(mpu)) > 1:
        raise ConfigError(
            f"mpu has {stages} pipeline stages, but this optimizer supports only the stages of "
            "deepspeed's PipelineModule"
        )
    # DeepSpeed reduces over both dimensions if the mpu has a group of them; it knows no others.
    knows_both = autotp_size <= 1 and hasattr(mpu, "get_sequence_data_parallel_group")
    for what, is_known in (("sequence", knows_both), ("context", False)):
        size = getattr(mpu, f"get_{what}_parallel_world_size", lambda: 1)()
        if hasattr(mpu, f"initialize_{what}_parallel") or (size > 1 and not is_known):
            raise ConfigError(
                f"{what} parallelism (mpu) is not supported by this optimizer, but for sequences "
                "of an mpu with get_sequence_data_parallel_group(), without AutoTP (beside which "
                "DeepSpeed does not ask it); pass an mpu without it"
            )
    if autotp_size <= 1:
        return
    rank = comm.rank_of(None)
    first = rank - rank % autotp_size
    same_parts = range(rank % autotp_size, comm.size_of(None), autotp_size)
    for what, wanted in (("model", range(first, first + autotp_size)), ("data", same_parts)):
        ranks = list(comm.ranks_of(getattr(mpu, f"get_{what}_parallel_group")()))
        if ranks != list(wanted):
            raise ConfigError(
                f"mpu.get_{what}_parallel_group() has ranks {ranks} on rank {rank}, and "
                f"tensor_parallel.autotp_size {autotp_size} makes a group of ranks "
                f"{list(wanted)}; leave mpu out, or lay it out so"
            )


def refuse_groups_left() -> None:
    """Refuse an engine without an ``mpu`` after one with parts, whose groups DeepSpeed would use.

    Raises:
        ConfigError: DeepSpeed knows an ``mpu`` that cuts models.
    """
    if (size := groups._get_model_parallel_world_size()) > 1:
        raise ConfigError(
            f"initialize() has no mpu, and DeepSpeed still has groups of {size} ranks with parts "
            "of one model, from an earlier engine of this process; pass mpu again, or start a new "
            "process"
        )


def tensor_group(engine: Any) -> comm.Group | None:
    """Return the ranks with the parts of the same parameters, in the order of the parts; None if
    each rank has all parts.

    Raises:
        ConfigError: AutoTP has cut the model for another group than that of the engine's ``mpu``,
            by which gradients are averaged.
    """
    if bwc_tensor_model_parallel_world_size(engine.mpu) == 1:
        return None
    group = bwc_tensor_model_parallel_group(engine.mpu)
    by_autotp = None
    if engine.autotp_size() > 1:
        by_autotp = engine.tensor_parallel_config().tensor_parallel.tp_group
    if by_autotp is not None and comm.ranks_of(by_autotp) != comm.ranks_of(group):
        raise ConfigError(
            f"AutoTP has cut the model over ranks {comm.ranks_of(by_autotp)}, but gradients are "
            f"averaged as if over ranks {comm.ranks_of(group)}; leave tp_group out of "
            "tp_model_init"
        )
    return group


def agree_on_parts(model: nn.Module, *, group: comm.Group) -> None:
    """Store with each parameter the shapes of all its parts, if they differ.

    Args:
        group: the ranks with the parts, which must all call this; None if there are none.

    Raises:
        LayoutError: on every rank, if parts of a parameter are not pieces of one axis.
    """
    for param in model.parameters():
        # Those of an earlier engine.
        vars(param).pop(PART_SHAPES, None)
    if group is None:
        return
    mine = {name: tuple(param.shape) for name, param in model.named_parameters()}
    everyone = comm.gather_objects(mine, group=group)
    with comm.errors_on_all_ranks():
        for name, param in model.named_parameters():
            shapes = [theirs.get(name, mine[name]) for theirs in everyone]
            by_axis = enumerate(zip(*shapes, strict=False))
            differ = [axis for axis, sizes in by_axis if len({*sizes}) > 1]
            if not differ:
                continue
            dim = getattr(param, "partition_dim", differ[0])
            if not is_cut(param) or differ != [dim] or 0 in chain(*shapes):
                raise LayoutError(
                    f"{name} has shapes {', '.join(map(str, shapes))} on tensor-parallel ranks; "
                    "set param.tensor_model_parallel = True and param.partition_dim to the axis "
                    "that is cut, along which alone they may differ, or choose a number of ranks "
                    "that leaves elements to each"
                )
            setattr(param, PART_SHAPES, shapes)


def check_copies(copies: Mapping[str, Tensor], *, group: comm.Group) -> None:
    """Raise an error on every rank of ``group`` unless ``copies``, parameters without a mark, are
    the same on all of them.

    A parameter that differs is most likely a part that lacks its mark, and would be treated as a
    whole matrix.

    Raises:
        LayoutError: one differs.
    """
    sums = {name: checksum_of(value) for name, value in copies.items()}
    if (found := comm.disagreement(comm.gather_objects(sums, group=group))) is not None:
        name, _, rank = found
        raise LayoutError(
            f"{name} {tuple(copies[name].shape)} has other values on tensor-parallel rank {rank} "
            "than on rank 0, and no mark that says that it is cut; set param.tensor_model_parallel "
            "= True and param.partition_dim to the axis that is cut, or start from the same values"
        )
