"""SOAP and KL-SOAP against the formulas written out in float64, and against another package; what they cost."""

import numpy as np
import pytest
import torch
from pytorch_optimizer import SOAP
from torch.utils.flop_counter import FlopCounterMode

from ds_layerwise.config.sections import OptimizerConfig
from ds_layerwise.errors import ConfigError, RoutingError
from ds_layerwise.optimizers.recipe import Hyper, UpdateError
from ds_layerwise.optimizers.registry import REGISTRY
from ds_layerwise.optimizers.rules import kronecker
from ds_layerwise.optimizers.rules.kronecker import EIGH_FLOPS, qr_flops
from ds_layerwise.plan.forecast.forecast import specs_of
from ds_layerwise.routing.routes import Route
from tests.support import preconditioned
from tests.support.live_memory import most_beside
from tests.support.rooms import rooms

pytestmark = rooms("kronecker", "soap", "shampoo", "recipe", "rate_checks")

HYPER = Hyper(lr=0.01, weight_decay=0.1, momentum=0, betas=(0.9, 0.95), eps=1e-8)
#: Eigenvalues of KL-SOAP are at least eps: with so large a one all that is seen of them is of one size.
HYPER_KL = Hyper(lr=0.01, weight_decay=0.1, momentum=0, betas=(0.9, 0.95), eps=1e-2)
WIDE, TALL, SQUARE = (12, 40), (16, 12), (24, 24)


def recipe(name, **settings):
    return REGISTRY[name](**settings)


def start(rule, shape, dtype=torch.float64, seed=1):
    """A parameter, its state, and a function that draws gradients."""
    g = torch.Generator().manual_seed(seed)

    def draw(*of_shape):
        return torch.randn(of_shape or shape, generator=g, dtype=torch.float64).to(dtype)

    param = draw()
    return param, {key: value.to(dtype) for key, value in rule.init_state(param).items()}, draw


def run(rule, param, state, grads, hyper=HYPER):
    for grad in grads:
        before = grad.clone()
        rule.update_([param], [grad], [state], hyper)
        assert torch.equal(grad, before)


def moved_apart(found, expected, start):
    """The distance of two, over how far they have moved."""
    found, expected, start = map(preconditioned.float64, (found, expected, start))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected - start)


def oracle(rule, param, hyper, state=None):
    r = rule
    return preconditioned.Soap(
        param, state=state, kl=r.kl, lr=hyper.lr, weight_decay=hyper.weight_decay, betas=hyper.betas, eps=hyper.eps,
        shampoo_beta=r.shampoo_beta, every=r.precondition_frequency, lagged=r.lagged_basis, basis=r.basis,
        power=r.power_iter_steps, nesterov=r.nesterov, limit=r.max_update_rms or 0, correct=r.correct_bias)


SETTINGS = [{}, {"precondition_frequency": 1}, {"precondition_frequency": 3, "basis": "eigh"}, {"nesterov": True},
            {"precondition_frequency": 2, "power_iter_steps": 3}, {"lagged_basis": False, "precondition_frequency": 1},
            {"correct_bias": False, "max_update_rms": None}, {"shampoo_beta": 0.5, "max_update_rms": 0.25},
            {"max_side": 13}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["soap", "kl_soap"])
def test_twenty_steps_written_out(name, settings):
    rule, hyper = recipe(name, **settings), HYPER_KL if name == "kl_soap" else HYPER
    for shape in (WIDE, TALL, *([SQUARE] if "max_side" not in settings else [])):
        # Until all directions have been seen, the eigenvectors of the others are whatever rounding makes of them.
        for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
            param, state, draw = start(rule, shape, dtype)
            run(rule, param, state, [draw() for _ in range(30)], hyper)
            expected, before = oracle(rule, param, hyper, state), param.clone()
            grads = [draw() for _ in range(20)]
            run(rule, param, state, grads, hyper)
            for grad in grads:
                expected.step(grad)
            assert moved_apart(param, expected.w, before) < bound, (shape, dtype)
            for key in ("L", "R", "exp_avg", "exp_avg_sq"):
                if key in state:
                    assert moved_apart(state[key], expected.s[key], 0) < bound, (shape, dtype, key)


@pytest.mark.parametrize("name", ["soap", "kl_soap"])
def test_the_first_twenty_steps_written_out(name):
    rule = recipe(name, precondition_frequency=3)
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        param, state, draw = start(rule, SQUARE, dtype)
        expected, before = oracle(rule, param, HYPER), param.clone()
        for step in range(20):
            grad = draw()
            run(rule, param, state, [grad])
            expected.step(grad)
            # As in the paper, the first gradient makes bases and moves nothing, and the decay does not, either.
            assert torch.equal(param, before) is (step == 0)
            assert step == 0 or moved_apart(param, expected.w, before) < bound, (dtype, step)


def test_in_the_order_of_emerging_optimizers_the_first_update_is_rounding():
    # Of a diagonal matrix, Adam divides zeros by zeros as far as rounding goes.
    moves = {}
    for lagged in (False, True):
        rule = recipe("soap", lagged_basis=lagged)
        for dtype in (torch.float32, torch.float64):
            param, state, draw = start(rule, SQUARE, dtype)
            before = param.clone()
            run(rule, param, state, [draw().float().to(dtype) for _ in range(1 + lagged)],
                Hyper(lr=1.0, weight_decay=0.0, momentum=0, betas=(0.9, 0.95), eps=1e-8))
            moves[lagged, dtype] = (param - before).double()
    assert moved_apart(moves[False, torch.float32], moves[False, torch.float64], 0) > 0.9
    assert moved_apart(moves[True, torch.float32], moves[True, torch.float64], 0) < 1e-3
    assert moves[False, torch.float32].square().mean().sqrt() > 0.8


@pytest.mark.parametrize("every, longest, shape", [(1, 10_000, WIDE), (10, 10_000, TALL), (3, 13, WIDE),
                                                   (10, 10_000, SQUARE)])
def test_twenty_steps_of_another_package(every, longest, shape):
    rule = recipe("soap", precondition_frequency=every, max_side=longest, max_update_rms=0.0)
    # It puts eps beside another denominator, and decays after the update.
    hyper = Hyper(lr=0.01, weight_decay=0.0, momentum=0, betas=(0.9, 0.95), eps=1e-15)
    param, state, draw = start(rule, shape)
    theirs = torch.nn.Parameter(param.clone())
    optimizer = SOAP([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-15, weight_decay=0.0, precondition_frequency=every,
                     max_precondition_dim=longest)
    warm = 0 if shape == SQUARE else 31

    def step(grad):
        theirs.grad = grad.clone()
        optimizer.step()

    for _ in range(warm):
        step(draw())
    if warm:
        given = optimizer.state[theirs]
        state["step"].fill_(warm)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].copy_(given[key])
        for key, factor, basis in zip("LR", given["GG"], given["Q"], strict=True):
            if len(basis):
                state[key].copy_(factor / (1 - 0.95**warm))
                state[f"Q_{key}"].copy_(basis)
        param.copy_(theirs.detach())
    before = param.clone()
    for _ in range(20):
        grad = draw()
        step(grad)
        run(rule, param, state, [grad], hyper)
    # Its QR decompositions are float32, whatever the rest is.
    assert moved_apart(param, theirs.detach(), before) < 1e-5


def test_updates_are_as_large_as_they_may_be():
    white = Hyper(lr=1.0, weight_decay=0.0, momentum=0, betas=(0.9, 0.95), eps=1e-8)
    for name in ("soap", "kl_soap"):
        for limit in (1.0, 0.01, 0, None):
            for lagged in (True, False):
                rule = recipe(name, max_update_rms=limit, lagged_basis=lagged, precondition_frequency=1)
                param, state, draw = start(rule, (64, 256), torch.float32)
                moves = []
                for _ in range(4):
                    before = param.clone()
                    run(rule, param, state, [draw()], white)
                    moves.append(float((param - before).square().mean().sqrt()))
                assert not limit or max(moves) <= limit * 1.0001
                # What Emerging-Optimizers' order does without a limit.
                assert limit or lagged or name == "kl_soap" or max(moves) > 10


def run_on(name, shape, grads, hyper=HYPER, **settings):
    rule = recipe(name, precondition_frequency=2, **settings)
    param = torch.ones(shape)
    state = rule.init_state(param)
    run(rule, param, state, grads, hyper)
    return param, state


@pytest.mark.parametrize("name", ["soap", "kl_soap", "shampoo"])
def test_gradients_of_zeros_and_of_one_rank(name):
    g = torch.Generator().manual_seed(0)
    zero, thin = torch.zeros(6, 9), torch.outer(torch.randn(6, generator=g), torch.randn(9, generator=g))
    for grads in ([zero] * 5, [thin] * 5, [zero, zero, zero, thin, zero, thin], [thin * 1e-12] * 5):
        param, state = run_on(name, (6, 9), grads)
        for key, value in {**state, "fp32": param}.items():
            assert value.isfinite().all(), key
        for key in ("Q_L", "Q_R"):
            if key in state:
                basis = state[key]
                torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis)), rtol=0, atol=1e-5)
    # Weights that have no gradient decay alone; the first step of SOAP does nothing.
    left, _ = run_on(name, (6, 9), [zero] * 5)
    assert torch.allclose(left, torch.full((6, 9), 0.999**(5 if name == "shampoo" else 4)))


@pytest.mark.parametrize("name", ["soap", "kl_soap", "shampoo"])
def test_every_matrix_of_a_stack_is_updated_on_its_own(name, monkeypatch):
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(5, 8, 8, generator=g) for _ in range(6)]
    for at_once in (1, 2, 5):
        monkeypatch.setattr(kronecker, "MAX_BATCH_NUMEL", 64 * at_once)
        stack, state = run_on(name, (5, 8, 8), grads)
        for i in range(5):
            alone, own = run_on(name, (8, 8), [grad[i] for grad in grads])
            torch.testing.assert_close(stack[i], alone, rtol=1e-4, atol=1e-6)
            assert all(own[key].shape == value.shape[1:] for key, value in state.items() if key != "step")


def qr_of(shape, *args, out_val=None, **kwargs):
    return int(np.prod(shape[:-2])) * qr_flops(shape[-1])


def eigh_of(shape, *args, out_val=None, **kwargs):
    return int(np.prod(shape[:-2])) * EIGH_FLOPS * shape[-1] ** 3


def product_of(shape, left, right, *args, out_val=None, **kwargs):
    return 2 * int(np.prod(left)) * right[-1]


@pytest.mark.parametrize("name, settings", [
    ("soap", {}), ("soap", {"power_iter_steps": 2}), ("soap", {"basis": "eigh"}), ("soap", {"max_side": 50}),
    ("soap", {"nesterov": True, "lagged_basis": False}), ("kl_soap", {}), ("kl_soap", {"max_side": 50}),
    ("shampoo", {}), ("shampoo", {"max_side": 50, "grafting": "none"})], ids=str)
@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (3, 48, 32)])
def test_work_is_what_an_update_computes(name, settings, shape):
    rule = recipe(name, precondition_frequency=4, **settings)
    param, state, draw = start(rule, shape, torch.float32)
    run(rule, param, state, [draw() for _ in range(4)])
    custom = {torch.ops.aten.linalg_qr: qr_of, torch.ops.aten._linalg_eigh: eigh_of,
              torch.ops.aten.baddbmm_: product_of}
    with FlopCounterMode(display=False, custom_mapping=custom) as counter:
        run(rule, param, state, [draw() for _ in range(4)])
    assert counter.get_total_flops() / 4 == pytest.approx(rule.work(shape), abs=4)


@pytest.mark.parametrize("name, settings", [
    ("soap", {}), ("soap", {"nesterov": True}), ("soap", {"lagged_basis": False, "power_iter_steps": 3}),
    ("soap", {"basis": "eigh"}), ("kl_soap", {"power_iter_steps": 2}), ("shampoo", {}), ("shampoo", {"max_side": 99})],
    ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (90, 512), (72, 100), (6, 64, 256), (3, 700, 700)])
def test_an_update_takes_no_more_memory_than_its_recipe_says(name, settings, shape):
    rule = recipe(name, precondition_frequency=2, **settings)
    if rule.refusal(shape):
        return
    # LAPACK's own memory for eigenvectors is not seen.
    least = 0.6 if settings.get("basis") == "eigh" else 0.85
    assert least < most_beside(rule, [shape], HYPER, updates=3) / rule.workspace(shape) <= 1


def test_a_shape_without_short_sides_and_tensor_shards_are_refused():
    soap = recipe("soap", max_side=64)
    assert soap.refusal((64, 65)) is None and soap.refusal((8, 65, 64)) is None
    assert "has no side of at most max_side 64, so that soap" in soap.refusal((65, 65))
    assert "'adamw' with layerwise.overrides" in soap.refusal((65, 65))
    for axis in (-2, -1):
        assert "is cut by tensor parallelism, and kl_soap needs whole" in recipe("kl_soap").refusal((8, 8),
                                                                                                     cut_axis=axis)
    assert soap.products_in(frozenset({torch.bfloat16})) == torch.float32


def test_tensor_shards_are_refused_by_name():
    route = Route(name="up.weight", recipe=recipe("soap"), reason="matrix", group=0, matrix_shape=(8, 4), tp_axis=-1)
    with pytest.raises(RoutingError, match=r"^up.weight \(8, 4\) is cut by tensor parallelism, and soap needs whole"):
        specs_of([("up.weight", (8, 4), "float32")], {"up.weight": route}, tp_size=2)


def test_a_device_that_cannot_factorise(monkeypatch):
    rule = recipe("soap")
    rule.check(torch.device("cpu"))

    def absent(matrix):
        raise NotImplementedError("no kernel for linalg_eigh on this device")

    monkeypatch.setattr(torch.linalg, "eigh", absent)
    with pytest.raises(ConfigError, match="soap needs torch.linalg.eigh and qr, which cpu does not have .no kernel"):
        rule.check(torch.device("cpu"))


def test_a_factor_without_eigenvectors_is_tried_in_float64_and_then_named(monkeypatch):
    eigh, seen = torch.linalg.eigh, []

    def fails_in_float32(matrix):
        seen.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise kronecker.LinAlgError("no")
        return eigh(matrix)

    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(9, 9, generator=g) for _ in range(4)]
    expected, _ = run_on("soap", (9, 9), grads)
    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    found, state = run_on("soap", (9, 9), grads)
    assert seen == [torch.float32, torch.float64] * 2 and state["Q_L"].dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    rule = recipe("shampoo")
    params = [torch.ones(4, 4), torch.ones(3, 3)]
    with pytest.raises(UpdateError, match=r"shampoo finds no eigenvectors of \(3, 3\) at its step 1 .*clip them") as e:
        rule.update_(params, [torch.ones(4, 4), torch.full((3, 3), 1e30)], [rule.init_state(p) for p in params], HYPER)
    assert e.value.index == 1


@pytest.mark.parametrize("name, params, rates", [
    ("soap", {"lr": 3e-3}, (3e-3, 3e-3)), ("kl_soap", {}, (3e-4, 3e-4)), ("shampoo", {"lr": 1e-3}, (1e-3, 1e-3)),
    ("soap", {"lr": 1e-3, "muon_lr": 3e-3}, (3e-3, 1e-3)),
    ("shampoo", {"grafting": "none", "lr": 1e-3, "muon_lr": 0.1}, (0.1, 1e-3))])
def test_a_single_learning_rate_is_right_for_all(name, params, rates):
    config = OptimizerConfig.from_section({"type": "LayerWise", "params": {"matrix_optimizer": name, **params}})
    assert (config.muon_lr, config.adam_lr) == rates


def test_shampoos_own_size_takes_a_rate_of_its_own():
    with pytest.raises(ConfigError, match="lr is 0.001 without muon_lr, and Shampoo's.* set grafting to 'adam'"):
        OptimizerConfig.from_section({"type": "LayerWise", "params": {
            "matrix_optimizer": "shampoo", "grafting": "none", "lr": 1e-3}})


@pytest.mark.parametrize("key, value, message", [
    ("basis", "svd", "basis must be one of 'qr', 'eigh', got 'svd'"),
    ("shampoo_beta", 1.0, r"shampoo_beta must be in \[0, 1\), got 1.0"),
    ("precondition_frequency", 0, "precondition_frequency must be a whole number of at least 1, got 0"),
    ("max_update_rms", -1, r"max_update_rms must be in \[0, inf\), got -1"),
    ("power_iter_steps", None, "power_iter_steps must be a whole number of at least 1, got None"),
    ("ns_steps", 5, "ns_steps belongs to muon")])
def test_settings_out_of_bounds(key, value, message):
    with pytest.raises(ConfigError, match=f"optimizer.params.{message}"):
        OptimizerConfig.from_section({"type": "LayerWise", "params": {"matrix_optimizer": "soap", key: value}})
    off = OptimizerConfig.from_section({"type": "LayerWise", "params": {
        "matrix_optimizer": "soap", "max_update_rms": None}})
    assert off.matrix.max_update_rms is None


@pytest.mark.parametrize("name", ["soap", "kl_soap"])
@pytest.mark.parametrize("basis", ["qr", "eigh"])
def test_a_gradient_without_finite_squares_never_makes_nan_of_weights(name, basis):
    rule = REGISTRY[name](basis=basis, precondition_frequency=2, max_update_rms=0)
    param, hyper = torch.ones(4, 6), Hyper(lr=0.1, weight_decay=0.0, momentum=0.0, betas=(0.9, 0.95), eps=1e-8)
    state = rule.init_state(param)
    with pytest.raises(UpdateError, match=f"{name} finds no eigenvectors of .*step 5 .*beyond 1e18 .*clip them"):
        for step in range(6):
            grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)) * (1e25 if step == 3 else 1)
            rule.update_([param], [grad], [state], hyper)
    assert torch.isfinite(param).all()


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_a_device_that_makes_nan_of_a_factor_without_a_word(name, monkeypatch):
    monkeypatch.setattr(torch.linalg, "eigh", lambda factor: (factor[..., 0] * torch.nan, factor))
    rule, param = REGISTRY[name](), torch.ones(4, 6)
    with pytest.raises(UpdateError, match=f"{name} finds no eigenvectors of .*an eigenvalue is not finite"):
        rule.update_([param], [torch.ones(4, 6)], [rule.init_state(param)], HYPER)


def test_an_eps_of_zero_is_told_where_eigenvalues_are_divided_by():
    rule = REGISTRY["kl_soap"](precondition_frequency=1)
    param, hyper = torch.ones(4, 6), Hyper(lr=0.1, weight_decay=0.0, momentum=0.0, betas=(0.9, 0.95), eps=0.0)
    state = rule.init_state(param)
    with pytest.raises(UpdateError, match="eps, the least eigenvalue that kl_soap divides by, is 0: make it 1e-8"):
        for _ in range(4):
            rule.update_([param], [torch.ones(4, 6)], [state], hyper)
