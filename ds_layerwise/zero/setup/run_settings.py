"""The part of an engine's configuration that concerns its optimizer, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_layerwise.config.fetching import Fetching
from ds_layerwise.errors import ConfigError
from ds_layerwise.ranks.comm import comm


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of the engine's configuration that concerns this optimizer."""

    stage: int
    group: comm.Group
    """The process group over which gradients are averaged and owners are chosen."""
    expert_groups: Mapping[str, comm.Group]
    """The groups over which gradients of experts are averaged, by DeepSpeed's name of the
    experts.
    """
    model_group: comm.Group | None
    """The ranks that hold the parts of one model, if the model is cut; None if each rank holds it
    whole.
    """
    mp_rank: int
    """The number of this rank's piece of the model, as in DeepSpeed's file names."""
    tensor_group: comm.Group | None
    """The ranks that hold the tensor-parallel parts of the same parameters, in the order of the
    parts; None without tensor parallelism.
    """
    compute_dtype: torch.dtype
    """The dtype that the model computes in. In float16 the loss is scaled."""
    accumulation_dtype: torch.dtype | None
    """The dtype in which micro-batches are added up; None for each parameter's own dtype."""
    wire_dtype: torch.dtype | None
    """The dtype in which gradients are sent; None for the dtype in which they are accumulated."""
    autocast: bool
    """True if ``torch_autocast`` is on. It chooses for each parameter the dtype in which its
    gradient is sent.
    """
    divide_by: float
    bucket_numel: int
    overlap_comm: bool
    clip_grad: float
    check_overflow: bool
    compute_grad_norm: bool
    dynamic_loss_scale: bool
    static_loss_scale: float
    loss_scale_args: dict[str, Any] | None
    params_on_host: bool
    """True if the cuts of ZeRO stage 3 live in host memory."""
    fetching: Fetching | None
    """The limits of what is whole at a time at ZeRO stage 3; None at other stages."""
    host_ratio: float
    """The share of masters and states in host memory, from 0 to 1."""
    pin_memory: bool
    timers: Any
    """DeepSpeed's timers by name, or a substitute without effect."""
    may_be_unused: bool
    """True if a parameter that requires a gradient may be without one in a step."""
    fetcher: Any = None
    """DeepSpeed's ``DeepSpeedZeRoOffload`` at ZeRO stage 3, which cuts parameters over the ranks
    and gathers them; else None.
    """
    without_effect: tuple[str, ...] = ()
    """The keys of the config that are accepted but change nothing. The start-up table names
    them.
    """

    @property
    def tp_size(self) -> int:
        """The number of tensor-parallel parts of the model."""
        return 1 if self.tensor_group is None else comm.size_of(self.tensor_group)

    @property
    def tp_rank(self) -> int:
        """The number of this rank's tensor-parallel part."""
        return 0 if self.tensor_group is None else comm.rank_of(self.tensor_group)

    def ep_size(self, expert: str, group_name: str) -> int:
        """Return the number of consecutive ranks that hold different experts under the name
        ``expert``.

        Args:
            group_name: DeepSpeed's name of the group of these experts.

        Raises:
            ConfigError: the ranks of that group are in another order.
        """
        group = self.expert_groups[group_name]
        rank = comm.rank_of(self.group)
        ep_size = comm.size_of(self.group) // comm.size_of(group)
        if comm.rank_of(group) != rank // ep_size:
            raise ConfigError(
                f"{expert} is an expert of group {group_name}, in which rank {rank} is number "
                f"{comm.rank_of(group)} instead of {rank // ep_size}: every {ep_size} "
                "consecutive ranks must hold all experts; use DeepSpeed's own groups (ep_size of "
                "deepspeed.moe.layer.MoE)"
            )
        return ep_size
