"""The settings of an engine's optimizer, as one frozen value: its config, and what only the engine
knows, such as the scale of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.utils import groups

from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.ranks.comm import comm
from ds_layerwise.zero.setup.loss_scaling import LossScaling


@dataclass(frozen=True, kw_only=True)
class Settings(RunConfig):
    """The config of a run, and what only its engine knows.

    With sequence parallelism, ``wire_dtype`` is that of the key for it.
    """

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
    stage_group: comm.Group | None
    """The ranks with the other stages of a pipeline, in the order of stages; None without one."""
    mp_rank: int
    """The number of this rank's piece of the model, as in DeepSpeed's file names."""
    tensor_group: comm.Group | None
    """The ranks that hold the tensor-parallel parts of the same parameters, in the order of the
    parts; None without tensor parallelism.
    """
    divide_by: float
    check_overflow: bool
    compute_grad_norm: bool
    scaling: LossScaling
    pin_memory: bool
    timers: Any
    """DeepSpeed's timers by name, or a substitute without effect."""
    fetcher: Any = None
    """DeepSpeed's ``DeepSpeedZeRoOffload`` at ZeRO stage 3, which cuts parameters over the ranks
    and gathers them; else None.
    """

    @property
    def tp_size(self) -> int:
        """The number of tensor-parallel parts of the model."""
        return 1 if self.tensor_group is None else comm.size_of(self.tensor_group)

    @property
    def tp_rank(self) -> int:
        """The number of this rank's tensor-parallel part."""
        return 0 if self.tensor_group is None else comm.rank_of(self.tensor_group)

    @property
    def lanes(self) -> int:
        """The number of tensor-parallel ranks of a model among which experts are dealt out; 1 if
        each has all of those, or its parts.
        """
        if not self.expert_groups:
            return 1
        parts: int = groups._get_expert_model_parallel_world_size()
        return max(1, self.tp_size // parts)

    @property
    def expert_rank(self) -> int:
        """The number of this rank among those that experts are dealt out to."""
        return comm.rank_of(self.group) * self.lanes + self.tp_rank % self.lanes

    @property
    def reads_experts(self) -> bool:
        """True if the engine loads experts from files of their own, by names with the number of
        this rank's part of the model.
        """
        return bool(self.expert_groups) and self.lanes == 1 and self.stage < 3

    def ep_size(self, expert: str, group_name: str) -> int:
        """Return the number of consecutive ranks that hold different experts under the name
        ``expert``.

        Args:
            group_name: DeepSpeed's name of the group of these experts.

        Raises:
            ConfigError: the ranks of that group are others, or in another order.
        """
        ep_size: int = groups._get_expert_parallel_world_size(group_name)
        ours = comm.ranks_of(self.group)
        ranks = comm.ranks_of(self.expert_groups[group_name])
        if self.lanes > 1 and (ep_size % self.lanes or self.stage_group is not None):
            raise ConfigError(
                f"{expert} is an expert of group {group_name}, whole on each of {self.lanes} "
                "tensor-parallel ranks, which is supported without a pipeline, and with an "
                f"ep_size that is a multiple of {self.lanes}: DeepSpeed saves no others; make it "
                "one, or set enable_expert_tensor_parallelism of deepspeed.moe.layer.MoE"
            )
        apart = ep_size // self.lanes
        if ranks != ours[comm.rank_of(self.group) % apart :: apart]:
            raise ConfigError(
                f"{expert} is an expert of group {group_name}, of which ranks {ranks} have the "
                f"same, and other gradients are averaged over ranks {ours}: every {ep_size} "
                "consecutive ranks must hold all experts; use DeepSpeed's own groups (ep_size of "
                "deepspeed.moe.layer.MoE); after another engine, start a new process: DeepSpeed "
                "keeps its groups"
            )
        return ep_size
