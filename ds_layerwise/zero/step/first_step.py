"""The check of ``layerwise.verify_first_step``: the first update after a start or a load is
compared with the update of a single process.

Note: what is compared
    * The averages at their owners, with a plain all-reduce of copies of the gradients that the
      backward passes left on each rank. They are compared parameter by parameter and element by
      element; the tolerance is the rounding error of sums with as many summands in the dtype on the
      wire. The norm of these averages gives the factor for gradients, which is compared too.
    * Masters, and states stored in float32, after the update, with those of a single process that
      updates the whole parameter from the same averages: no buffers, no ranks, no batching. It
      shares the rule with training, and the views in which the rule sees the parameter. A rank
      other than the owner computes these for each parameter, with its own settings.
    * The weights of every rank with the masters, exactly.

    So it finds a wrong transport, layout, buffer or setting of a single rank. It does not find a
    rule that is wrong on all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.recipe import Site, State, UpdateError
from ds_layerwise.process_exit import Attempt
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES, dtype_name
from ds_layerwise.ranks.owned.owned import MASTER
from ds_layerwise.ranks.owned.weight_writes import follow_
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.clip import Decision
from ds_layerwise.zero.step.update import Step, StepObserver

#: The bound of rounding errors. Those of a sum of n summands grow about like the root of n; this
#: many times that is no rounding error.
_SPREAD = 4.0

#: The tolerance relative to the largest change, if the rule multiplies in float32 or not at all.
_TOLERANCE = 1e-3
#: The same if the rule multiplies in half precision. Newton-Schulz amplifies the rounding of
#: directions near zero to full size.
_TOLERANCE_IN_HALF = 0.25
#: The states that do not depend on a matrix product.
_EXACT = ("momentum_buffer", "step")
#: The tolerance relative to the weights themselves, for updates smaller than their rounding.
_ROUNDING = 8 * 2.0**-24

#: A difference in a parameter: the parameter's number in the model, and a text.
_Difference = tuple[int, str]


@dataclass
class _Local:
    """The gradients that the backward passes of a step have left on one parameter of this rank."""

    last: Tensor
    """A copy of the newest gradient."""
    source: weakref.ref[Tensor]
    """The tensor that ``last`` is a copy of."""
    total: Any = 0.0
    """The sum of the earlier gradients."""
    sizes: Any = 0.0
    """The sum of their absolute values."""
    passes: int = 1

    def fold(self, dtype: torch.dtype) -> None:
        """Add the newest gradient to the sums; ``total`` is rounded to ``dtype``."""
        self.total = (self.last + self.total).to(dtype)
        self.sizes = self.last.abs().float() + self.sizes


class FirstStep(StepObserver):
    """Keeps the gradients that backward passes leave until the first update, and checks that
    update.
    """

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._owned = run.owned
        self._specs = run.planned.specs
        self._routes = run.planned.routes
        self._site = Site(run.products.dtypes)
        self.restart()

    def restart(self) -> None:
        """Check the next update."""
        self.looks = True
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of the current step, and what follows from them."""
        self._kept: dict[str, _Local] = {}
        # The masters and states that this rank has computed, by parameter, each with its tolerance.
        self._expected: dict[str, dict[str, tuple[Tensor, float]]] = {}

    @torch.no_grad()
    def saw_gradient(self, name: str, gradient: Tensor) -> None:
        """Keep the gradient that a backward pass has left on a parameter. Autograd may add to it
        later.
        """
        copy = gradient.detach().clone()
        source = weakref.ref(gradient)
        local = self._kept.setdefault(name, _Local(copy, source))
        if local.source() is not gradient:
            local.fold(self._sums_in(name))
            local.passes += 1
        local.last = copy
        local.source = source

    def _sums_in(self, name: str) -> torch.dtype:
        """Return the dtype that a rank adds up its own micro-batches in, where it does."""
        return DTYPES[self._run.settings.stored_as(dtype_name(self._run.params[name].dtype))]

    # --- before the update

    def before_update(self, step: Step) -> None:
        """Compare the averages, and compute the expected update.

        Raises:
            StepError: on every rank, if an average differs on any; nothing was updated.
        """
        self._compares = self.looks and not step.decision.skipped
        if self._compares and any(comm.gather_objects(self._run.grad_sync.by_hand, group=None)):
            self._compares = False
            comm.warn(
                "layerwise.verify_first_step waits for the next step: gradients of this one were "
                "set by hand"
            )
        if not self._compares:
            return
        most = max((local.passes for local in self._kept.values()), default=1)
        passes = max(comm.gather_objects(most, group=None))
        different = self._different_averages(passes)
        self.forget()
        self._raise_first(different, "nothing was updated")
        squares = self._compute_all(step)
        self._raise_first(self._different_factors(step.decision, squares), "nothing was updated")

    def _different_averages(self, passes: int) -> list[_Difference]:
        """Compare the averages at their owners with those of the gradients kept here.

        Args:
            passes: the largest number of backward passes of any rank.
        """
        run = self._run
        different = []
        for index, spec in enumerate(self._specs):
            name = spec.name
            group = run.group_of(name)
            both = torch.zeros(2, spec.numel, dtype=torch.float32, device=run.device)
            local = self._kept.pop(name, None)
            if local is not None:
                local.fold(self._sums_in(name))
                both[0].copy_(local.total.reshape(-1))
                both[1].copy_(local.sizes.reshape(-1))
            comm.sum_over_ranks(both, group=group)
            both.div_(run.settings.divide_by)
            travels = torch.finfo(DTYPES[spec.wire])
            summands = comm.size_of(group) * passes + 1
            # Values near the smallest number of the dtype are rounded to a multiple of it.
            both[1].mul_(_SPREAD * math.sqrt(summands) * travels.eps / 2).add_(
                summands * travels.tiny * travels.eps
            )
            piece = run.pieces.get(name)
            if piece is None:
                continue
            start = piece.param_start
            plain, bound = both[:, start : start + piece.numel]
            if text := _first_difference(self._owned.reduced.average(name), plain, bound, start):
                text = (
                    f"{name}: averaged gradient: {text}, according to an all-reduce of the "
                    "gradients of all ranks"
                )
                different.append((index, text))
        return different

    def _different_factors(
        self, decision: Decision, squares: Mapping[str, float]
    ) -> list[_Difference]:
        """Compare the factors of the decision with those that follow from the ``squares`` by norm
        group; "" for no group.
        """
        groups = self._run.config.norm_groups
        norm_groups = self._run.planned.norm_groups
        # Each factor comes from the common norm of these groups, with this bound.
        together = [key for key, group in groups.items() if group.gradient_clipping is None]
        counted = [("", ["", *together], decision.clip_grad, decision.factor)]
        for name, factor in decision.factors.items():
            key = norm_groups[name]
            counted.append((key, [key], groups[key].gradient_clipping or 0.0, factor))
        different = []
        for key, members, most, factor in counted:
            norm = math.sqrt(math.fsum(squares[member] for member in members))
            norm /= decision.loss_scale
            clip = min(1.0, most / (norm + 1e-6)) if most else 1.0
            expected = clip / decision.loss_scale
            if math.isfinite(norm) and not math.isclose(factor, expected, rel_tol=1e-4):
                text = (
                    f"gradients{f' of layerwise.norm_groups.{key}' * bool(key)} would be "
                    f"multiplied by {factor:g}, but their norm, {norm:g}, gives {expected:g}"
                )
                different.append((-1, text))
        return different

    def _compute_all(self, step: Step) -> dict[str, float]:
        """Compute the update of each parameter on one rank of its group. Return the sums of squares
        of averages by norm group; "" for no group.

        Raises:
            Exception: on every rank, if a rule refuses on any, or a script's optimizer raises.
        """
        run = self._run
        keys = ["", *run.config.norm_groups]
        squares = torch.zeros(len(keys), dtype=widest_float(), device=run.device)
        layout = run.planned.layout
        failed = Attempt()
        for index, spec in enumerate(self._specs):
            name = spec.name
            group = run.group_of(name)
            grad = run.whole(name, self._owned.reduced.average)
            norm = torch.linalg.vector_norm(grad, dtype=squares.dtype)
            key = run.planned.norm_groups.get(name, "")
            # Every rank of the group has the whole gradient.
            squares[keys.index(key)] += norm.square() / comm.size_of(group)
            held = self._gathered(name)
            weights = run.places.whole(name)
            bucket = layout.bucket_of(name)
            owner = index
            if bucket.whole:
                owner = bucket.owner(layout.slot(name)) // bucket.ep_size
            # Not on its owner, if there is another rank.
            if failed.error is None and comm.rank_of(group) == (owner + 1) % comm.size_of(group):
                # The other ranks go on to the next parameter.
                with failed:
                    self._compute(name, grad, held, weights, step)
        comm.raise_on_all_ranks(failed.error)
        sums = comm.sum_over_ranks(squares, group=run.settings.group).tolist()
        return dict(zip(keys, sums, strict=True))

    def _compute(self, name: str, grad: Tensor, held: State, weights: Tensor, step: Step) -> None:
        """Compute and keep the expected update of a parameter. ``grad`` and ``held`` are
        overwritten.

        Raises:
            StepError: its rule refuses; names the rule.
        """
        masters = held[MASTER]
        if weights.dtype != torch.float32:
            # Weights that a script has written count.
            follow_(masters, weights, in_mxfp8=self._owned.layout.bucket_of(name).in_mxfp8)
        before = {}
        for key, value in held.items():
            before[key] = value.clone()
        states = dict(held)
        del states[MASTER]
        decision = step.decision
        if name not in decision.frozen:
            grad.mul_(decision.factor_of(name))
            try:
                self._update_plainly(name, masters, grad, states, step)
            except UpdateError as error:
                raise StepError(f"{name}: {error}") from error
        if name in step.scaled:
            step.scaled[name].scale_(masters, 0)
        specs = self._routes[name].states(1)
        # A state stored in fewer bits was rounded since.
        self._expected[name] = {
            key: (value, self._most(name, key, before[key], value))
            for key, value in held.items()
            if key == MASTER or specs[key].kept_as is None
        }

    def _update_plainly(
        self, name: str, master: Tensor, grad: Tensor, state: State, step: Step
    ) -> None:
        """Update ``master``, 1-D, and ``state`` of a whole parameter in place with ``grad``, which
        is only read.
        """
        route = self._routes[name]
        shape = route.matrix_shape or master.shape
        hyper = step.hyper(route)
        for seen in route.views(master.view(shape), grad.view(shape), state):
            copy = seen.copy()
            route.recipe.update_([copy.param], [copy.grad], [copy.state], hyper, self._site)
            seen.take_back(copy)

    def _most(self, name: str, key: str, before: Tensor, expected: Tensor) -> float:
        """Return the tolerance for an element of the weights, or of the state ``key``, that was
        ``before`` and should be ``expected``.
        """
        if not expected.numel():
            return 0.0
        products = self._routes[name].recipe.products_in(self._site.fast_dtypes)
        in_half = products not in (None, torch.float32) and key not in _EXACT
        wide = widest_float()
        change = float((expected.to(wide) - before.to(wide)).abs().max())
        size = float(expected.abs().max())
        bound = (_TOLERANCE_IN_HALF if in_half else _TOLERANCE) * change + _ROUNDING * size
        return bound if math.isfinite(bound) else math.inf

    # --- after it

    def after_update(self, step: Step) -> None:
        """Compare masters, states and weights; do nothing if the update failed on any rank.

        Raises:
            StepError: on every rank, if anything differs on any.
        """
        if not self._compares:
            return
        self._run.param_sync.finish()
        if any(comm.gather_objects(step.failed, group=None)):
            self.forget()
            return
        different = []
        for index, spec in enumerate(self._specs):
            if text := self._difference(spec.name):
                different.append((index, f"{spec.name}: {text}"))
        self.looks = False
        self.forget()
        self._raise_first(different, "the update was made, so continue from a checkpoint")
        comm.report(
            f"the first update was verified: {len(self._specs)} parameters are as one process "
            "makes them"
        )

    def _difference(self, name: str) -> str | None:
        held = self._gathered(name)
        weights = self._run.places.whole(name)
        if text := _first_difference(weights, self._owned.weights_of(name, held[MASTER]), None):
            return f"weights: {text}, according to the float32 master of its owner"
        for key, (value, bound) in self._expected.get(name, {}).items():
            bounds = torch.full((value.numel(),), bound, dtype=widest_float(), device=value.device)
            if text := _first_difference(held[key].reshape(-1), value.reshape(-1), bounds):
                rule = self._routes[name].recipe.rule
                what = "weights" if key == MASTER else key
                return (
                    f"{what} after the update: {text}, according to {rule} on the whole parameter "
                    "in one process, with the settings of this rank"
                )
        return None

    # --- helpers that call collectives

    def _gathered(self, name: str) -> State:
        """Return the states and the master of a parameter, whole and 1-D, on every rank of its
        group.
        """
        run = self._run
        piece = run.pieces.get(name)
        route = self._routes[name]
        numel = math.prod(run.shapes[name])
        like_it = route.matrix_shape or (numel,)
        held = {}
        for key, state in route.states(numel).items():
            if not route.whole and state.shape == like_it:
                held[key] = run.whole(name, partial(self._owned.value, key=key))
                continue
            dtype: torch.dtype = getattr(torch, state.dtype)
            wide = torch.float32 if dtype.is_floating_point else torch.int64
            value = torch.zeros(
                state.shape, dtype=torch.promote_types(dtype, wide), device=run.device
            )
            if piece is not None and piece.param_start == 0:
                value.copy_(self._owned.value(name, key))
            comm.sum_over_ranks(value, group=run.group_of(name))
            held[key] = value.to(dtype=dtype, device="cpu" if state.on_host else value.device)
        held[MASTER] = run.whole(name, self._owned.value)
        return held

    def _raise_first(self, different: Sequence[_Difference], state: str) -> None:
        """Raise the difference in the first parameter, in model order, that any rank found; the
        same error on all ranks.
        """
        everyone = comm.gather_objects(min(different, default=None), group=None)
        found = [(*first, rank) for rank, first in enumerate(everyone) if first is not None]
        if found:
            _, text, rank = min(found)
            raise StepError(
                f"the first step differs from that of a single process: {text} (found by rank "
                f"{rank}); {state}. If nothing but backward passes has changed gradients, this is "
                "a fault of this machine or of this package: report it with the start-up table. "
                'layerwise.reduction "ordered" adds up in another way; layerwise.verify_first_step '
                "false compares nothing"
            )


def _first_difference(
    real: Tensor, expected: Tensor, bound: Tensor | None, origin: int = 0
) -> str | None:
    """Describe where ``real`` differs from ``expected`` by more than ``bound``, or at all if there
    is no bound; None if nowhere.

    Args:
        origin: the offset of element numbers in the text.
    """
    same = (real == expected) | (real.isnan() & expected.isnan())
    if bound is not None:
        same |= (real.to(bound.dtype) - expected.to(bound.dtype)).abs() <= bound
    if bool(same.all()):
        return None
    places = (~same).nonzero()
    place = int(places[0])
    apart = f" and may be {float(bound[place]):.2g} apart" if bound is not None else ""
    return (
        f"element {origin + place} is {float(real[place]):.6g} instead of "
        f"{float(expected[place]):.6g}{apart}, as are {len(places)} of {real.numel()}"
    )
