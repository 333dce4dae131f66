"""DeepSpeed's ``torch_autocast`` section: what follows from it for gradients and for the loss.

Weights stay float32. The engine runs the forward pass under ``torch.autocast`` and marks the
parameters of modules that are safe in the lower precision; their gradients travel in it, all others
in their own dtype.
"""

from __future__ import annotations

from deepspeed.runtime.torch_autocast import PARAM_COMM_DTYPE_ATTR_NAME
from torch import nn

#: For float16, in the words of DeepSpeed's scaler, what ``torch.amp.GradScaler`` does. No section
#: has keys for it.
LOSS_SCALE = {
    "init_scale": 2.0**16,
    "scale_window": 2000,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
    "min_scale": 1.0,
}


def forget(param: nn.Parameter) -> None:
    """Remove the engine's mark: the next engine may have another section, or none."""
    param.__dict__.pop(PARAM_COMM_DTYPE_ATTR_NAME, None)
