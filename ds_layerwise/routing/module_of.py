"""The modules of parameters, also if torch's parametrizations have moved them.

Note: where torch puts a weight
    ``torch.nn.utils.parametrizations`` moves ``weight`` into a ``ParametrizationList``, as
    ``original``, or for ``weight_norm`` as gains (``original0``) and directions (``original1``),
    and gives the module a class of its own. The older ``weight_norm``, ``spectral_norm`` and
    pruning keep it in the module under another name. In all cases ``module.weight`` is then
    computed, and computing it may change buffers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

#: The names under which the older tools keep the weight that they compute ``weight`` from.
_OLDER = ("weight_orig", "weight_v")


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Parameter]]]:
    """Yield each module with its path and its own parameters, including those that parametrizations
    hold for it.
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
    """Return the value of ``config`` under ``key``; None if it has none, or one that differs by
    layer.
    """
    try:
        return getattr(config, key, None)
    except RuntimeError:
        # How transformers reports a value that differs by layer.
        return None


def is_table(module: nn.Module) -> bool:
    """Tell whether ``module`` is an embedding, of torch or of a library with classes of its own."""
    return re.search(r"Embedding(Bag)?( |$)|PosEmb", _kinds(module)) is not None


def is_norm(module: nn.Module) -> bool:
    """Tell whether ``module`` is a norm, such as LayerNorm, LlamaRMSNorm, BatchNorm2d, or timm's
    GroupNormAct.
    """
    # Linear layers that scale their rows also have "norm" in their names.
    return (
        not isinstance(module, nn.Linear)
        and re.search(r"Norm(Act|Gated|\d\w*)*( |$)", _kinds(module)) is not None
    )


def is_bare(module: nn.Module) -> bool:
    """Tell whether ``module`` is neither a known layer nor a norm."""
    return not (
        is_table(module) or is_norm(module) or re.search("inear|Conv1D|_ConvNd", _kinds(module))
    )


def _kinds(module: nn.Module) -> str:
    """Return the names of the class of ``module`` and its bases."""
    return " ".join(kind.__name__ for kind in kind_of(module).__mro__)


def weights_of(module: nn.Module) -> list[Tensor]:
    """Return ``module.weight``, or the tensors that it is computed from, without gains; empty if it
    is not a tensor.
    """
    parametrized = _lists(module).get("weight")
    if parametrized is not None:
        params = parametrized._parameters.values()
        found: list[Tensor] = []
        for param in params:
            if param is not None and not is_gain(param):
                found.append(param)
        return found
    # The older tools store the computed weight as an ordinary attribute.
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
    """Tell whether ``param`` has fewer than two axes longer than 1."""
    return param.numel() <= max(param.shape, default=1)


def _lists(module: nn.Module) -> dict[str, ParametrizationList]:
    # The module dict of a scripted module has no get().
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
