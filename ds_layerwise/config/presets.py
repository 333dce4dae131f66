"""Published values of ``optimizer.params``, by name. A config's own values take precedence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: If an update has AdamW's size, the preset has no learning rate: the rate is then that of the run.
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2502.16982, section 2.2; betas and eps from the authors' published code,
    # MoonshotAI/Moonlight.
    "kimi": {
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": "simple",
        "ns_steps": 5,
        "scale_mode": "match_rms_adamw",
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
    },
    # https://kellerjordan.github.io/posts/muon/; betas and eps from KellerJordan/Muon.
    "keller_jordan": {
        "muon_lr": 0.02,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": "simple",
        "ns_steps": 5,
        "scale_mode": "original",
        "weight_decay": 0.0,
        "betas": (0.9, 0.95),
        "eps": 1e-10,
    },
    # The defaults of Muon in NVIDIA-NeMo/Emerging-Optimizers 0.5.0.
    "soap_muon_beyond": {
        "momentum": 0.9,
        "nesterov": False,
        "ns_coefficients": "polar_express",
        "ns_steps": 16,
        "scale_mode": "spectral",
        "extra_scale_factor": 0.2,
        "weight_decay": 0.1,
    },
}

#: The settings of the size of an update. If a config sets the first one, none of them comes from
#: the preset.
_SIZE = ("scale_mode", "extra_scale_factor", "muon_lr")

#: The hooks that replace the scale of a preset; see :class:`.update_hooks.UpdateHooks`.
_HOOKS = ("hyperball", "relative_update")


def started(preset: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of ``preset`` for a config whose own values are ``given``."""
    left_out = {*given}
    if "scale_mode" in given or any(map(given.get, _HOOKS)):
        left_out.update(_SIZE)
    return {key: value for key, value in PRESETS[preset].items() if key not in left_out}
