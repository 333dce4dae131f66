"""Scalar optimizers and Adafactor written out in float64, each step as its formula reads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.support.decay import decayed, given


class Plain:
    """A parameter ``value`` under ``rule``, with the numbers that the rule keeps between steps.

    ``hyper`` has ``lr, weight_decay, momentum, betas, eps``. ``settings`` are the recipe's settings that are not
    defaults, under the recipe's names.
    """

    def __init__(self, rule: str, value: Tensor, hyper: Any, settings: Any) -> None:
        self.rule, self.value, self.h, self.s = rule, value.double(), hyper, settings
        self.method = settings.get("weight_decay_method", "l2" if rule in ("adam", "sgd") else "decoupled")
        self.t = 0
        self.kept: dict[str, Any] = {}

    def step(self, grad: Tensor) -> None:
        """Take a step."""
        self.t += 1
        g = given(self.value, grad.double(), self.h.weight_decay, self.method)
        formula = getattr(self, self.rule, None)
        assert formula, f"write the formula of {self.rule!r} into Plain of tests/support/elementwise.py"
        move = formula(g)
        self.value = decayed(self.value, move, lr=self.h.lr, weight_decay=self.h.weight_decay, method=self.method,
                             cautious=self.s.get("cautious_weight_decay", False)) - move

    def average(self, name, value, beta):
        self.kept[name] = beta * self.kept.get(name, torch.zeros_like(value)) + (1 - beta) * value
        return self.kept[name]

    def adamw(self, g):
        (b1, b2), t = self.h.betas, self.t
        m, v = self.average("m", g, b1) / (1 - b1**t), self.average("v", g * g, b2) / (1 - b2**t)
        return self.h.lr * m / (v.sqrt() + self.h.eps)

    adam = adamw

    def lion(self, g):
        b1, b2 = self.h.betas
        u = (b1 * self.kept.get("m", torch.zeros_like(g)) + (1 - b1) * g).sign()
        self.average("m", g, b2)
        return self.h.lr * u

    def sgd(self, g):
        self.kept["m"] = self.h.momentum * self.kept.get("m", 0.0) + g
        return self.h.lr * self.kept["m"]

    def signum(self, g):
        mu, t, corrects = self.h.momentum, self.t, self.s.get("correct_bias", True)
        u = m = self.average("m", g, mu)
        if self.s.get("nesterov"):
            u = mu * m / (1 - mu**(t + 1) if corrects else 1) + (1 - mu) * g / (1 - mu**t if corrects else 1)
        return self.h.lr * u.sign()

    def laprop(self, g):
        (b1, b2), corrects = self.h.betas, self.s.get("correct_bias", True)
        c1, c2 = (1 - b**self.t if corrects else 1 for b in (b1, b2))
        v = self.average("v", g * g, b2) / c2
        return self.h.lr * self.average("m", g / (v.sqrt() + self.h.eps), b1) / c1

    def ademamix(self, g):
        (b1, b2), t = self.h.betas, self.t
        alpha, b3 = self.s.get("alpha", 5.0), self.s.get("beta3", 0.9999)
        if steps := self.s.get("alpha_warmup_steps"):
            alpha = min(t * alpha / steps, alpha)
        if steps := self.s.get("beta3_warmup_steps"):
            ln1, ln3 = math.log(b1), math.log(b3)
            b3 = b3 if t >= steps else min(math.exp(ln1 * ln3 / ((1 - t / steps) * ln3 + t / steps * ln1)), b3)
        m = self.average("m", g, b1) / (1 - b1**t) + alpha * self.average("slow", g, b3)
        v = self.average("v", g * g, b2) / (1 - b2**t)
        return self.h.lr * m / (v.sqrt() + self.h.eps)

    def adafactor(self, g):
        keep, eps1 = 1 - self.t**self.s.get("beta2_decay", -0.8), self.s.get("eps1", 2.0**-23)
        r, c = self.average("r", (g * g).mean(1, True), keep), self.average("c", (g * g).mean(0, True), keep)
        u = g / (r @ c / max(float(r.mean()), eps1)).sqrt().clamp(min=eps1)
        u = u / max(1.0, float(u.square().mean().sqrt()) / self.s.get("clip_threshold", 1.0))
        size = max(self.s.get("eps2", 1e-3), float(self.value.square().mean().sqrt()))
        return min(self.h.lr, self.t**-0.5) * size * u


def train(rule: str, start: Tensor, grads: list[Tensor], hyper: Any, settings: Any) -> Tensor:
    """Return ``start`` after a step with each of ``grads``, in float64."""
    plain = Plain(rule, start, hyper, settings)
    for grad in grads:
        plain.step(grad)
    return plain.value
