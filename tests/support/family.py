"""A plain update by a rule of the Newton-Schulz family, for one matrix: no batches, ranks, shards or views."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.decay import decayed, given
from tests.support.reference import JORDAN, newton_schulz

SCALES = {"original": lambda r, c: math.sqrt(max(1, r / c)), "spectral": lambda r, c: math.sqrt(max(r, c)),
          "unit_rms_norm": lambda r, c: math.sqrt(r / c), "match_rms_adamw": lambda r, c: 0.2 * math.sqrt(max(r, c))}


@dataclass
class Plain:
    """A matrix ``value``, and ``step`` that updates it. ``settings`` are the recipe's settings that are not defaults,
    under the recipe's names."""

    rule: str
    value: Tensor
    lr: float
    momentum: float = 0.95
    weight_decay: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    coefficients: Any = JORDAN

    def __post_init__(self) -> None:
        self.value = self.value.detach().clone()
        self.m = torch.zeros_like(self.value)
        self.v: Any = 0.0

    def said(self, key: str, default: Any) -> Any:
        return self.settings.get(key, default)

    def step(self, grad: Tensor) -> None:
        """Take a step with ``grad``."""
        (rows, cols), mu = grad.shape, self.momentum
        decay = 1.0 if self.rule == "scion" and self.said("constrained", True) else self.weight_decay
        how = {"weight_decay": 0.0 if self.said("hyperball", None) else decay,
               "method": self.said("weight_decay_method", "decoupled")}
        grad = given(self.value, grad, **how)
        self.m = mu * self.m + (1 - mu) * grad
        d = (1 - mu) * grad + mu * self.m if self.said("nesterov", self.rule != "scion") else self.m
        o = newton_schulz((d.sign() if self.said("sign_momentum", False) else d)[None], self.rows())[0]
        u = self.update(o, d, grad) * self.scale(rows, cols)
        w = decayed(self.value, u, lr=self.lr, cautious=self.said("cautious_weight_decay", False), **how)
        self.value = self.hooked(w, u)

    def rows(self) -> Any:
        """Return the coefficients of every step of Newton-Schulz."""
        table = self.said("ns_coefficients", self.coefficients)
        return [table[i % len(table)] for i in range(self.said("ns_steps", len(self.coefficients)))]

    def update(self, o: Tensor, d: Tensor, grad: Tensor) -> Tensor:
        beta, eps = self.said("moment2_beta", 0.95), self.said("moment2_eps", 1e-8)
        if self.rule == "normuon":
            per = self.said("moment2_per", "row")
            by_row = per == "row" or per == "longer_side" and o.shape[0] >= o.shape[1]
            self.v = beta * self.v + (1 - beta) * (o * o).mean(1 if by_row else 0)
            u = (o.T / (self.v.sqrt() + eps)).T if by_row else o / (self.v.sqrt() + eps)
            return u * (o.norm() / u.norm())
        if self.rule == "adamuon":
            self.v = beta * self.v + (1 - beta) * o * o
            u = o / (self.v.sqrt() + eps)
            return u * math.sqrt(min(o.shape)) / u.norm() if self.said("moment2_rescale", True) else u
        if self.rule == "namo":
            self.v = beta * self.v + (1 - beta) * grad.norm() ** 2
            return o * d.norm() / (self.v.sqrt() + eps)
        if self.rule == "polargrad":
            return o * (o * d).sum()
        if self.rule == "rmnp":
            return d / d.norm(dim=1 if self.said("normalised_per", "row") == "row" else 0, keepdim=True)
        return o

    def scale(self, rows: int, cols: int) -> float:
        if self.rule == "scion":
            return self.said("spectral_radius", 1.0) * math.sqrt(rows / cols)
        extra: float = self.said("extra_scale_factor", 1.0)
        if self.rule == "polargrad":
            return extra
        default = "match_rms_adamw" if self.rule == "adamuon" else "original"
        return extra * SCALES[self.said("scale_mode", default)](rows, cols)

    def hooked(self, w: Tensor, u: Tensor) -> Tensor:
        if ball := self.said("hyperball", None):
            radius = w.norm() if ball == "own" else ball
            w = w - self.lr * radius * u / u.norm()
            return radius * w / w.norm()
        if self.said("relative_update", False):
            u = u * w.norm() / u.norm()
        new = w - self.lr * u
        if brake := self.said("radial_brake", None):
            change = new.norm() - w.norm()
            new = new / new.norm() * (w.norm() + brake[0 if change > 0 else 1] * change)
        if most := self.said("spectral_clip", None):
            left, values, right = torch.linalg.svd(new, full_matrices=False)
            new = left * values.clamp_max(most) @ right
        return new


def train(rule: str, start: Tensor, grads: list[Tensor], **kwargs: Any) -> Tensor:
    """Return ``start``, a matrix or a stack of them, after a step with each of ``grads``."""
    if start.dim() == 3:
        return torch.stack([train(rule, one, [grad[i] for grad in grads], **kwargs) for i, one in enumerate(start)])
    plain = Plain(rule, start, **kwargs)
    for grad in grads:
        plain.step(grad)
    return plain.value
