"""RMNP: momenta of which each row has norm 1, in place of Newton-Schulz."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.recipe import Shape, Site
from ds_layerwise.optimizers.rules.muon_family import ScaledByShape
from ds_layerwise.orthogonalize.batching import Tensors
from ds_layerwise.orthogonalize.newton_schulz import TINY, padded_batch
from ds_layerwise.orthogonalize.tensor_modes import TpMode


class Rmnp(ScaledByShape):
    """Row-momentum normalized preconditioning: with d the direction of Muon, the update is d with
    each row divided by its norm, and Muon's scale::

        u_i = d_i / |d_i|

    This is (d d')^(-1/2) d, Muon's orthogonal matrix, with d d' reduced to its diagonal. It needs
    no products, so that its updates cost next to nothing. They have an RMS of 1 / sqrt(cols) before
    scaling. A row of zeros stays zero.

    Reference: arXiv 2603.20527, and microsoft/dion #106.
    """

    rule = "rmnp"
    family = "muon"

    normalised_per: Literal["row", "column"] = "row"
    """The lines that get norm 1. In a layer that stores (outputs, inputs), such as ``nn.Linear``, a
    row is a neuron; in transformers' ``Conv1D`` a column is.
    """

    @property
    def takes_rate_of_adamw(self) -> bool:
        """False: the RMS of an update depends on the sides of its matrix in each mode."""
        return False

    def work(self, shape: Shape) -> int:
        """Return the FLOPs of hooks."""
        return self.hook_flops(shape)

    def workspace(self, shape: Shape) -> int:
        """Return the bytes of directions and updates of as many matrices as it takes at a time,
        with l2 or cautious decay of more, or those of the hook after it.
        """
        rows, cols = shape[-2:]
        together, *_ = padded_batch(shape)
        copies = max(2 + (self.weight_decay_method == "l2"), 4 * self.cautious_weight_decay)
        lines = 4 * (rows + cols)
        return max(4 * together * (copies * rows * cols + lines), self.hook_workspace(shape))

    def directions_of(self, matrices: Tensors, mode: TpMode, site: Site) -> list[Tensor]:
        """Return them with lines of norm 1."""
        axis = -1 if self.normalised_per == "row" else -2
        found = []
        for each in matrices:
            # In float32, squares of small gradients would be 0.
            norms = torch.linalg.vector_norm(each, dim=axis, keepdim=True, dtype=widest_float())
            if site.cut is not None and site.cut[0] == axis:
                norms = site.cut[1].sum_(norms.square_()).sqrt_()
            found.append(each / norms.float().clamp_min_(TINY))
        return found
