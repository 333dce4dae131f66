"""A model with tensor-parallel layers as Megatron writes them, the same model whole, and an ``mpu``."""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: (name, rows, columns, the axis that is cut or None) of every matrix: all shapes, and both cuts of each.
LAYERS = [("square_rows", 12, 12, 0), ("square_cols", 12, 12, 1), ("tall_rows", 40, 12, 0), ("flat_cols", 12, 40, 1),
          ("flat_rows", 24, 12, 0), ("tall_cols", 12, 24, 1), ("narrow_rows", 4, 12, 0), ("narrow_cols", 12, 4, 1),
          ("copied", 12, 12, None)]

#: A test with universal checkpoints of tensor-parallel parts needs it.
UNIVERSAL_PARTS = ("deepspeed>=0.19.6", "its engine reads a universal checkpoint with one number of parts alone")

MATRICES = {f"{name}.weight": (1, rows, cols) for name, rows, cols, _ in LAYERS}


class Mpu:
    """Tensor-parallel ranks next to each other, as Megatron lays them out."""

    def __init__(self, tp_size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        for first in range(0, world, tp_size):
            group = dist.new_group(list(range(first, first + tp_size)))
            self._tp = group if first <= rank < first + tp_size else getattr(self, "_tp", None)
        for index in range(tp_size):
            group = dist.new_group(list(range(index, world, tp_size)))
            self._dp = group if rank % tp_size == index else getattr(self, "_dp", None)

    def __deepcopy__(self, _: Any) -> Mpu:
        """Return itself: copies of a layer have its groups."""
        return self

    def get_model_parallel_group(self) -> Any:
        return self._tp

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tp)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tp)

    def get_data_parallel_group(self) -> Any:
        return self._dp

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._dp)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._dp)


class _CopyToParts(torch.autograd.Function):
    """Megatron's f: the same forward, the sum over parts backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOfParts(torch.autograd.Function):
    """Megatron's g: the sum over parts forward, the same backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def part(whole: Tensor, dim: int, mpu: Mpu | None) -> Tensor:
    """Return this rank's part of ``whole``."""
    if mpu is None:
        return whole
    return whole.chunk(mpu.get_model_parallel_world_size(), dim)[mpu.get_model_parallel_rank()].contiguous()


def mark(param: nn.Parameter, dim: int, **more: int) -> None:
    """Mark a part, as Megatron does, with the axis that it is cut along."""
    for key, value in {"tensor_model_parallel": True, "partition_dim": dim, **more}.items():
        setattr(param, key, value)


class Linear(nn.Module):
    """A linear layer, whole without an ``mpu``. With one it is cut along its rows (with its bias) or columns, and
    marked."""

    def __init__(self, rows: int, cols: int, dim: int | None, mpu: Mpu | None) -> None:
        super().__init__()
        whole = nn.Linear(cols, rows)
        if mpu is None or dim is None:
            self.weight, self.bias = whole.weight, whole.bias
            return
        self.weight = nn.Parameter(part(whole.weight.data, dim, mpu))
        self.bias = nn.Parameter(part(whole.bias.data, 0, mpu) if dim == 0 else whole.bias.data)
        for param in (self.weight, self.bias)[:2 if dim == 0 else 1]:
            mark(param, dim, partition_stride=1)


class VocabParallelEmbedding(nn.Module):
    """An embedding that is cut along the vocabulary."""

    def __init__(self, rows: int, cols: int, mpu: Mpu | None) -> None:
        super().__init__()
        whole = nn.Embedding(rows, cols).weight.data
        self.weight = nn.Parameter(part(whole, 0, mpu))
        self.first = 0 if mpu is None else mpu.get_model_parallel_rank() * self.weight.shape[0]
        if mpu is not None:
            mark(self.weight, 0)


def enter(x: Tensor, mpu: Mpu | None) -> Tensor:
    """Return ``x``, whose gradient is the sum of those of all parts."""
    return x if mpu is None else _CopyToParts.apply(x, mpu.get_model_parallel_group())


def leave(x: Tensor, mpu: Mpu | None) -> Tensor:
    """Return the sum of ``x`` over all parts."""
    return x if mpu is None else _SumOfParts.apply(x, mpu.get_model_parallel_group())


class Net(nn.Module):
    """Pairs of a layer cut along its rows and one cut along its columns, between copies of an activation."""

    copied: Linear

    def __init__(self, mpu: Mpu | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = VocabParallelEmbedding(16, 12, mpu)
        self.norm = nn.LayerNorm(12)
        for name, rows, cols, dim in LAYERS:
            setattr(self, name, Linear(rows, cols, dim, mpu))
        self.mpu = mpu

    def _pair(self, x, first, second):
        inner = torch.tanh(F.linear(enter(x, self.mpu), first.weight, first.bias))
        return x + leave(F.linear(inner, second.weight), self.mpu) + second.bias

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.embed.first
        inside = (local >= 0) & (local < self.embed.weight.shape[0])
        rows = F.embedding(local.clamp(0, self.embed.weight.shape[0] - 1), self.embed.weight)
        x = leave(rows * inside.unsqueeze(-1), self.mpu)
        for name in ("square", "tall", "flat", "narrow"):
            first = getattr(self, f"{name}_rows")
            second = self.flat_cols if name == "tall" else self.tall_cols if name == "flat" else \
                getattr(self, f"{name}_cols")
            x = self._pair(self.norm(x), first, second)
        return F.linear(x, self.copied.weight, self.copied.bias).square().mean()


def batch(step: int, micro: int, rank: int) -> Tensor:
    """Return tokens for a data-parallel rank. Its tensor-parallel ranks get the same."""
    seed = 1 + rank + 100 * micro + 10_000 * step
    return torch.randint(0, 16, (3, 5), generator=torch.Generator().manual_seed(seed))


def dim_of(name: str) -> int | None:
    """Return the axis along which a parameter of :class:`Net` is cut."""
    layer, _, kind = name.partition(".")
    if layer == "embed":
        return 0
    dim = {name_of_layer: dim for name_of_layer, _, _, dim in LAYERS}.get(layer)
    return None if kind == "bias" and dim == 1 else dim
