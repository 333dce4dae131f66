"""A layer of experts that AutoEP spreads over ranks, and the parts of it that ranks have."""

from __future__ import annotations

from typing import Any

import deepspeed.comm as dist
import torch
from torch import nn

WIDTH, HIDDEN, NUM_EXPERTS, TOP = 8, 12, 4, 2


class Stacks(nn.Module):
    """All experts of a layer, as three stacks."""

    def __init__(self):
        super().__init__()
        for name, rows, cols in (("w1", HIDDEN, WIDTH), ("w2", WIDTH, HIDDEN), ("w3", HIDDEN, WIDTH)):
            setattr(self, name, nn.Parameter(torch.empty(NUM_EXPERTS, rows, cols)))


class Routed(nn.Module):
    """A layer that AutoEP replaces: each token goes through its best experts."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, NUM_EXPERTS, bias=False), Stacks()

    def forward(self, x):
        tokens = x.flatten(0, 1)
        best, chosen = self.router(tokens).softmax(-1).topk(TOP, -1)
        best = best / best.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        w: Any = self.experts
        for expert in range(NUM_EXPERTS):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = nn.functional.silu(tokens[rows] @ w.w1[expert].T) * (tokens[rows] @ w.w3[expert].T)
            out = out.index_add(0, rows, hidden @ w.w2[expert].T * best[rows, place, None])
        return out.view_as(x)


def section(ep_size, **changes):
    """The section of a config for layers that are :class:`Routed`."""
    return {"enabled": True, "autoep_size": ep_size, "moe_layer_pattern": r".*layers\.\d+\.mlp", "top_k": TOP,
            "router_pattern": "router", "expert_pattern": "experts", "expert_w1": "w1", "expert_w2": "w2",
            "expert_w3": "w3", "use_grouped_mm": False, **changes}


def shape_of(param):
    """The shape on a rank, also while ZeRO stage 3 has cut the parameter."""
    return tuple(getattr(param, "ds_shape", param.shape))


def whole_shape(param):
    """The shape over all ranks."""
    shape = shape_of(param)
    return (NUM_EXPERTS, *shape[1:]) if len(shape) == 3 else shape


def own_part(param, whole):
    """This rank's part of a value of a whole parameter: the experts of ranks in a row follow each other."""
    if len(shape_of(param)) < 3:
        return whole
    count = shape_of(param)[0]
    first = dist.get_rank() % (NUM_EXPERTS // count) * count
    return whole[first:first + count]
