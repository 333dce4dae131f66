"""The refusal of weights that share memory without being the same parameter. They would be
separated when parameters move into their buffer.

DeepSpeed casts and moves a model parameter by parameter, which also separates them, before routing
starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_layerwise.errors import RoutingError


class _Place(NamedTuple):
    """A parameter or a buffer of a model, and the bytes from its first to its last element, with
    gaps.
    """

    name: str
    tensor: Tensor
    is_param: bool
    start: int
    stop: int


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a parameter that requires a gradient if one of its elements also belongs to another
    tensor of ``model``.

    Disjoint views of one piece of memory are accepted, and so is one parameter in several modules.

    Raises:
        RoutingError: names both tensors and the way out.
    """
    places = [
        *_places(model.named_parameters(), is_param=True),
        *_places(model.named_buffers(), is_param=False),
    ]
    for first, second in _meeting(places):
        trained = first
        same = second
        if second.is_param and second.tensor.requires_grad:
            trained = second
            same = first
        if not trained.tensor.requires_grad or not _overlap(first.tensor, second.tensor):
            continue
        apart = (
            f"or give one of them memory of its own: {same.name}.data = {same.name}.data.clone()"
        )
        if not same.is_param:
            raise RoutingError(
                f"the buffer {same.name} shares memory with the parameter {trained.name}, which "
                "moves, so the buffer would keep its present values; compute it from the parameter "
                f"in forward(), {apart}"
            )
        way_out = "make one parameter, and take both as views of it in forward()"
        if (first.start, _axes(first.tensor)) == (second.start, _axes(second.tensor)):
            way_out = f"tie them as one parameter, {trained.name} = {same.name}"
        raise RoutingError(
            f"{first.name} and {second.name} are different parameters that share memory, as after "
            "an assignment to .data: they would be separated and trained separately; "
            f"{way_out}, {apart}"
        )


def _axes(tensor: Tensor) -> list[tuple[int, int]]:
    """Return the size and the stride of each axis."""
    return list(zip(tensor.shape, tensor.stride(), strict=True))


def _reach(tensor: Tensor) -> int:
    """Return the number of elements from the first to the last, with gaps."""
    return 1 + sum((size - 1) * stride for size, stride in _axes(tensor))


def _places(named: Iterable[tuple[str, Tensor]], *, is_param: bool) -> Iterator[_Place]:
    for name, tensor in named:
        # Skip tensors that have no memory yet, or use the memory of other tensors.
        anything: object = tensor
        has_memory = tensor.numel() > 0 and tensor.device.type != "meta"
        is_plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(anything)
        if has_memory and is_plain:
            start = tensor.data_ptr()
            stop = start + _reach(tensor) * tensor.element_size()
            yield _Place(name, tensor, is_param, start, stop)


def _meeting(places: Sequence[_Place]) -> list[tuple[_Place, _Place]]:
    """Return the pairs whose ranges overlap, in the order of ``places``."""
    order = sorted(enumerate(places), key=lambda pair: (str(pair[1].tensor.device), pair[1].start))
    pairs = []
    for position, (i, first) in enumerate(order):
        for j, second in order[position + 1 :]:
            if second.start >= first.stop or second.tensor.device != first.tensor.device:
                break
            pairs.append((min(i, j), max(i, j)))
    return [(places[i], places[j]) for i, j in sorted(pairs)]


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Tell whether an element of ``first`` is also one of ``second``. Their ranges overlap, but
    columns may lie between columns.
    """
    if first.is_contiguous() and second.is_contiguous():
        return True
    if first.element_size() != second.element_size():
        return True
    begin = min(first.data_ptr(), second.data_ptr())
    starts = []
    for tensor in (first, second):
        starts.append((tensor.data_ptr() - begin) // tensor.element_size())
    size = max(starts[0] + _reach(first), starts[1] + _reach(second))
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    taken.as_strided(first.shape, first.stride(), starts[0]).fill_(True)
    return bool(taken.as_strided(second.shape, second.stride(), starts[1]).any())


@contextmanager
def viewable_as_bytes(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make ``params`` contiguous permanently, and 0-d ones 1-D while this context is open."""
    scalars = []
    for param in params:
        if not param.dim():
            scalars.append(param)
            param.data = param.data.view(1)
        elif not param.data.is_contiguous() or param.data.stride(-1) != 1:
            # A single column that was a row is contiguous, but has the stride of the row.
            param.data = param.data.contiguous().view(-1).view(param.shape)
    try:
        yield
    finally:
        for param in scalars:
            if param.numel():
                # Else ZeRO stage 3 has cut it in between.
                param.data = param.data.view(())
