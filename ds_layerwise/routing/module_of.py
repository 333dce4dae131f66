"""The modules of parameters, also if torch's parametrizations have moved them; which parameters are
matrices by their axes, tables or vectors.

Note: where torch puts a weight
    ``torch.nn.utils.parametrizations`` moves ``weight`` into a ``ParametrizationList``, as
    ``original``, or for ``weight_norm`` as gains (``original0``) and directions (``original1``),
    and gives the module a class of its own. The older ``weight_norm``, ``spectral_norm`` and
    pruning keep it in the module under another name. In all cases ``module.weight`` is then
    computed, and computing it may change buffers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from ds_layerwise.optimizers.recipe import Shape
from ds_layerwise.routing.tensor_marks import PART_SHAPES, is_expert_stack

#: The names under which the older tools keep the weight that they compute ``weight`` from.
_OLDER = ("weight_orig", "weight_v")


#: The names that model families give a norm over queries or keys, and its content.
QK_NORM = re.compile(r"(.*\.)?((q|k|query|key)_?(layer_?norm|norm|ln)|(norm|ln)_(q|k))(\..+)?")

#: The names of parameters with one value per unit, whatever their shape: biases, tables of biases,
#: gains, and Mamba's decays.
_VECTOR = re.compile(
    r"(\w+_)?bias(es)?(_(?!proj)\w+)?|(\w+_)?table|A_(log|real|imag)s?|log_A_real|Ds?|"
    r"time_faaaa|r_k|"
    r"(\w+_)?(scale|gain|alpha|beta|gamma)s?(_?\d+)?"
)


def own_name(name: str) -> str:
    """Return the last part of ``name``; for a parameter in a list, that of the list."""
    *path, last = name.split(".")
    if path and last.isdecimal():
        return path[-1]
    return last


def is_vector(name: str) -> bool:
    """Tell whether the parameter ``name`` is a vector according to its own name, whatever its
    shape.
    """
    # Relative positions may be the weight of a layer that is named a bias.
    return bool(re.search(r"(\b|_)rel\w*bias\.weight$", name) or _VECTOR.fullmatch(own_name(name)))


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
        # A gain has fewer than two axes longer than 1.
        return [p for p in params if p is not None and p.numel() > max(p.shape, default=1)]
    # The older tools store the computed weight as an ordinary attribute.
    if "weight" in vars(module):
        for name in _OLDER:
            older = getattr(module, name, None)
            if isinstance(older, nn.Parameter):
                return [older]
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return [weight]
    return []


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


#: The modules of transformers in which a parameter (inputs, heads, width) is one matrix.
_OUTPUTS_BY_HEAD = ("FunnelRelMultiheadAttention", "XLNetRelativeAttention")

#: DBRX's module, in which the experts of a layer are one matrix, stacked by rows.
_EXPERTS_IN_ROWS = "DbrxExpertGLU"

#: The layers with a kernel.
CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def shape_in(module: nn.Module, param: Tensor) -> tuple[Shape | None, str]:
    """Return the matrix shape of ``param`` in ``module``, or None, and the reason."""
    shape = tuple(param.shape)
    # On another tensor-parallel rank, what has one row here has more.
    most = max(getattr(param, PART_SHAPES, [shape]))
    if len(shape) < 2:
        return None, "fewer than two axes"
    if isinstance(module, CONVOLUTIONS) and len(shape) == len(module.kernel_size) + 2:
        return _kernel_shape(shape, module)
    kind = kind_of(module).__name__
    if kind == "OFTRotationModule":
        return None, "skew-symmetric blocks, each a row of its elements (by peft)"
    if len(shape) == 2:
        experts = getattr(module, "moe_num_experts", 0)
        if kind == _EXPERTS_IN_ROWS and experts and shape[0] % experts == 0:
            return (experts, shape[0] // experts, shape[1]), "stack of matrices, by expert"
        if 1 in most:
            return None, "a vector"
        return shape, "matrix"
    if len(shape) == 3:
        if kind in _OUTPUTS_BY_HEAD:
            return (shape[0], shape[1] * shape[2]), "matrix, outputs by head"
        if is_expert_stack(param) and 1 not in most[1:]:
            return shape, "stack of matrices, by expert"
        if most[0] == 1 or 1 in most[1:]:
            return None, "three axes, but no stack of matrices"
        unlike = (
            ", far more matrices than rows or columns: if it is none, send it to the scalar "
            "optimizer"
        )
        return shape, "stack of matrices" + unlike * (shape[0] > 2 * max(shape[1:]))
    return None, f"{len(shape)} axes, and not a convolution"


def _kernel_shape(shape: Shape, module: nn.Module) -> tuple[Shape | None, str]:
    groups = int(module.groups)  # type: ignore[arg-type]
    rows = shape[0] // groups
    cols = math.prod(shape[1:])
    if len(shape) == 3:
        return None, "convolution over one axis"
    if shape[1] == 1 and groups > 1:
        return None, "depthwise convolution"
    if rows < 2 or cols < 2:
        return None, "a vector"
    if groups == 1:
        return (rows, cols), "convolution"
    # The filters of each group see other channels, so each group is a matrix of its own.
    return (groups, rows, cols), "grouped convolution"
