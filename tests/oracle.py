"""Muon, and the rules and hooks beside it, against NVIDIA's Emerging-Optimizers, in float32 and step by step.

    pip install '.[oracle]' && python -m tests.oracle

Emerging-Optimizers needs Python 3.12, and pip installs gigabytes beside it, so CI does not run this. Where it is not
installed, this ends with an error. The output is the table of docs/evidence.md.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_layerwise.optimizers.recipe import Hyper, Recipe
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.orthogonalize.newton_schulz import capped

try:
    from emerging_optimizers import orthogonalized_optimizers as theirs
except ImportError as missing:
    raise SystemExit(f"oracle.py: {missing}; pip install '.[oracle]' in an environment with Python 3.12") from missing

STEPS, LR, MOMENTUM, WEIGHT_DECAY = 10, 0.02, 0.9, 0.1
#: Bounds as shares of a matrix's movement in all steps. Emerging-Optimizers' adamuon divides small elements by
#: themselves, and their rounding errors with them: the rarest, 1 / 16,384 of the usual size, come out as large as any.
BOUND, BOUND_OF = 1e-5, {"adamuon": 5e-5}
SHAPES = [(64, 256), (256, 64), (128, 128)]
SETS = {"simple": 5, "quintic": 5, "polar_express": 8, "cans": 5, "deepseekv4": 10}
#: The name that Emerging-Optimizers has for ours, and the extra factor.
SCALES = {"original": ("shape_scaling", 1.0), "spectral": ("spectral", 1.0), "unit_rms_norm": ("unit_rms_norm", 1.0),
          "match_rms_adamw": ("spectral", 0.2)}
#: Settings of each side for a Newton-Schulz iteration in float32.
FULL, NS = {"ns_dtype": "fp32"}, {"fp32_matmul_prec": "highest"}


class Case(NamedTuple):
    """A rule with its settings, and its counterpart in Emerging-Optimizers."""

    name: str
    recipe: Recipe
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    weight_decay: float = WEIGHT_DECAY
    norm: float | None = None
    """The Frobenius norm of matrices at the start."""


def cases() -> Iterator[Case]:
    """Yield all cases."""
    decay = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}

    def ours(name: str, **settings: Any) -> Recipe:
        return REGISTRY[name](**{**FULL, **settings})

    for (table, steps), (scale, (mode, extra)), method in itertools.product(
            SETS.items(), SCALES.items(), ("standard", "gram")):
        settings: dict[str, Any] = {"coefficient_type": table, "num_ns_steps": steps, "scale_mode": mode,
                                    "extra_scale_factor": extra, "nesterov": True}
        yield Case(f"muon, {method}", ours("muon", ns_coefficients=table, ns_steps=steps, scale_mode=scale,
                                           ns_method=method),
                   lambda p, settings=settings: theirs.Muon(p, **decay, **NS, **settings))
    quintic: dict[str, Any] = {"ns_coefficients": "quintic", "nesterov": False}
    for name, settings in (("normuon", {"moment2_per": "longer_side", "scale_mode": "spectral"}),
                           ("adamuon", {"moment2_rescale": False, "scale_mode": "spectral"}),
                           ("namo", {"scale_mode": "spectral"})):
        for nesterov in (False, True):
            yield Case(f"{name}, {', '.join(f'{k} {v}' for k, v in settings.items())}",
                       ours(name, **{**quintic, **settings, "nesterov": nesterov}),
                       lambda p, name=name, nesterov=nesterov: theirs.AdaptiveMuon(
                           p, **decay, **NS, moment2_method=name, nesterov=nesterov))
    yield Case("scion", ours("scion", **quintic, spectral_radius=3.0),
               lambda p: theirs.Scion(p, lr=LR, momentum=MOMENTUM, spectral_radius=3.0, **NS), weight_decay=1.0)
    yield Case("polargrad", ours("polargrad", **quintic, extra_scale_factor=0.1),
               lambda p: theirs.PolarGrad(p, **decay, extra_scale_factor=0.1, **NS))
    still = {**decay, "weight_decay": 0.0}
    yield Case("muon, hyperball own", ours("muon", **quintic, hyperball="own"),
               lambda p: theirs.MuonHyperball(p, **still, **NS), weight_decay=0.0)
    yield Case("muon, hyperball 5.0", ours("muon", **quintic, hyperball=5.0),
               lambda p: theirs.MuonHyperball(p, **still, **NS, hyperball_radius=5.0), weight_decay=0.0, norm=5.0)


def error_of(case: Case) -> float:
    """Return the largest difference over all shapes, relative to the movement of the matrix."""
    rule, worst = case.recipe, 0.0
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(0)
        start = 0.02 * torch.randn(shape, generator=generator)
        start *= 1.0 if case.norm is None else case.norm / start.norm()
        ours, other = start.clone(), torch.nn.Parameter(start.clone())
        state, optimizer = rule.init_state(ours), case.make([other])
        for _ in range(STEPS):
            grad = torch.randn(shape, generator=generator)
            other.grad = grad.clone()
            rule.update_([ours], [grad], [state], Hyper(
                lr=LR, weight_decay=case.weight_decay, momentum=MOMENTUM, betas=(0.9, 0.95), eps=1e-8))
            optimizer.step()
        worst = max(worst, _relative(ours, other.detach(), start))
    return worst


def _relative(ours: Tensor, other: Tensor, start: Tensor) -> float:
    return float((ours - other).norm() / (other - start).norm())


def clip_error() -> float:
    """Return the error of matrices with clipped singular values, against ``spectral_hardcap``. That is exact where no
    singular value is small."""
    worst = 0.0
    with torch.no_grad():
        for shape in SHAPES[:2]:
            matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            worst = max(worst, _relative(capped(matrix[None], 12.0)[0], theirs.spectral_hardcap(matrix, 12.0), matrix))
    return worst


def main() -> None:
    found: dict[str, list[float]] = {}
    for case in cases():
        found.setdefault(case.name, []).append(error_of(case))
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    found["spectral_clip, once"] = [clip_error()]
    torch.set_float32_matmul_precision(previous)
    print(f"emerging-optimizers {version('emerging-optimizers')}, torch {torch.__version__}, {STEPS} steps, float32\n")
    print("| rule | combinations | largest difference, of the way that a matrix moved |\n|---|---|---|")
    for name, errors in found.items():
        print(f"| {name} | {len(errors)} | {max(errors):.1e} |")
    if worst := [name for name, errors in found.items()
                 if not max(errors) < BOUND_OF.get(name.partition(",")[0], BOUND)]:
        sys.exit(f"too far apart: {', '.join(worst)}")


if __name__ == "__main__":
    main()
