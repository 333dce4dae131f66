"""The matrices that the matrix optimizer sees in parameters. A kernel is a matrix of (outputs, the
rest).

Note: three axes
    A bare parameter of three axes is a stack of matrices, of experts or heads. In XLNet and Funnel
    it is one matrix, whose outputs are counted by head and within it. In other models, a first axis
    much longer than the others hints at such a parameter; its reason then says so.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from ds_layerwise.optimizers.recipe import Shape
from ds_layerwise.routing.module_of import kind_of

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
        if 1 in shape:
            return None, "a vector"
        return shape, "matrix"
    if len(shape) == 3:
        if kind in _OUTPUTS_BY_HEAD:
            return (shape[0], shape[1] * shape[2]), "matrix, outputs by head"
        if shape[0] == 1 or 1 in shape[1:]:
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
