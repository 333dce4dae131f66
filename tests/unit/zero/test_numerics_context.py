"""Settings of numerics are set aside while a step runs, and put back."""

import pytest
import torch

from ds_layerwise.zero.setup.numerics_context import set_aside
from tests.support.rooms import rooms

pytestmark = rooms("numerics_context")

CPU = torch.device("cpu")


def settings():
    """All that decides about products, in both ways to ask; the older one may refuse to answer."""
    matmul = torch.backends.cuda.matmul
    found = {name: getattr(matmul, name) for name in (
        "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")}
    for name, ask in (("overall", torch.get_float32_matmul_precision), ("tf32", lambda: matmul.allow_tf32)):
        try:
            found[name] = ask()
        except RuntimeError:
            found[name] = "cannot be said"
    found.update({backend: torch._C._get_fp32_precision_getter(*backend) for backend in (
        ("cuda", "matmul"), ("mkldnn", "matmul"), ("generic", "all"))})
    return found


def by_backend(backend, op, precision):
    return lambda: torch._C._set_fp32_precision_setter(backend, op, precision)


WAYS = {"nothing": lambda: None,
        "high": lambda: torch.set_float32_matmul_precision("high"),
        "medium": lambda: torch.set_float32_matmul_precision("medium"),
        "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True)}
WAYS.update({"cuda": by_backend("cuda", "matmul", "tf32"), "cpu": by_backend("mkldnn", "matmul", "bf16"),
             "everything": by_backend("generic", "all", "tf32")})


@pytest.fixture(params=WAYS)
def way(request):
    yield WAYS[request.param]
    for backend, op in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")):
        torch._C._set_fp32_precision_setter(backend, op, "none")
    torch.set_float32_matmul_precision("highest")
    for backend in ("cuda", "mkldnn"):
        torch._C._set_fp32_precision_setter(backend, "matmul", "none")


def test_products_are_exact_inside_and_as_before_afterwards(way):
    way()
    before = settings()
    for error in (None, ValueError):
        try:
            with set_aside(CPU):
                inside = settings()
                if error:
                    raise error
        except ValueError:
            pass
        assert settings() == before
    assert inside["tf32"] is False and inside["overall"] == "highest"
    assert not inside["allow_fp16_reduced_precision_reduction"]
    assert not inside["allow_bf16_reduced_precision_reduction"]
    assert {inside["cuda", "matmul"], inside["mkldnn", "matmul"]} <= {"none", "ieee"}


def test_a_setting_that_follows_another_still_follows_it(request):
    request.addfinalizer(by_backend("generic", "all", "none"))
    by_backend("generic", "all", "tf32")()
    with set_aside(CPU):
        pass
    by_backend("generic", "all", "ieee")()
    assert torch._C._get_fp32_precision_getter("cuda", "matmul") == "ieee"


def test_autocast_and_modes_are_off_inside():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        with set_aside(CPU):
            assert not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    with torch.inference_mode():
        with set_aside(CPU):
            assert not torch.is_inference_mode_enabled() and not torch.zeros(1).is_inference()
        assert torch.is_inference_mode_enabled()
