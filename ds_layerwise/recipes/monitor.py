"""What is told of updates, on request: ``layerwise.monitor``."""

from __future__ import annotations

from typing import ClassVar

from ds_layerwise.recipes.base.fields import Count, Section


class Monitor(Section):
    """What is told of updates, on request: of each optimizer, by name, over all parameters that it
    trains.
    """

    example: ClassVar[str] = '{"update_rms": true}'

    update_rms: bool = False
    """The root mean square of what an update changes float32 weights by, learning rate and weight
    decay included.
    """
    momentum_norm: bool = False
    """The norm of the momentum (``momentum_buffer``, or ``exp_avg``) after an update."""
    every: Count = 1
    """After how many updates each."""

    @property
    def asks(self) -> bool:
        """Whether anything is to be told."""
        return self.update_rms or self.momentum_norm
