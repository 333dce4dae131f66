"""The scale of the loss in float16: DeepSpeed's scaler, and what a checkpoint's may replace."""

from __future__ import annotations

from typing import Any

from ds_layerwise.checkpoint.plain_values import check_kind

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
