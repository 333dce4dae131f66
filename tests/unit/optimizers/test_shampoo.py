"""Shampoo against the formulas written out in float64, and against another package."""

import pytest
import torch
from pytorch_optimizer import Shampoo

from ds_layerwise.optimizers.recipe import Hyper
from ds_layerwise.optimizers.rules.shampoo import Shampoo as Recipe
from tests.support import preconditioned
from tests.support.rooms import rooms

pytestmark = rooms("shampoo", "kronecker")

HYPER = Hyper(lr=0.01, weight_decay=0.1, momentum=0, betas=(0.9, 0.95), eps=1e-8)


def drawn(shape, steps, dtype, seed=1):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for _ in range(steps)]


def trained(settings, shape, dtype, hyper, beside, scale=1.0):
    """The distance of a parameter from what ``beside`` gives for each gradient, over how far it has moved."""
    rule = Recipe(**settings)
    first, *grads = drawn(shape, 21, dtype)
    param, step = first.clone(), beside(rule, first, hyper)
    state = {key: value.to(dtype) for key, value in rule.init_state(param).items()}
    for grad in grads:
        rule.update_([param], [grad * scale], [state], hyper)
        expected = preconditioned.float64(step(grad * scale))
    moved = torch.from_numpy(expected) - first.double()
    return float((param.double() - torch.from_numpy(expected)).norm() / moved.norm())


def written_out(recipe, first, hyper):
    sides = "".join(recipe.sides(tuple(first.shape)))
    oracle = preconditioned.Shampoo(
        first, lr=hyper.lr, weight_decay=hyper.weight_decay, betas=hyper.betas, eps=hyper.eps, sides=sides,
        shampoo_beta=recipe.shampoo_beta, every=recipe.precondition_frequency, grafting=recipe.grafting == "adam",
        summed=recipe.statistics == "sum", matrix_eps=recipe.matrix_eps, limit=recipe.max_update_rms or 0,
        correct=recipe.correct_bias)
    return lambda grad: (oracle.step(grad), oracle.w)[1]


def by_another_package(recipe, first, hyper):
    theirs = torch.nn.Parameter(first.clone())
    optimizer = Shampoo([theirs], lr=hyper.lr, matrix_eps=1e-12)

    def step(grad):
        theirs.grad = grad.clone()
        optimizer.step()
        return theirs.detach().clone()

    return step


@pytest.mark.parametrize("settings", [
    {}, {"precondition_frequency": 1}, {"grafting": "none"}, {"statistics": "sum", "precondition_frequency": 3},
    {"correct_bias": False}, {"max_side": 14}, {"max_update_rms": 0.1, "shampoo_beta": 0.5, "matrix_eps": 1e-3},
    {"grafting": "none", "max_update_rms": None, "correct_bias": False}], ids=str)
@pytest.mark.parametrize("shape", [(16, 12), (12, 40), (20, 14)])
def test_twenty_steps_written_out(settings, shape):
    # In float32 the eigenvalues of what no gradient has reached are rounding, about as large as matrix_eps.
    assert trained(settings, shape, torch.float64, HYPER, written_out) < 1e-9
    assert trained({**settings, "matrix_eps": 1e-2}, shape, torch.float32, HYPER, written_out) < 1e-4


@pytest.mark.parametrize("shape", [(16, 12), (12, 40), (24, 24)])
def test_it_is_the_first_shampoo(shape):
    # arXiv 1802.09568, where factors are sums and nothing is added to an update.
    settings = {"grafting": "none", "statistics": "sum", "max_update_rms": 0.0, "precondition_frequency": 1,
                "matrix_eps": 1e-13}
    hyper = Hyper(lr=0.01, weight_decay=0.0, momentum=0, betas=(0.0, 0.95), eps=1e-8)
    assert trained(settings, shape, torch.float64, hyper, by_another_package) < 1e-9


@pytest.mark.parametrize("settings", [{}, {"grafting": "none"}, {"grafting": "none", "statistics": "sum"}], ids=str)
def test_the_size_of_gradients_does_not_matter(settings):
    hyper = Hyper(lr=1.0, weight_decay=0.0, momentum=0, betas=(0.9, 0.95), eps=1e-30)
    moves = []
    for scale in (1.0, 2.0**-20):
        param = torch.zeros(12, 20, dtype=torch.float64)
        rule = Recipe(precondition_frequency=2, **settings)
        state = {key: value.double() for key, value in rule.init_state(param).items()}
        for grad in drawn((12, 20), 6, torch.float64):
            rule.update_([param], [grad * scale], [state], hyper)
        moves.append(param)
    torch.testing.assert_close(*moves, rtol=1e-9, atol=1e-9)


def test_with_grafting_an_update_has_the_norm_of_adams():
    hyper = Hyper(lr=1.0, weight_decay=0.0, momentum=0, betas=(0.9, 0.95), eps=1e-8)
    param, theirs = torch.zeros(12, 20), torch.nn.Parameter(torch.zeros(12, 20))
    adam = torch.optim.Adam([theirs], lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    rule = Recipe(max_update_rms=None)
    state = rule.init_state(param)
    for grad in drawn((12, 20), 6, torch.float32):
        before, of_adam = param.clone(), theirs.detach().clone()
        theirs.grad = grad.clone()
        adam.step()
        rule.update_([param], [grad], [state], hyper)
        assert (param - before).norm() == pytest.approx(float((theirs.detach() - of_adam).norm()), rel=1e-5)
    assert "exp_avg_sq" not in Recipe(grafting="none").init_state(param)
