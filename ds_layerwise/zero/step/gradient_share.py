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
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_layerwise.instance_patches import patch


def divide_once(engine: Any, params: Iterable[nn.Parameter]) -> list[RemovableHandle]:
    """Divide gradients where they reach ``params``, in the cases in which ``engine`` would divide
    them on the way. ``engine`` no longer divides, unless it is a pipeline's: there the gradient
    that the last stage sends on must be divided already, and every gradient passes one output.

    Returns:
        The hooks on ``params``. The node of autograd's graph at which gradients arrive has none: a
        parameter gets a new one when its data changes the dtype or the device.
    """
    if isinstance(engine, PipelineEngine):
        return []
    engine_of = weakref.ref(engine)
    rule = type(engine)._backward_prologue_per_tensor
    patch(engine, _backward_prologue_per_tensor=lambda gradient: gradient)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def divided(gradient: Tensor) -> Tensor | None:
        engine = engine_of()
        steps = engine.gradient_accumulation_steps() if engine else 1
        # The result that DeepSpeed gives for 1 tells whether the loss of this pass is divided
        # already.
        if steps == 1 or rule(engine, 1.0) == 1 or _is_asked_for():
            return None
        return gradient / steps

    hooks = []
    for param in params:
        earlier = list(param._backward_hooks or ())
        hooks.append(param.register_hook(divided))  # type: ignore[no-untyped-call]
        # Hooks of a script come after it, as they come after DeepSpeed's division. Autograd reads
        # the order in which keys came, which move_to_end() leaves as it is.
        order: Any = param._backward_hooks
        for key in earlier:
            order[key] = order.pop(key)
    return hooks


def _is_asked_for() -> bool:
    """Tell whether the current backward pass is a call of torch.autograd.grad for the parameter in
    whose hook this is called.
    """
    # The parameter itself may have a new node since the forward pass.
    node = torch._C._current_autograd_node()
    try:
        return not torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # The only way of torch to say so.
        return True
