"""The oracle: the training to compare with, written out for one process, without buffers, ranks or collectives.

It knows DeepSpeed's engine semantics and nothing of this package: a micro-batch's loss is divided by the number of
accumulation steps, gradients are summed over micro-batches in the accumulation dtype and averaged over ranks in
float32, clipped by their global norm, and only then enter Muon (matrices) or AdamW (everything else). A parameter
that got no gradient has a gradient of zeros, as in the engine's flat buffers, so its state and weight still decay.

Everything is float32 and in the plainest order. A comparison to the bit needs whole-number gradients
(:func:`whole_number_gradients`) and a power of two of ranks and micro-batches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

#: A matrix parameter's shape for Muon: (batch, rows, cols). Each of the batch is orthogonalised on its own. A matrix
#: with as many rows as each of a batch is cut into blocks of columns.
View = tuple[int, int, int]

#: Gradients of one micro-batch on one rank, by parameter name. A parameter that took no part is missing or None.
Gradients = Mapping[str, "Tensor | None"]

#: Five times the coefficients of https://kellerjordan.github.io/posts/muon/
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run, apart from the model and its data."""

    matrices: Mapping[str, View] = field(default_factory=dict)
    """Matrices that Muon trains, with their views; AdamW trains all others."""

    world_size: int = 1
    gas: int = 1
    """Micro-batches a step."""
    clip: float = 0.0
    """Greatest global norm of the averaged gradient; 0 clips nothing."""

    muon_lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: Sequence[tuple[float, float, float]] = JORDAN
    ns_dtype: torch.dtype = torch.float32
    adam_lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-10
    weight_decay: float = 0.0

    lr: Mapping[str, float] = field(default_factory=dict)
    """Learning rates by parameter name, instead of ``muon_lr`` or ``adam_lr``."""
    wd: Mapping[str, float] = field(default_factory=dict)
    """Weight decay by parameter name, instead of ``weight_decay``."""
    schedule: Callable[[int], float] = lambda step: 1.0
    """Factor of every learning rate; the argument counts engine steps from 0, skipped ones included."""

    param_dtype: torch.dtype = torch.float32
    """The dtype of forward and backward. Masters start from the weights rounded to it."""
    accum_dtype: torch.dtype = torch.float32
    """The dtype in which micro-batches are added up."""
    skip: bool = False
    """A step whose gradients are not all finite changes nothing."""
    loss_scale: LossScale | None = None
    """Dynamic loss scaling, which skips such steps, too, and changes the scale."""

    def lr_of(self, name: str, step: int) -> float:
        """Return the learning rate of a parameter in a step."""
        return self.lr.get(name, self.muon_lr if name in self.matrices else self.adam_lr) * self.schedule(step)

    def wd_of(self, name: str) -> float:
        """Return the weight decay of a parameter."""
        return self.wd.get(name, self.weight_decay)


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """DeepSpeed's dynamic loss scale: its start and the rules it follows."""

    initial: float = 2.0**16
    window: int = 1000
    """The scale doubles after this many steps in a row without overflow; the first after an overflow does not count."""
    hysteresis: int = 2
    """The scale halves from this overflow on; the earlier ones since it last doubled only skip their step."""
    smallest: float = 1.0

    def after(self, overflows: Sequence[bool]) -> float:
        """Return the scale after steps that did or didn't overflow, from the beginning of the run."""
        scale, patience, clean = self.initial, self.hysteresis, 0
        for overflow in overflows:
            if overflow:
                clean = 0
                if patience > 1:
                    patience -= 1
                else:
                    scale = max(scale / 2, self.smallest)
            else:
                clean += 1
                if clean > 1 and (clean - 1) % self.window == 0:
                    scale, patience = scale * 2, self.hysteresis
        return scale


@dataclass(frozen=True, kw_only=True)
class Step:
    """The facts of a step."""

    loss: float
    """Mean over ranks and micro-batches, not scaled; NaN when trained on gradients alone."""
    grads: dict[str, Tensor]
    """Averaged over ranks, before clipping, without the loss scale; float32. Empty if the step was skipped."""
    norm: float
    """The L2 norm of all of ``grads``; infinite if the step was skipped."""
    clip_factor: float
    """The divisor of the gradients; 1 or more."""
    loss_scale: float
    """The scale that this step's loss was multiplied with."""
    skipped: bool


class Reference:
    """Masters and states of a run, advanced one step at a time.

    Args:
        params: trainable, non-empty parameters by name. Copied.
    """

    def __init__(self, params: Mapping[str, Tensor], recipe: Recipe) -> None:
        unknown = (set(recipe.matrices) | set(recipe.lr) | set(recipe.wd)) - set(params)
        if unknown:
            raise ValueError(f"the recipe names parameters that are not trained: {sorted(unknown)}")
        self.recipe = recipe
        self.params = {n: p.detach().to(recipe.param_dtype).to(torch.float32, copy=True) for n, p in params.items()}
        self.state: dict[str, dict[str, Tensor]] = {}
        for name, p in self.params.items():
            keys = ["momentum_buffer"] if name in recipe.matrices else ["exp_avg", "exp_avg_sq"]
            self.state[name] = {key: torch.zeros_like(p) for key in keys}
        self.updates = 0
        """The number of steps that were not skipped, for bias correction."""
        self.overflows: list[bool] = []

    @property
    def loss_scale(self) -> float:
        """Return the factor of the next step's loss."""
        return self.recipe.loss_scale.after(self.overflows) if self.recipe.loss_scale else 1.0

    def model_params(self) -> dict[str, Tensor]:
        """Return the weights that forward and backward see."""
        return {n: p.to(self.recipe.param_dtype) for n, p in self.params.items()}

    def step(self, grads: Sequence[Sequence[Gradients]], loss: float = math.nan) -> Step:
        """Take an optimizer step.

        Args:
            grads: ``grads[rank][micro]``, of the scaled loss divided by ``gas``, as backward leaves them.
        """
        scale = self.loss_scale
        reduced = self._reduce(grads)
        overflow = not all(bool(g.isfinite().all()) for g in reduced.values())
        step_index = len(self.overflows)
        skipped = overflow and (self.recipe.skip or self.recipe.loss_scale is not None)
        self.overflows.append(skipped)
        if skipped:
            return Step(loss=loss, grads={}, norm=math.inf, clip_factor=1.0, loss_scale=scale, skipped=True)
        reduced = {n: g / scale for n, g in reduced.items()}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in reduced.values()))
        factor = max(1.0, (norm + 1e-6) / self.recipe.clip) if self.recipe.clip > 0 else 1.0
        self.updates += 1
        for name, grad in reduced.items():
            update = self._muon if name in self.recipe.matrices else self._adamw
            update(name, grad / factor, self.recipe.lr_of(name, step_index))
        return Step(loss=loss, grads=reduced, norm=norm, clip_factor=factor, loss_scale=scale, skipped=False)

    def _reduce(self, grads: Sequence[Sequence[Gradients]]) -> dict[str, Tensor]:
        """Return the mean over ranks of the sums over micro-batches."""
        reduced = {}
        for name, p in self.params.items():
            total = torch.zeros_like(p)
            for of_rank in grads:
                accumulated = torch.zeros_like(p, dtype=self.recipe.accum_dtype)
                for of_micro in of_rank:
                    grad = of_micro.get(name)
                    if grad is not None:
                        accumulated = accumulated + grad.to(self.recipe.param_dtype).to(self.recipe.accum_dtype)
                total = total + accumulated.float()
            reduced[name] = total / self.recipe.world_size
        return reduced

    def _muon(self, name: str, grad: Tensor, lr: float) -> None:
        p, m, mu = self.params[name], self.state[name]["momentum_buffer"], self.recipe.momentum
        m.lerp_(grad, 1 - mu)
        direction = grad.lerp(m, mu) if self.recipe.nesterov else m
        view = self.recipe.matrices[name]
        _, rows, cols = view
        by_columns = p.dim() == 2 and p.shape[0] == rows
        matrices = direction.reshape(rows, -1, cols).transpose(0, 1) if by_columns else direction.reshape(view)
        orthogonal = newton_schulz(matrices, self.recipe.ns_coefficients, self.recipe.ns_dtype)
        orthogonal = orthogonal.transpose(0, 1) if by_columns else orthogonal
        p.mul_(1 - lr * self.recipe.wd_of(name))
        p.sub_(lr * math.sqrt(max(1, rows / cols)) * orthogonal.reshape(p.shape))

    def _adamw(self, name: str, grad: Tensor, lr: float) -> None:
        p, state, (beta1, beta2) = self.params[name], self.state[name], self.recipe.betas
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * grad * grad)
        mean = state["exp_avg"] / (1 - beta1**self.updates)
        mean_of_squares = state["exp_avg_sq"] / (1 - beta2**self.updates)
        p.mul_(1 - lr * self.recipe.wd_of(name))
        p.sub_(lr * mean / (mean_of_squares.sqrt() + self.recipe.eps))


def newton_schulz(matrices: Tensor, coefficients: Sequence[tuple[float, float, float]] = JORDAN,
                  dtype: torch.dtype = torch.float32) -> Tensor:
    """Push the singular values of each of ``(batch, rows, cols)`` towards 1. A zero matrix stays zero."""
    results = []
    for matrix in matrices:
        wide = matrix.shape[0] <= matrix.shape[1]
        x = (matrix if wide else matrix.T).to(dtype if dtype == torch.float64 else torch.float32)
        x = (x / x.norm().clamp_min(torch.finfo(x.dtype).tiny)).to(dtype)
        for a, b, c in coefficients:
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        results.append((x if wide else x.T).to(matrix.dtype))
    return torch.stack(results)


def largest_singular_value(coefficients: Sequence[tuple[float, float, float]]) -> float:
    """Return the top of the curve that ``coefficients`` make of singular values up to 1. Rounding noise may reach it,
    too."""
    s = torch.logspace(-8, 0, 20000, dtype=torch.float64)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return float(s.max())


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    steps: list[Step]
    params: dict[str, Tensor]
    """Masters, float32."""
    model_params: dict[str, Tensor]
    """The weights that a rank's module holds."""
    state: dict[str, dict[str, Tensor]]
    """``momentum_buffer`` of matrices, ``exp_avg`` and ``exp_avg_sq`` of the others, shaped like the parameter."""
    updates: int
    loss_scale: float

    @property
    def losses(self) -> list[float]:
        """Return the losses of the steps, each a mean over ranks and micro-batches."""
        return [step.loss for step in self.steps]


def _finish(reference: Reference, steps: list[Step]) -> Run:
    return Run(steps=steps, params=reference.params, model_params=reference.model_params(), state=reference.state,
               updates=reference.updates, loss_scale=reference.loss_scale)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an engine trains: with a gradient and elements, each once, in model order."""
    return {n: p for n, p in module.named_parameters() if p.requires_grad and getattr(p, "ds_numel", p.numel()) > 0}


def train(make_module: Callable[[], nn.Module], batch: Callable[[int, int, int], Any],
          loss: Callable[[nn.Module, Any], Tensor], recipe: Recipe, num_steps: int) -> Run:
    """Train a module.

    Args:
        make_module: called once; the same initial weights as on every rank.
        batch: of (step, micro-batch, rank).
        loss: of a module, whose weights are in ``param_dtype``, and a batch.
    """
    module = make_module().to(recipe.param_dtype)
    reference = Reference(trainable(module), recipe)
    steps = []
    for step in range(num_steps):
        grads: list[list[Gradients]] = []
        losses = []
        for rank in range(recipe.world_size):
            grads.append([])
            for micro in range(recipe.gas):
                module.zero_grad(set_to_none=True)
                value = loss(module, batch(step, micro, rank))
                losses.append(float(value.detach()))
                (value.float() / recipe.gas * reference.loss_scale).backward()
                grads[rank].append({n: None if p.grad is None else p.grad.clone()
                                    for n, p in trainable(module).items()})
        steps.append(reference.step(grads, loss=sum(losses) / len(losses)))
        with torch.no_grad():
            for name, value in reference.model_params().items():
                module.get_parameter(name).copy_(value)
    return _finish(reference, steps)


def train_on_gradients(params: Mapping[str, Tensor], gradient: Callable[[str, torch.Size, int, int, int], Tensor],
                       recipe: Recipe, num_steps: int) -> Run:
    """Train parameters on gradients given as a function of (name, shape, step, micro-batch, rank).

    ``gradient`` belongs to a micro-batch's own loss, before the engine divides by the accumulation steps.
    """
    reference = Reference(params, recipe)
    steps = []
    for step in range(num_steps):
        factor = reference.loss_scale / recipe.gas
        steps.append(reference.step([
            [{n: gradient(n, p.shape, step, micro, rank) * factor for n, p in params.items()}
             for micro in range(recipe.gas)]
            for rank in range(recipe.world_size)
        ]))
    return _finish(reference, steps)


def whole_number_gradients(name: str, shape: Sequence[int], step: int, micro: int, rank: int) -> Tensor:
    """Return a gradient of small whole numbers, a different one for every argument.

    Whole numbers add up exactly in any order, so that no error in a reduction hides behind a tolerance. Numbers up to 8
    are exact in bfloat16, too.
    """
    seed = zlib.crc32(f"{name} {step} {micro} {rank}".encode())
    return torch.randint(-8, 9, tuple(shape), generator=torch.Generator().manual_seed(seed)).float()


def whole_number_loss(module: nn.Module, place: tuple[int, int, int], unused: Collection[str] = ()) -> Tensor:
    """Return a loss whose gradients are :func:`whole_number_gradients` of a (step, micro-batch, rank), except for
    ``unused``."""
    total: Any = 0.0
    for name in trainable(module):
        if name in unused:
            continue
        # ``get_parameter`` makes the parameter whole at ZeRO stage 3.
        p = module.get_parameter(name)
        total = total + (p * whole_number_gradients(name, p.shape, *place).to(p)).float().sum()
    return total
