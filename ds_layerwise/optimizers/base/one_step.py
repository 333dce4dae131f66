"""The numbers, the states and the place of one update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.orthogonalize.tensor_shards import Axis, ShardPeers

State = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """The settings of a parameter group at this step. A scheduler may change any of them between
    steps.
    """

    lr: float
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    of_client: Mapping[str, Any] = field(default_factory=dict)
    """All settings in the group of a client optimizer, under the names of its class; empty for
    other optimizers.
    """


@dataclass(frozen=True)
class Site:
    """The place where an update runs."""

    fast_dtypes: frozenset[torch.dtype] = frozenset()
    """The dtypes in which the device multiplies much faster than in float32; see
    :func:`.optimizers.devices.fast_dtypes`.
    """
    cut: tuple[Axis, ShardPeers] | None = None
    """The axis along which tensor parallelism has cut the matrices, and the ranks with the other
    shards; None for whole matrices.
    """


#: The place of whole matrices, on a device on which no dtype is faster than float32.
ANYWHERE = Site()


class UpdateError(StepError):
    """An update that a rule cannot make.

    Args:
        index: the index of the parameter in the rule's lists. A rule does not know names.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index
