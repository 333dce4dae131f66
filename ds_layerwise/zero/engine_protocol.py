"""The protocol of DeepSpeed's engine and its users with any ZeRO optimizer, apart from the path of
a gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from torch import nn

from ds_layerwise.optimizers.param_groups import cannot_load
from ds_layerwise.zero.loss_scaling import LossScaling
from ds_layerwise.zero.qk_clip.attention_logits import AttentionLogits


class EngineOptimizer(ZeROOptimizer):  # type: ignore[misc]
    """Loss scaling, the boundary protocol and the aliases that the engine, Accelerate and
    schedulers look for.

    Subclasses set ``optimizer``, the ``torch.optim.Optimizer`` with the user's parameter groups,
    and ``attention``.
    """

    optimizer: torch.optim.Optimizer
    attention: AttentionLogits
    bit16_groups: list[list[nn.Parameter]]
    custom_loss_scaler = False
    external_loss_scale = None
    torch_autocast_gradscaler = None
    _global_grad_norm: torch.Tensor | None = None
    _coalesce_grad_reduction = False

    def __init__(self, scaling: LossScaling) -> None:
        super().__init__()
        self.scaling = scaling

    # --- what users and schedulers look at

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups; the same objects for the whole run."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The states of what this rank owns, by parameter."""
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """True if the last step was skipped: a gradient was not finite, or their norm above a
        threshold.
        """
        return self.scaling.overflow

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale follows what overflows."""
        return self.scaling.is_dynamic

    @property
    def loss_scaler(self) -> Any:
        """DeepSpeed's scaler, which a checkpoint has in it."""
        return self.scaling.scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: Any) -> None:
        self.scaling.scaler = scaler

    @property
    def loss_scale(self) -> float:
        """The factor of the loss; 1 except in fp16."""
        return float(self.loss_scaler.loss_scale)

    @property
    def cur_scale(self) -> float:
        """The loss scale, under the name that the engine's monitor reads."""
        return self.loss_scale

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Refuse: the engine's ``load_checkpoint`` reads the files of all ranks that it needs.

        Raises:
            StepError: always.
        """
        raise cannot_load()

    def get_lr(self) -> float:
        """Return the learning rate of the first group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group; both optimizers follow in their ratio to it."""
        for group in self.param_groups:
            group["lr"] = lr

    # --- attention logits

    def note_attention_logits(self, attention: nn.Module | str, largest: Any) -> None:
        """Take note, in a forward pass, of the largest logits by head; see
        :meth:`.AttentionLogits.note`.
        """
        self.attention.note(attention, largest)

    @property
    def max_attention_logits(self) -> dict[str, float]:
        """The largest logits of the last step that was not skipped, over all ranks, by attention
        module.
        """
        return dict(self.attention.largest)

    # --- the engine's backward protocol

    only_asked = False
    """True if the backward pass that was entered last is one of torch.autograd.grad, which leaves
    no gradients.
    """

    def enter_backward(self) -> None:
        """Enter a backward pass, and note whether it is one that accumulates gradients."""
        super().enter_backward()
        # Autograd's name for it: a checkpoint may be recomputed in a pass that goes to all leaves.
        self.only_asked = not torch.autograd.Variable._execution_engine.is_checkpoint_valid()

    def exit_backward(self) -> None:
        """Leave a backward pass, and let the next one queue its own callback.

        The base class only does so in ``engine.forward``, so a second backward pass after one
        forward pass would never be finished.
        """
        super().exit_backward()
        state = self._backward_hook_state
        if state.backward_active_depth == 0:
            state.post_backward_callback_queued = False
            state.post_backward_callback_graph_task_id = None
            state.hooks_fired_this_backward = 0

    def clear_backward_seen_flag(self) -> None:
        """Start a forward pass; a backward pass that an exception ended is over."""
        super().clear_backward_seen_flag()
        if torch._C._current_graph_task_id() == -1:
            self._backward_hook_state.backward_active_depth = 0

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Do nothing. The engine calls it at stage 2, where the user says when a step is over;
        ``step`` does what there is to do.
        """

    def checkpoint_event_epilogue(self) -> None:
        """Do nothing: after a save or a load nothing is left to do."""

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Finish the reduction at ZeRO stage 2, after every backward pass, and after
        ``coalesce_grad_reduction``.
        """
        self.reduce_gradients()

    def setup_buckets(self) -> None:
        """Do nothing in the engine's flush after ``coalesce_grad_reduction``: the epilogue that
        follows does it all.
        """

    def get_gradient_for_reduction(self, param: nn.Parameter) -> Any:
        """Return the gradient that was left on ``param``, for the same flush."""
        return param.grad

    def reduce_ready_partitions_and_remove_grads(self, param: nn.Parameter, i: int = 0) -> None:
        """Do nothing in the same flush."""

    # --- ZeRO stage 3

    parameter_offload: Any = None
    """DeepSpeed's ``DeepSpeedZeRoOffload`` at ZeRO stage 3, under the name that its users reach
    for; else None.
    """

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """The groups of :attr:`bit16_groups`, under the name of ZeRO stage 3."""
        return self.bit16_groups

    def independent_gradient_partition_epilogue(self) -> None:
        """Finish the reduction, under the name of ZeRO stage 3."""
        self.reduce_gradients()

    def backward_epilogue(self, *args: Any, **kwargs: Any) -> None:
        """End a backward pass; parameters that it has left whole are released."""
        super().backward_epilogue(*args, **kwargs)
        if self.parameter_offload is not None:
            self.parameter_offload.release_backward_leftovers()
