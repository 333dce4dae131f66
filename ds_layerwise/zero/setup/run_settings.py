"""The settings of an engine's optimizer, as one frozen value: its config, and what only the engine
knows, such as the scale of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_layerwise.checkpoint.plain_values import check_kind
from ds_layerwise.config.run_config import RunConfig
from ds_layerwise.errors import ConfigError
from ds_layerwise.ranks.comm import comm

#: The loss scale of ``torch_autocast`` in float16, in the keys of DeepSpeed's scaler. The values
#: are those of ``torch.amp.GradScaler``; the config section has no keys for them.
AUTOCAST_SCALE = {
    "init_scale": 2.0**16,
    "scale_window": 2000,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
    "min_scale": 1.0,
}


class LossScaling:
    """DeepSpeed's scaler: dynamic or static for fp16, 1 for every other dtype."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        # The engine's own flag defaults to true for every dtype, and then a plain loss.backward()
        # is refused.
        self.is_dynamic: bool = scaler.dynamic
        self.overflow = False
        """True if the last step was skipped."""

    def check(self, scaler: Any) -> None:
        """Refuse a ``scaler`` of a checkpoint if an attribute of this one is missing or of another
        kind.

        Raises:
            Exception: of the kinds for which :func:`.safe_load.naming` adds the name of the file.
        """
        if scaler is None:
            return
        own = vars(self.scaler)
        saved = vars(scaler)
        if saved["dynamic"] == own["dynamic"]:
            check_kind(own, {key: saved[key] for key in own}, "loss_scaler")
            if not saved["cur_scale"] > 0:
                raise ValueError(f"loss_scaler.cur_scale is {saved['cur_scale']!r:.100}")

    def take_over(self, scaler: Any, *, is_half: bool) -> None:
        """Continue with the ``scaler`` of a checkpoint, if it applies to this run.

        Args:
            is_half: True if both runs have float16 weights. A scale that another dtype needed does
                not apply to this run.
        """
        if scaler is None or scaler.dynamic != self.scaler.dynamic:
            return
        if is_half or scaler.dynamic:
            self.scaler = scaler


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
    mp_rank: int
    """The number of this rank's piece of the model, as in DeepSpeed's file names."""
    tensor_group: comm.Group | None
    """The ranks that hold the tensor-parallel parts of the same parameters, in the order of the
    parts; None without tensor parallelism.
    """
    divide_by: float
    clip_grad: float
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
