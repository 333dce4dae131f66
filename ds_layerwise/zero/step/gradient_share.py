"""The division of gradients by the number of micro-batches of a step: once, where they reach their
parameters.

Note: why not where DeepSpeed divides
    A backward pass that it does not start itself is divided by hooks on the tensors that the model
    returns. These depend on one another, a loss on logits and logits on hidden states, so that a
    gradient would be divided once for each that it passes; and what reaches a parameter past all of
    them, such as a penalty on weights, not at all. In its releases before 0.19 that is so in every
    backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge


def divide_once(engine: Any, params: Iterable[nn.Parameter]) -> dict[Node, Any]:
    """Let gradients be divided where they reach ``params`` if ``engine`` would divide them on the
    way, and only there.

    Returns:
        The nodes of the graph where they do, and the hooks on these, which last as long as somebody
        keeps the nodes.
    """
    engine_of = weakref.ref(engine)
    rule = type(engine)._backward_prologue_per_tensor
    engine._backward_prologue_per_tensor = lambda gradient: gradient

    def divided(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        engine = engine_of()
        steps = 1 if engine is None else engine.gradient_accumulation_steps()
        # What DeepSpeed makes of a 1 tells whether the loss of this pass is divided already.
        if steps == 1 or rule(engine, 1.0) == 1:
            return None
        return tuple(gradient / steps for gradient in gradients)

    with torch.inference_mode(False), torch.enable_grad():
        nodes = [get_gradient_edge(param).node for param in params]
    return {node: node.register_prehook(divided) for node in nodes}
