"""The division of gradients by the number of micro-batches of a step. It happens once, where a
gradient reaches its parameter.

Note: why not where DeepSpeed divides
    If DeepSpeed does not start the backward pass itself, it divides in hooks on the tensors that
    the model returns. These tensors depend on one another (a loss on logits, logits on hidden
    states), so a gradient would be divided once at each tensor that it passes. A gradient that
    reaches a parameter on another path, such as that of a penalty on weights, would not be divided
    at all. Before DeepSpeed 0.19 this is so in every backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ds_layerwise.instance_patches import patch


def divide_once(engine: Any, params: Iterable[nn.Parameter]) -> dict[Node, Any]:
    """Divide gradients where they reach ``params``, in the cases in which ``engine`` would divide
    them on the way. ``engine`` no longer divides.

    Returns:
        The nodes of the graph at which gradients are divided, and the hooks on these nodes. Both
        last as long as something refers to the nodes.
    """
    engine_of = weakref.ref(engine)
    rule = type(engine)._backward_prologue_per_tensor
    patch(engine, _backward_prologue_per_tensor=lambda gradient: gradient)

    def divided(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        engine = engine_of()
        steps = 1 if engine is None else engine.gradient_accumulation_steps()
        # The result that DeepSpeed gives for 1 tells whether the loss of this pass is divided
        # already.
        if steps == 1 or rule(engine, 1.0) == 1:
            return None
        return tuple(gradient / steps for gradient in gradients)

    with torch.inference_mode(False), torch.enable_grad():
        nodes = [get_gradient_edge(param).node for param in params]
    return {node: node.register_prehook(divided) for node in nodes}
