"""The scale of the loss, and the overflow that may come of it."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler

from ds_layerwise.checkpoint.plain_values import check_kind
from ds_layerwise.zero.setup.run_settings import Settings

#: The scale of ``torch_autocast`` in float16, in the words of DeepSpeed's scaler: what
#: ``torch.amp.GradScaler`` does. The section has no keys for it.
AUTOCAST_SCALE = {
    "init_scale": 2.0**16,
    "scale_window": 2000,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
    "min_scale": 1.0,
}


class LossScaling:
    """DeepSpeed's scaler: dynamic or static for fp16, 1 for every other dtype."""

    def __init__(self, settings: Settings) -> None:
        self.scaler: Any = CreateLossScaler(
            dtype=settings.compute_dtype,
            static_loss_scale=settings.static_loss_scale,
            dynamic_scaling=settings.dynamic_loss_scale,
            dynamic_loss_args=settings.loss_scale_args,
        )
        # The engine's own flag is true for every dtype by default; with it, a plain loss.backward()
        # would be refused.
        self.is_dynamic: bool = self.scaler.dynamic
        self.overflow = False
        """True if the last step was skipped."""

    def check(self, scaler: Any) -> None:
        """Refuse a ``scaler`` of a checkpoint that lacks what this one has, or has something else
        in its place.

        Raises:
            Exception: of the kinds that :func:`.safe_load.naming` names a file for.
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
        """Go on with the ``scaler`` of a checkpoint, if it says something about this run.

        Args:
            is_half: whether both runs have float16 weights. A scale that another dtype needed says
                nothing about this one.
        """
        if scaler is None or scaler.dynamic != self.scaler.dynamic:
            return
        if is_half or scaler.dynamic:
            self.scaler = scaler
