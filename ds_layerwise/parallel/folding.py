"""AutoEP beside AutoTP, which DeepSpeed calls folding: tensor-parallel ranks have the same
tokens, and each sends its part of them to experts.

Note: gradients
    The layer gathers what experts return, and going back it adds up the gradients of all
    tensor-parallel ranks, which are the same. So gradients of experts are as many times too large
    as there are such ranks. So are those of a router, and of the rank's own tokens alone: their
    average over the ranks is the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_layerwise.routing.tensor_marks import is_expert_stack


def divide_experts(params: Iterable[nn.Parameter], by: int) -> list[RemovableHandle]:
    """Divide gradients where they reach those of ``params`` that are stacks of experts. Return the
    hooks.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def divided(gradient: Tensor) -> Tensor:
        return gradient / by

    hooks = []
    for param in params:
        if is_expert_stack(param):
            hooks.append(param.register_hook(divided))  # type: ignore[no-untyped-call]
    return hooks
