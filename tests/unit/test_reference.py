"""The oracle, checked against torch's optimizers, DeepSpeed's loss scale, and numbers worked out by hand."""

from __future__ import annotations

import random

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import nn

from tests.support.models import (
    TINY_GPT_MATRICES,
    conv_net,
    image_batch,
    square_loss,
    tiny_gpt,
)
from tests.support.reference import (
    LossScale,
    Recipe,
    Reference,
    newton_schulz,
    train,
    train_on_gradients,
    trainable,
    whole_number_gradients,
    whole_number_loss,
)
from tests.support.rooms import rooms

pytestmark = rooms("outside")


def close(actual, expected, **kwargs):
    torch.testing.assert_close(actual, expected, **kwargs)


def test_adamw_is_torchs():
    module = conv_net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    losses = []
    for step in range(4):
        loss = square_loss(module, image_batch(step, 0, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    recipe = Recipe(adam_lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    run = train(conv_net, image_batch, square_loss, recipe, num_steps=4)
    close(run.losses, losses, rtol=1e-5, atol=0)
    for name, p in module.named_parameters():
        close(run.params[name], p.detach(), rtol=1e-5, atol=1e-6)
        close(run.state[name]["exp_avg_sq"], optimizer.state[p]["exp_avg_sq"], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(8, 4), (4, 8), (6, 6)])
def test_muon_is_torchs(nesterov, shape):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    theirs = nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.1)
    recipe = Recipe(matrices={"w": (1, *shape)}, muon_lr=0.02, momentum=0.9, nesterov=nesterov, weight_decay=0.1,
                    ns_dtype=torch.bfloat16)
    ours = Reference({"w": start}, recipe)
    for step in range(4):
        grad = whole_number_gradients("w", shape, step, 0, 0)
        theirs.grad = grad.clone()
        optimizer.step()
        ours.step([[{"w": grad}]])
    close(ours.state["w"]["momentum_buffer"], optimizer.state[theirs]["momentum_buffer"])
    # torch orthogonalises in bfloat16: four steps of 0.02, each entry to about two digits
    close(ours.params["w"], theirs.detach(), rtol=0, atol=4 * 0.02 * 4e-2)


@pytest.mark.parametrize("rows, cols", [(5, 12), (12, 5), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_schulz_moves_singular_values_and_nothing_else(rows, cols, dtype):
    matrix = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4
    close(newton_schulz(matrix[None], dtype=dtype)[0], u @ torch.diag(s) @ vt, rtol=0, atol=tolerance)


def test_clipping_comes_before_momentum_and_covers_all_parameters():
    recipe = Recipe(matrices={"w": (1, 1, 2)}, clip=0.5, momentum=0.5)
    reference = Reference({"w": torch.zeros(1, 2), "b": torch.zeros(1)}, recipe)
    step = reference.step([[{"w": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([4.0])}]])
    assert step.norm == 5
    assert step.clip_factor == pytest.approx((5 + 1e-6) / 0.5)
    close(step.grads["b"], torch.tensor([4.0]))  # reported before clipping
    close(reference.state["w"]["momentum_buffer"], torch.tensor([[0.5 * 3.0 / 10, 0.0]]))
    close(reference.state["b"]["exp_avg"], torch.tensor([0.1 * 4.0 / 10]))
    # below the limit nothing happens
    assert reference.step([[{"w": torch.tensor([[0.3, 0.0]])}]]).clip_factor == 1


def test_gradients_are_summed_over_micro_batches_and_averaged_over_ranks():
    recipe = Recipe(world_size=2, gas=4)
    run = train_on_gradients({"b": torch.zeros(3)}, whole_number_gradients, recipe, num_steps=2)
    for s, step in enumerate(run.steps):
        all_of_them = [whole_number_gradients("b", (3,), s, m, r) for m in range(4) for r in range(2)]
        assert torch.equal(step.grads["b"], sum(all_of_them) / 8)


@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_with_whole_number_gradients_trains_like_those_gradients(tied):
    recipe = Recipe(matrices=TINY_GPT_MATRICES, world_size=2, gas=2, clip=1.0)
    through_loss = train(lambda: tiny_gpt(tied=tied), lambda *place: place, whole_number_loss, recipe, num_steps=2)
    direct = train_on_gradients(trainable(tiny_gpt(tied=tied)), whole_number_gradients, recipe, num_steps=2)
    assert ("head.weight" in through_loss.params) is not tied
    for name, p in direct.params.items():
        assert torch.equal(through_loss.steps[0].grads[name], direct.steps[0].grads[name])
        assert torch.equal(through_loss.params[name], p)


def test_accumulation_dtype_decides_what_survives():
    # 256 + 1 is 256 in bfloat16
    grads = {0: 256.0, 1: 1.0, 2: 1.0, 3: 1.0}
    for accum_dtype, total in ((torch.bfloat16, 256.0), (torch.float32, 259.0)):
        reference = Reference({"b": torch.zeros(1)}, Recipe(gas=4, accum_dtype=accum_dtype))
        step = reference.step([[{"b": torch.tensor([grads[m]])} for m in range(4)]])
        assert step.grads["b"].item() == total


def test_loss_scale_is_deepspeeds(monkeypatch):
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 1)  # theirs asks for the rank before it logs
    rng = random.Random(0)
    for window in (1, 2, 3):
        for hysteresis in (1, 2, 3):
            ours = LossScale(initial=2.0**10, window=window, hysteresis=hysteresis)
            theirs = DynamicLossScaler(2.0**10, window, 1.0, hysteresis, False, raise_error_at_min_scale=False)
            overflows: list[bool] = []
            for _ in range(60):
                overflows.append(rng.random() < 0.25)
                theirs.update_scale(overflows[-1])
                assert ours.after(overflows) == theirs.cur_scale, (window, hysteresis, overflows)
