"""Muon: momentum, orthogonalised."""

from __future__ import annotations

from dataclasses import dataclass

from ds_layerwise.optimizers.rules.orthogonalized import Scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon(Scaled):
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices: an orthogonal matrix is the
    update.

    Reference: https://kellerjordan.github.io/posts/muon/
    """
