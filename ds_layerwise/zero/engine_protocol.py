"""The interface that DeepSpeed's engine and its users expect of any ZeRO optimizer, except the path
of a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn

from ds_layerwise.zero.setup.loss_scaling import LossScaling
from ds_layerwise.zero.setup.param_groups import LayerWiseOptimizer, refuse_states


class EngineOptimizer(ZeROOptimizer):  # type: ignore[misc]
    """Loss scaling, the boundary protocol, and the aliases that the engine, Accelerate and
    schedulers use.

    Subclasses set ``optimizer``, which has the user's parameter groups, and ``scaling``.
    """

    optimizer: LayerWiseOptimizer
    """The rules and the user's groups, as schedulers see them."""
    scaling: LossScaling
    bit16_groups: list[list[nn.Parameter]]
    """The trained parameters of each group."""
    fp16_groups: list[list[nn.Parameter]]
    """The same, under the name of ZeRO stage 3."""
    custom_loss_scaler = False
    external_loss_scale = None
    torch_autocast_gradscaler = None
    _global_grad_norm: torch.Tensor | None = None
    _coalesce_grad_reduction = False

    def __init_subclass__(cls) -> None:
        """Keep compilers out of the public methods of this class and ``cls``: they use collectives,
        and update memory whose shape a graph would not know.
        """
        for kind in (EngineOptimizer, cls):
            for name, method in list(vars(kind).items()):
                if callable(method) and not name.startswith("_"):
                    method = torch.compiler.disable(method)  # type: ignore[no-untyped-call]
                    setattr(kind, name, method)

    # --- attributes for users and schedulers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups; the same objects for the whole run."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The states of the parameters that this rank owns, by parameter."""
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped: a gradient was not finite, or the norm exceeded a
        threshold.
        """
        return self.scaling.overflow

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale adapts to overflows."""
        # The engine's own flag defaults to true for every dtype, and then a plain loss.backward()
        # is refused.
        return bool(self.loss_scaler.dynamic)

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's loss scaler, which checkpoints contain."""
        return self.scaling.scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: Any) -> None:
        self.scaling.scaler = scaler

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; 1 except in float16."""
        return float(self.loss_scaler.loss_scale)

    #: The name that the engine's monitor reads.
    cur_scale = loss_scale

    #: Only the engine's ``load_checkpoint`` can read the files of all ranks that a load needs.
    load_state_dict = __reduce_ex__ = refuse_states

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group. The rates of both optimizers keep their ratio to
        it.
        """
        for group in self.param_groups:
            group["lr"] = lr

    # --- the engine's backward protocol

    only_asked = False
    """True if the last backward pass to be entered is a call of torch.autograd.grad, which leaves
    no gradients.
    """

    def enter_backward(self) -> None:
        """Enter a backward pass, and note whether it accumulates gradients."""
        # torch's types say that there always is a node. In compiled autograd there is none, nor an
        # end of the pass.
        current: Any = torch._C._current_autograd_node()
        if not current:
            return
        super().enter_backward()
        # Autograd's name for it: activation checkpoints are valid only in a pass that goes to all
        # leaves. It does not say so yet in the hook of a tensor for which it is asked.
        self.only_asked = not (
            torch.autograd.Variable._execution_engine.is_checkpoint_valid()
            and any(
                node and torch._C._will_engine_execute_node(node)
                for node, _ in current.next_functions
            )
        )

    def clear_backward_seen_flag(self) -> None:
        """Start a forward pass. A backward pass that an exception interrupted counts as over."""
        super().clear_backward_seen_flag()
        if torch._C._current_graph_task_id() == -1:
            self._backward_hook_state.backward_active_depth = 0

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Do nothing: the epilogue that follows does all the work. The engine calls this at the end
        of a step that the user marks, and after ``coalesce_grad_reduction``.
        """

    setup_buckets = finalize_gradient_accumulation_boundary

    def get_gradient_for_reduction(self, param: nn.Parameter) -> Any:
        """Return the gradient left on ``param`` after ``coalesce_grad_reduction``."""
        return param.grad

    def reduce_ready_partitions_and_remove_grads(self, param: nn.Parameter, i: int = 0) -> None:
        """Do nothing in the flush after ``coalesce_grad_reduction``."""

    # --- ZeRO stage 3

    parameter_offload: Any = None
    """DeepSpeed's ``DeepSpeedZeRoOffload`` at ZeRO stage 3, under the name that DeepSpeed's code
    uses; else None.
    """

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """End a backward pass, and release the parameters that it left whole."""
        super().backward_epilogue(*args, **kwargs)
        self._release_leftovers()

    def _release_leftovers(self) -> None:
        """Release the parameters that a backward pass has left whole, also one that an exception
        ended: nobody could gather them before the next forward pass.
        """
        if self.parameter_offload is not None:
            self.parameter_offload.release_backward_leftovers()
