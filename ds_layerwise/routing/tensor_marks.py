"""The marks of tensor parallelism on parameters: cut or not, and along which axis; and that of
stacks of experts.

Megatron sets ``tensor_model_parallel`` (before 2021: ``model_parallel``) and ``partition_dim`` on
every part. DeepSpeed's AutoTP sets the first one, and stores the shape of the parameter before the
cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ds_layerwise.errors import RoutingError
from ds_layerwise.optimizers.recipe import Shape
from ds_layerwise.orthogonalize.tensor_shards import Axis

#: The attribute in which AutoTP stores its information about a parameter:
#: deepspeed.checkpoint.constants.DS_AUTOTP_UC_META.
AUTOTP_META = "ds_autotp_universal_checkpoint_meta"
#: The attribute with the shapes of all parts of a parameter, in their order, if they differ; see
#: :func:`.parallel.tensor.agree_on_parts`.
PART_SHAPES = "ds_layerwise_part_shapes"


def is_cut(param: Tensor) -> bool:
    """Tell whether tensor-parallel peers have other shards of ``param``, and not copies."""
    return bool(
        getattr(param, "tensor_model_parallel", False) or getattr(param, "model_parallel", False)
    )


def lengths_of(param: Tensor, own: int) -> tuple[int, ...]:
    """Return the lengths in all parts of the cut axis, which has ``own`` elements in ``param``;
    empty if they are equal.
    """
    shapes = getattr(param, PART_SHAPES, ())
    return tuple(own * math.prod(shape) // param.numel() for shape in shapes)


def axis_of(name: str, param: Tensor, matrix_shape: Shape, tp_size: int) -> Axis | None:
    """Return the axis of the matrices in ``param`` that is cut; None if each rank has whole
    matrices of a stack.

    Args:
        matrix_shape: the shape in which the matrix optimizer sees ``param``.

    Raises:
        RoutingError: ``param`` has no such information, or the parts overlap.
    """
    dim = _dim_of(name, param, tp_size)
    if len(matrix_shape) == param.dim():
        rows = param.dim() - 2
    elif len(matrix_shape) == 2:
        rows = 0  # a kernel as (out, rest)
    else:
        raise RoutingError(
            f"{name} {tuple(param.shape)} is a grouped convolution, of which tensor parallelism "
            f"has cut axis {dim}; send it to the scalar optimizer with layerwise.overrides"
        )
    if dim < rows:
        return None
    return -2 if dim == rows else -1


def whole_dims(name: str, param: Tensor, tp_size: int) -> Shape:
    """Return the shape of ``param`` before it was cut.

    Raises:
        RoutingError: as in :func:`axis_of`.
    """
    dim = _dim_of(name, param, tp_size)
    whole = list(param.shape)
    whole[dim] = _whole_length(param, dim, tp_size)
    return tuple(whole)


def _whole_length(param: Tensor, dim: int, tp_size: int) -> int:
    return sum(lengths_of(param, param.shape[dim])) or tp_size * param.shape[dim]


def cuts_of(
    params: Iterable[tuple[str, Tensor]], names: Mapping[str, Iterable[str]], tp_size: int
) -> dict[str, Any]:
    """Return how parameters are cut, by checkpoint name; see :data:`.record.Cuts`.

    Args:
        names: the checkpoint names of those that have others.
    """
    found: dict[str, Any] = {}
    for name, param in params:
        if tp_size == 1 or not is_cut(param):
            continue
        cut = None
        with suppress(RoutingError):
            dim = _dim_of(name, param, tp_size)
            runs = runs_of(param, _whole_length(param, dim, tp_size)) or (0, 1)
            if len(set(runs)) == 1:
                cut = dim, len(runs), *lengths_of(param, param.shape[dim])
        found.update(dict.fromkeys(names.get(name, (name,)), cut))
    return found


def _dim_of(name: str, param: Tensor, tp_size: int) -> int:
    meta: dict[str, Any] | None = getattr(param, AUTOTP_META, None)
    if meta is None:
        dim = getattr(param, "partition_dim", None)
        if not isinstance(dim, int) or not 0 <= dim < param.dim():
            raise RoutingError(
                f"{name} {tuple(param.shape)} is marked as a part of a tensor-parallel parameter, "
                f"but its partition_dim is {dim!r}; set it to the axis that is cut, or send the "
                "parameter to the scalar optimizer with layerwise.overrides"
            )
        return dim
    before = tuple(meta["original_shape"])
    reason = meta["conversion"].get("unsupported_reason")
    cut = [i for i in range(param.dim()) if before[i] != param.shape[i]]
    if reason or len(cut) != 1 or before[cut[0]] != _whole_length(param, cut[0], tp_size):
        raise RoutingError(
            f"{name}: AutoTP cut {before} into {tuple(param.shape)} over {tp_size} "
            f"ranks{f' ({reason})' if reason else ''}, but only parts of one axis without overlap "
            "can be orthogonalised as a whole; send it to the scalar optimizer with "
            "layerwise.overrides"
        )
    return cut[0]


def runs_of(param: Tensor, length: int) -> tuple[int, ...] | None:
    """Return the lengths of the runs of an axis with ``length`` elements, if every tensor shard has
    an equal piece of each run, or any piece of a single one.

    None if pieces of several runs differ between ranks, or have another layout.
    """
    meta: dict[str, Any] = getattr(param, AUTOTP_META, None) or {}
    widths = meta.get("sub_param_shard_widths")
    sizes = meta.get("sub_param_sizes")
    in_segments = meta.get("conversion", {}).get("affine_map") and not (
        sizes or meta.get("partition_sizes")
    )
    if in_segments or widths and any(len(set(each)) > 1 for each in widths):
        return None
    if sizes:
        return tuple(sizes)
    stride = getattr(param, "partition_stride", 1) or 1
    if length % stride == 0 and not (stride > 1 and hasattr(param, PART_SHAPES)):
        return (length // stride,) * stride
    return None


def heads_here(name: str, param: Tensor, num_heads: int, tp_size: int) -> int:
    """Return how many of ``num_heads`` equal blocks of rows are in this shard of ``param``.

    Raises:
        RoutingError: some blocks are cut.
    """
    meta: dict[str, Any] = getattr(param, AUTOTP_META, None) or {}
    in_one_run = getattr(param, "partition_stride", 1) in (1, None) and not meta.get(
        "sub_param_sizes"
    )
    if num_heads % tp_size or not in_one_run or hasattr(param, PART_SHAPES):
        raise RoutingError(
            f"{name}: {num_heads} heads do not lie whole on {tp_size} tensor-parallel "
            f"ranks{'' if in_one_run else ', which have several runs of rows each'}, or not as "
            "many on each; orthogonalise it as one matrix, without num_heads and per_head_muon, "
            "and leave layerwise.qk_clip out"
        )
    return num_heads // tp_size


def is_expert_stack(param: Tensor) -> bool:
    """Tell whether the first axis of ``param`` goes over experts, as DeepSpeed marks it for its
    Muon.
    """
    return param.dim() == 3 and bool(getattr(param, "is_expert_group", False))


def whole_shape(names: Sequence[str], shape: Shape) -> Shape:
    """Return the shape in a checkpoint of a parameter that has ``shape`` on each rank.

    Args:
        names: those of :func:`.new_names.expert_names`.
    """
    parts = names.count(names[0])
    if parts == 1:
        return shape
    return (parts * shape[0], *shape[1:])
