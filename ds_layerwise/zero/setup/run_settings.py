"""The part of an engine's configuration that concerns its optimizer, in one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_layerwise.errors import ConfigError
from ds_layerwise.ranks.comm import comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The part of the engine's configuration that concerns this optimizer."""

    stage: int
    group: comm.Group
    """The process group over which gradients are averaged and ownership is dealt out."""
    expert_groups: Mapping[str, comm.Group]
    """The groups over which gradients of experts are averaged, by DeepSpeed's name for the
    experts.
    """
    model_group: comm.Group | None
    """The ranks that hold the parts of one model, where it is cut; None where each holds it
    whole.
    """
    mp_rank: int
    """The number of this rank's piece of the model, as in DeepSpeed's names of files."""
    tensor_group: comm.Group | None
    """The ranks that hold the parts of the same parameters, in the order of the parts; None where
    none is cut.
    """
    compute_dtype: torch.dtype
    """The dtype that the model computes in; in float16 the loss is scaled."""
    accumulation_dtype: torch.dtype | None
    """The dtype that micro-batches are added up in; None for each parameter's own dtype."""
    wire_dtype: torch.dtype | None
    """The dtype that gradients travel in; None for the dtype that they are accumulated in."""
    autocast: bool
    """True if ``torch_autocast`` is on, which decides for each parameter what its gradient travels
    in.
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
    host_ratio: float
    """The share of masters and states in host memory, from 0 to 1."""
    pin_memory: bool
    timers: Any
    """DeepSpeed's timers by name, or what stands in for them where nobody looks."""
    may_be_unused: bool
    """True if a step may be without a gradient of a parameter that requires one."""
    fetcher: Any = None
    """DeepSpeed's ``DeepSpeedZeRoOffload`` at ZeRO stage 3, which cuts parameters over the ranks,
    and makes them whole; else None.
    """
    without_effect: tuple[str, ...] = ()
    """Keys of the config that are accepted, but change nothing; the start-up table names them."""

    @property
    def tp_size(self) -> int:
        """The number of parts that tensor parallelism has cut the model into."""
        return 1 if self.tensor_group is None else comm.size_of(self.tensor_group)

    @property
    def tp_rank(self) -> int:
        """The number of the part that this rank holds."""
        return 0 if self.tensor_group is None else comm.rank_of(self.tensor_group)

    def ep_size(self, expert: str, group_name: str) -> int:
        """Return how many ranks in a row hold other experts under the name of ``expert``, of that
        group, than this rank.

        Raises:
            ConfigError: its ranks are in another order than that.
        """
        group = self.expert_groups[group_name]
        rank = comm.rank_of(self.group)
        ep_size = comm.size_of(self.group) // comm.size_of(group)
        if comm.rank_of(group) != rank // ep_size:
            raise ConfigError(
                f"{expert} is an expert of group {group_name}, in which rank {rank} is number "
                f"{comm.rank_of(group)} instead of {rank // ep_size}: every {ep_size} ranks in a "
                "row must hold all experts"
            )
        return ep_size
