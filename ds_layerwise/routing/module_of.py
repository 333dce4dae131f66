"""Modules of parameters, where torch's parametrizations have put these elsewhere.

Note: where torch puts a weight
    ``torch.nn.utils.parametrizations`` moves ``weight`` into a ``ParametrizationList``, as
    ``original``, or for ``weight_norm`` as gains (``original0``) and directions (``original1``),
    and makes a class of its own for the module. The older ``weight_norm``, ``spectral_norm`` and
    pruning leave it in the module under another name. In each case ``module.weight`` is then
    computed, and to compute it may change buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

#: Names in the older tools of the weight that they compute ``weight`` from.
_OLDER = ("weight_orig", "weight_v")


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yield each module with its path and its own parameters, those that parametrizations hold for
    it included.
    """
    for path, module in model.named_modules():
        if not isinstance(module, ParametrizationList):
            own = list(module._parameters.values())
            for parametrized in _lists(module).values():
                own += parametrized._parameters.values()
            yield path, module, [param for param in own if param is not None]


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module`` before it was parametrized."""
    kind: type[nn.Module] = type_before_parametrizations(module)
    return kind


def config_value(config: Any, key: str) -> Any:
    """Return the value of ``config`` under ``key``; None if it has none, or differs by layer."""
    try:
        return getattr(config, key, None)
    except RuntimeError:
        # As transformers says that.
        return None


def is_table(module: nn.Module) -> bool:
    """Tell whether ``module`` is an embedding, of torch or of a library with its own classes."""
    return re.search(r"Embedding(Bag)?( |$)|PosEmb", _kinds(module)) is not None


def is_norm(module: nn.Module) -> bool:
    """Tell whether ``module`` normalises: a LayerNorm, LlamaRMSNorm, BatchNorm2d, or timm's
    GroupNormAct.
    """
    # Linear layers that scale their rows are called after norms, too.
    return (
        not isinstance(module, nn.Linear)
        and re.search(r"Norm(Act|Gated|\d\w*)*( |$)", _kinds(module)) is not None
    )


def is_bare(module: nn.Module) -> bool:
    """Tell whether ``module`` is no layer that is known, nor a norm."""
    return not (
        is_table(module) or is_norm(module) or re.search("inear|Conv1D|_ConvNd", _kinds(module))
    )


def _kinds(module: nn.Module) -> str:
    """Return the names of the classes that ``module`` is of."""
    return " ".join(kind.__name__ for kind in kind_of(module).__mro__)


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return ``module.weight``, or the tensors that it is computed from, without gains; empty where
    that is no tensor.
    """
    parametrized = _lists(module).get("weight")
    if parametrized is not None:
        params = parametrized._parameters.values()
        found: list[Tensor] = []
        for param in params:
            if param is not None and not is_gain(param):
                found.append(param)
        return found
    # The older tools put what they have computed where any attribute is.
    if "weight" in vars(module):
        for name in _OLDER:
            if name in module._parameters:
                older = module._parameters[name]
            else:
                older = None
            if isinstance(older, Tensor):
                return [older]
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return [weight]
    return []


def is_gain(param: Tensor) -> bool:
    """Tell whether ``param`` has no two axes that are longer than 1."""
    return param.numel() <= max(param.shape, default=1)


def _lists(module: nn.Module) -> dict[str, ParametrizationList]:
    # What holds the modules of a scripted one has no get().
    modules = module._modules
    if "parametrizations" in modules:
        lists = modules["parametrizations"]
    else:
        lists = None
    if not isinstance(lists, nn.ModuleDict):
        return {}
    found = {}
    for name, entry in lists.items():
        if isinstance(entry, ParametrizationList):
            found[name] = entry
    return found
