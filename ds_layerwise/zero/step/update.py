"""The update of a step: what this rank owns, bucket by bucket, each sent as soon as all of it is
new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.ranks.comm.profiling import profiled
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.ranks.owned.update_stats import Watch
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.zero.step.clip import Decision
from ds_layerwise.zero.step.interrupted import Interrupted
from ds_layerwise.zero.step.step_timing import timed


class Update:
    """Updates the parameters that this rank owns and sends them to the others.

    Args:
        optimizer: whose groups say with which hyper-parameters.
        timers: the engine's.
        zero_grad: what forgets the gradients of a step that failed.
    """

    def __init__(
        self,
        optimizer: LayerWiseOptimizer,
        owned: Owned,
        param_sync: ParamSync,
        *,
        interrupted: Interrupted,
        timers: Any,
        zero_grad: Callable[[], None],
    ) -> None:
        self._optimizer, self._owned, self._param_sync = optimizer, owned, param_sync
        self._interrupted, self._timers, self._zero_grad = interrupted, timers, zero_grad

    def run(
        self,
        step: int,
        decision: Decision,
        scaled: Mapping[str, Factors],
        watch: Watch | None = None,
    ) -> dict[str, float]:
        """Update everything with the averaged gradients as the ranks have decided, then multiply
        ``scaled``, and return what ``watch`` has seen.

        Every rank must call this at the same point. Parameters may still be under way when it
        returns, where they are waited for at their first use.

        Raises:
            Exception: what ended an update of this rank, after the others have got all that they
                wait for.
        """
        left = list(range(len(self._owned.pieces)))
        groups = self._optimizer.groups_now()
        with timed(self._timers, "optimizer_step"):
            with self._interrupted.at(step), self._owned.updating():
                # The forward pass needs the parameters of the last bucket first.
                while left:
                    with profiled("update"):
                        self._owned.update(
                            left[-1],
                            groups,
                            decision.factor,
                            step=step,
                            factors=decision.factors,
                            leave_out=decision.frozen,
                            scaled=scaled,
                            watch=watch,
                        )
                    self._param_sync.launch(left[-1])
                    left.pop()
                self._optimizer.mark_step()
        if self._interrupted:
            try:
                # The others wait for what is left.
                self._param_sync.send(reversed(left))
                if watch is not None:
                    watch.settle(failed=True)
                self._zero_grad()
            finally:
                # If the others are gone by now, that is no more than what followed.
                self._interrupted.raise_original()
        with timed(self._timers, "optimizer_allgather"):
            self._param_sync.leave_under_way()
        return {} if watch is None else watch.settle()
