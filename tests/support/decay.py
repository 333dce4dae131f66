"""Weight decay written out, for numpy and torch alike: its effect on a gradient, and on the weights."""

from __future__ import annotations

from typing import Any


def given(w: Any, grad: Any, weight_decay: float, method: str) -> Any:
    """Return the gradient of weights ``w`` that a rule sees."""
    return grad + weight_decay * w if method == "l2" else grad


def decayed(w: Any, update: Any, *, lr: float, weight_decay: float, method: str, cautious: bool = False) -> Any:
    """Return the weights ``w`` before something with the signs of ``update`` is subtracted from them."""
    share = {"decoupled": lr, "independent": 1.0, "palm": lr**2, "l2": 0.0}[method] * weight_decay
    return w - share * w * ((update * w >= 0) if cautious else 1)
