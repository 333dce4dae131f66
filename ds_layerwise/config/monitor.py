"""``layerwise.monitor``: optional statistics of updates."""

from __future__ import annotations

from ds_layerwise.optimizers.fields import Count, Section


class Monitor(Section):
    """Statistics of updates, for each optimizer by name, over all parameters that it trains."""

    example = '{"update_rms": true}'

    update_rms: bool = False
    """Report the root mean square of the changes of float32 weights, including learning rate and
    weight decay.
    """
    momentum_norm: bool = False
    """Report the norm of the momentum (``momentum_buffer``, or ``exp_avg``) after an update."""
    every: Count = 1
    """The number of updates from one report to the next."""

    @property
    def asks(self) -> bool:
        """True if anything is to be reported."""
        return self.update_rms or self.momentum_norm
