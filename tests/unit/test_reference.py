"""The oracle, checked against torch's optimizers, DeepSpeed's loss scale, and numbers worked out by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from torch import nn

from tests.support.models import (
    CONV_NET_MATRICES,
    ODD_NET_MATRICES,
    TINY_GPT_MATRICES,
    conv_net,
    image_batch,
    odd_net,
    square_loss,
    tiny_gpt,
    token_batch,
    token_loss,
    vector_batch,
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

#: One step of Newton-Schulz that leaves X as it is.
IDENTITY = ((1.0, 0.0, 0.0),)


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


def test_newton_schulz_of_a_diagonal_matrix_by_hand():
    # 3 and 4 over their norm 5 are 0.6 and 0.8; one step of a=2, b=-1.5, c=0.5 maps s to 2s - 1.5 s^3 + 0.5 s^5
    result = newton_schulz(torch.diag(torch.tensor([3.0, 4.0]))[None], ((2.0, -1.5, 0.5),))
    expected = [2 * s - 1.5 * s**3 + 0.5 * s**5 for s in (0.6, 0.8)]
    close(result, torch.diag(torch.tensor(expected))[None])


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


def test_newton_schulz_treats_each_of_a_batch_on_its_own():
    batch = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(2))
    close(newton_schulz(batch), torch.stack([newton_schulz(m[None])[0] for m in batch]), rtol=0, atol=0)
    assert not newton_schulz(torch.zeros(1, 3, 4)).any()


def test_muon_step_by_hand():
    # momentum 0.5, from zero: m = g / 2, nesterov direction 0.75 g; over its norm: (0.6, 0.8). Scale sqrt(2 / 1).
    recipe = Recipe(matrices={"w": (1, 2, 1)}, muon_lr=0.1, momentum=0.5, weight_decay=0.2, ns_coefficients=IDENTITY)
    reference = Reference({"w": torch.tensor([[1.0], [1.0]])}, recipe)
    step = reference.step([[{"w": torch.tensor([[3.0], [4.0]])}]])
    assert step.norm == 5 and step.clip_factor == 1
    close(reference.state["w"]["momentum_buffer"], torch.tensor([[1.5], [2.0]]))
    decayed, scale = 1 - 0.1 * 0.2, 0.1 * math.sqrt(2)
    close(reference.params["w"], torch.tensor([[decayed - scale * 0.6], [decayed - scale * 0.8]]))


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


def test_several_ranks_and_micro_batches_equal_one_large_batch():
    def large_batch(step, micro, rank):
        return torch.cat([token_batch(step, m, r) for r in range(2) for m in range(3)])

    recipe = Recipe(matrices=TINY_GPT_MATRICES, clip=0.1)
    many = train(tiny_gpt, token_batch, token_loss, replace(recipe, world_size=2, gas=3), num_steps=3)
    one = train(tiny_gpt, large_batch, token_loss, recipe, num_steps=3)
    close(many.losses, one.losses, rtol=1e-5, atol=0)
    for name in TINY_GPT_MATRICES:
        close(many.steps[0].grads[name], one.steps[0].grads[name], rtol=1e-4, atol=1e-6)
        close(many.params[name], one.params[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_with_whole_number_gradients_trains_like_those_gradients(tied):
    recipe = Recipe(matrices=TINY_GPT_MATRICES, world_size=2, gas=2, clip=1.0)
    through_loss = train(lambda: tiny_gpt(tied=tied), lambda *place: place, whole_number_loss, recipe, num_steps=2)
    direct = train_on_gradients(trainable(tiny_gpt(tied=tied)), whole_number_gradients, recipe, num_steps=2)
    assert ("head.weight" in through_loss.params) is not tied
    for name, p in direct.params.items():
        assert torch.equal(through_loss.steps[0].grads[name], direct.steps[0].grads[name])
        assert torch.equal(through_loss.params[name], p)


def test_learning_rate_and_decay_of_one_parameter():
    recipe = Recipe(adam_lr=0.1, weight_decay=0.5, lr={"a": 0.0}, wd={"b": 0.0}, eps=0.0,
                    schedule=lambda step: 1 / (1 + step))
    reference = Reference({n: torch.ones(1) for n in "abc"}, recipe)
    for _ in range(2):
        reference.step([[{n: torch.ones(1) for n in "abc"}]])
    # With a constant gradient AdamW moves by lr: 0.1 and then 0.05.
    close(reference.params["a"], torch.ones(1))
    close(reference.params["b"], torch.tensor([1 - 0.1 - 0.05]))
    close(reference.params["c"], torch.tensor([(0.95 - 0.1) * 0.975 - 0.05]))


def test_a_parameter_without_gradient_counts_as_zeros():
    run = train(odd_net, vector_batch, square_loss, Recipe(matrices=ODD_NET_MATRICES, weight_decay=0.5), num_steps=2)
    assert set(run.params) == {"unused.weight", "unused.bias", "transposed", "scalar", "last.weight", "last.bias"}
    close(run.params["unused.weight"], odd_net().unused.weight.detach() * (1 - 0.02 * 0.5) ** 2)
    assert not run.state["unused.weight"]["momentum_buffer"].any()


def test_a_convolution_is_a_matrix_of_its_output_channels():
    run = train(conv_net, image_batch, square_loss, Recipe(matrices=CONV_NET_MATRICES), num_steps=1)
    update = (conv_net().stem.weight.detach() - run.params["stem.weight"]).view(8, 27) / 0.02
    singular_values = torch.linalg.svdvals(update)
    assert 0.5 < singular_values.min() and singular_values.max() < 1.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_move_by_less_than_the_model_can_show(dtype):
    recipe = Recipe(adam_lr=1e-4, param_dtype=dtype)
    start = torch.full((4,), 1.0001)
    run = train_on_gradients({"b": start}, lambda name, shape, *place: torch.ones(shape), recipe, num_steps=2)
    close(run.params["b"], torch.full((4,), 1 - 2e-4), rtol=0, atol=1e-6)  # from 1.0, what the model could hold
    assert run.model_params["b"].dtype == dtype
    assert torch.equal(run.model_params["b"], run.params["b"].to(dtype))


def test_accumulation_dtype_decides_what_survives():
    # 256 + 1 is 256 in bfloat16
    grads = {0: 256.0, 1: 1.0, 2: 1.0, 3: 1.0}
    for accum_dtype, total in ((torch.bfloat16, 256.0), (torch.float32, 259.0)):
        reference = Reference({"b": torch.zeros(1)}, Recipe(gas=4, accum_dtype=accum_dtype))
        step = reference.step([[{"b": torch.tensor([grads[m]])} for m in range(4)]])
        assert step.grads["b"].item() == total


def test_an_overflow_changes_the_loss_scale_and_nothing_else():
    def gradient(name, shape, step, micro, rank):
        return torch.full(shape, 1.0 if step != 1 or rank == 0 else 1e5)

    recipe = Recipe(world_size=2, param_dtype=torch.float16, loss_scale=LossScale(initial=8.0, hysteresis=1))
    one = train_on_gradients({"b": torch.ones(2)}, gradient, recipe, num_steps=1)
    two = train_on_gradients({"b": torch.ones(2)}, gradient, recipe, num_steps=2)
    assert [s.skipped for s in two.steps] == [False, True]
    assert two.steps[1].norm == math.inf and two.updates == 1 and two.loss_scale == 4.0
    assert torch.equal(one.params["b"], two.params["b"])
    assert torch.equal(one.state["b"]["exp_avg"], two.state["b"]["exp_avg"])
    close(two.steps[0].grads["b"], torch.ones(2))  # unscaled


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


def test_whole_numbers_differ_by_every_argument():
    base = whole_number_gradients("w", (64,), 0, 0, 0)
    assert torch.equal(base, base.round()) and base.abs().max() <= 8
    assert torch.equal(base, base.bfloat16().float())
    for other in (("v", 0, 0, 0), ("w", 1, 0, 0), ("w", 0, 1, 0), ("w", 0, 0, 1)):
        name, *place = other
        assert not torch.equal(base, whole_number_gradients(name, (64,), *place))


def test_a_misspelt_name_is_refused():
    with pytest.raises(ValueError, match="not trained: .'ww'"):
        Reference({"w": torch.zeros(2, 2)}, Recipe(matrices={"ww": (1, 2, 2)}))
