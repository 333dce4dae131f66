"""What a config says of kinds of parameters: of vectors, of what element-wise recipes train, of embeddings and heads.

Weight decay of a parameter, first that is there: what an override sets; what its parameter group says for itself; none
for vectors, unless ``decay_vectors``; ``scalar_weight_decay`` for element-wise recipes; the run's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ds_layerwise.config import LayerWiseConfig, OptimizerConfig
from ds_layerwise.plan.matching import Changes
from ds_layerwise.plan.routes import Route

#: What model families call a norm over queries or keys, with what is in it.
QK_NORM = re.compile(r"(.*\.)?((q|k|query|key)_?(layer_?norm|norm|ln)|(norm|ln)_(q|k))(\..+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByKind:
    """The keys of a config that are for kinds of parameters, as it has them."""

    decay_vectors: bool = False
    scalar_weight_decay: float | None = None
    apply_wd_to_qk_layernorm: bool = False
    decoupled_lr: float | None = None
    decoupled_min_lr: float | None = None

    @classmethod
    def of(cls, optimizer: OptimizerConfig, layerwise: LayerWiseConfig) -> ByKind:
        """What the two sections say."""
        return cls(decay_vectors=optimizer.decay_vectors, scalar_weight_decay=optimizer.scalar_weight_decay,
                   apply_wd_to_qk_layernorm=layerwise.apply_wd_to_qk_layernorm, decoupled_lr=layerwise.decoupled_lr,
                   decoupled_min_lr=layerwise.decoupled_min_lr)

    def asks_for_tables(self) -> str | None:
        """The first key that is for embeddings and output heads, if one is given."""
        return next((key for key in _OF_TABLES if getattr(self, key) is not None), None)

    def change_table(self, changes: Changes) -> None:
        """Add to ``changes`` of an embedding or output head what is said of those.

        Raises:
            RoutingError: an override says something else.
        """
        for key, sets in _OF_TABLES.items():
            if (value := getattr(self, key)) is not None:
                changes.add(f"layerwise.{key}", {sets: value})

    def decayed(self, route: Route, shape: tuple[int, ...], *, own_decay: bool = False) -> Route:
        """``route`` of a parameter of ``shape``, on which overrides have had their say, with its weight decay.

        Args:
            own_decay: whether its parameter group says for itself what its weight decay is.
        """
        if route.weight_decay is not None or own_decay:
            return route
        exempt = len(shape) < 2 and not self.decay_vectors
        if exempt and not (self.apply_wd_to_qk_layernorm and QK_NORM.fullmatch(route.name)):
            return replace(route, weight_decay=0.0)
        return route if route.whole else replace(route, weight_decay=self.scalar_weight_decay)


#: What is for embeddings and output heads, and what of them it sets.
_OF_TABLES = {"decoupled_lr": "lr", "decoupled_min_lr": "min_lr"}
