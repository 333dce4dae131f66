"""Scalar optimizers written out in float64, each step as its formula reads."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from ds_layerwise.optimizers.recipe import KEPT_BY
from tests.support.decay import decayed, given

#: The numbers that settings are tried at, by field. Switches and choices are tried at all of their values.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "ns_steps": (3, 8), "ns_coefficients": (((2.0, -1.5, 0.5),), ((4.0, -6.0, 2.5), (2.0, -1.5, 0.5))),
    "extra_scale_factor": (2.0,), "moment2_beta": (0.5,), "moment2_eps": (0.5,), "spectral_radius": (3.0,),
    "hyperball": (5.0, "own"), "radial_brake": ((0.5, 0.25),), "spectral_clip": (5.0,),
    "shampoo_beta": (0.5,), "precondition_frequency": (1, 3), "max_side": (20,), "max_update_rms": (0.05, None, 0.0),
    "power_iter_steps": (3,), "matrix_eps": (0.5,),
    "matrix_params": ({"momentum": 0.5, "nesterov": True},), "scalar_params": ({"momentum": 0.5, "dampening": 0.25},),
}


def values_of(recipe: Any, field: str) -> tuple[Any, ...]:
    """Return all that the ``field`` of a recipe is tried at."""
    kind = recipe.model_fields[field].annotation
    if get_origin(kind) is Literal:
        return get_args(kind)
    values = (False, True) if kind is bool else NUMBERS.get(field)
    assert values, f"write what {field!r} of {recipe.rule!r} is tried at into NUMBERS of tests/support/elementwise.py"
    return values


def tried(recipe: Any) -> list[dict[str, Any]]:
    """Return settings of a recipe, in which each field of its own has another value than its default."""
    shared = {"weight_decay_method", "cautious_weight_decay", "stochastic_rounding", *KEPT_BY.values()}
    settings = [{field: value} for field in recipe.keys() if field not in shared for value in values_of(recipe, field)]
    return [{}, *settings]


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


def train(rule: str, start: Tensor, grads: list[Tensor], hyper: Any, settings: Any) -> Tensor:
    """Return ``start`` after a step with each of ``grads``, in float64."""
    plain = Plain(rule, start, hyper, settings)
    for grad in grads:
        plain.step(grad)
    return plain.value
