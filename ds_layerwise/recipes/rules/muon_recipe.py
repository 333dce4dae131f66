"""Muon: momentum, orthogonalised."""

from __future__ import annotations

from typing import ClassVar

from ds_layerwise.recipes.rules.orthogonalized_recipe import Scaled


class Muon(Scaled):
    """MomentUm Orthogonalized by Newton-schulz, for whole matrices; see
    :class:`ds_layerwise.optimizers.rules.muon.Muon`.
    """

    rule: ClassVar[str] = "muon"
    family: ClassVar[str] = "muon"
