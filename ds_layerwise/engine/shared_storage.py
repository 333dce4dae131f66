"""Weights that are one by their memory alone, which would come apart when parameters move into
their buffer.

DeepSpeed casts and moves a model parameter by parameter, too, which takes them apart before
anything is routed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import deepspeed.comm as dist
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ds_layerwise.config.sections import is_for_us
from ds_layerwise.errors import RoutingError
from ds_layerwise.ranks.comm import comm


class _Held(NamedTuple):
    """A parameter or a buffer of a model, and the bytes from its first to its last element, gaps
    included.
    """

    name: str
    tensor: Tensor
    is_param: bool
    start: int
    stop: int


def refuse_shared_memory(model: nn.Module) -> None:
    """Refuse a parameter that requires a gradient, and an element of which belongs to another
    tensor of ``model``, too.

    Disjoint views of one piece of memory are fine, and so is one parameter that several modules
    have.

    Raises:
        RoutingError: names both, and the way out.
    """
    for one, other in _meeting(
        [
            *_held(model.named_parameters(), is_param=True),
            *_held(model.named_buffers(), is_param=False),
        ]
    ):
        trained, same = (
            (other, one) if other.is_param and other.tensor.requires_grad else (one, other)
        )
        if not trained.tensor.requires_grad or not _overlap(one.tensor, other.tensor):
            continue
        apart = (
            f"or give one of them memory of its own: {same.name}.data = {same.name}.data.clone()"
        )
        if not same.is_param:
            raise RoutingError(
                f"the buffer {same.name} lies in the memory of the parameter {trained.name}, which "
                "moves into memory of its own, so that the buffer would stay as it is now; take "
                f"it from the parameter where it is used, {apart}"
            )
        alike = (one.start, one.tensor.shape, one.tensor.stride()) == (
            other.start,
            other.tensor.shape,
            other.tensor.stride(),
        )
        way_out = (
            f"tie them as one parameter, {trained.name} = {same.name}"
            if alike
            else "make one parameter, of which forward() takes what each is"
        )
        raise RoutingError(
            f"{one.name} and {other.name} are two parameters in the same memory, as assigning to "
            ".data leaves them: each would move into memory of its own, and be trained apart; "
            f"{way_out}, {apart}"
        )


def _held(named: Iterable[tuple[str, Tensor]], *, is_param: bool) -> Iterator[_Held]:
    for name, tensor in named:
        # What has no memory yet, or whose memory is other tensors'.
        anything: object = tensor
        if (
            tensor.numel() == 0
            or tensor.device.type == "meta"
            or tensor.layout != torch.strided
            or is_traceable_wrapper_subclass(anything)
        ):
            continue
        reach = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = tensor.data_ptr()
        yield _Held(name, tensor, is_param, start, start + (reach + 1) * tensor.element_size())


def _meeting(held: Iterable[_Held]) -> Iterator[tuple[_Held, _Held]]:
    """The pairs of which one begins before the other ends, in the order of the model."""
    order = list(held)
    begun: list[int] = []
    found = []
    for i in sorted(range(len(order)), key=lambda i: (str(order[i].tensor.device), order[i].start)):
        each = order[i]
        begun = [
            j
            for j in begun
            if order[j].tensor.device == each.tensor.device and order[j].stop > each.start
        ]
        found += [(min(i, j), max(i, j)) for j in begun]
        begun.append(i)
    return ((order[i], order[j]) for i, j in sorted(found))


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of ``one`` is one of ``other``, whose reaches meet: columns may lie
    between columns.
    """
    if one.is_contiguous() and other.is_contiguous() or one.element_size() != other.element_size():
        return True
    first = min(one.data_ptr(), other.data_ptr())
    places = [(each, (each.data_ptr() - first) // each.element_size()) for each in (one, other)]
    size = max(
        place
        + 1
        + sum((n - 1) * stride for n, stride in zip(each.shape, each.stride(), strict=True))
        for each, place in places
    )
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")
    (a, at_a), (b, at_b) = places
    taken.as_strided(a.shape, a.stride(), at_a).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), at_b).any())


def _configure_distributed_model(
    original: Callable[[Any], Any], engine: DeepSpeedEngine, model: Any
) -> Any:
    if is_for_us(engine._config._param_dict):
        with comm.Alike(None) if dist.is_initialized() else nullcontext():
            refuse_shared_memory(model)
    return original(model)


#: By keys of :mod:`.engine.contract.contract`.
WRAPS: dict[str, Callable[..., Any]] = {
    "_configure_distributed_model": _configure_distributed_model
}
