"""``layerwise.verify_first_step``: the first update after a start or a load, beside what one
process would have made.

Note: what is compared
    * the averages at their owners with a plain all-reduce, parameter by parameter, of copies of
      what the backward passes have left on each rank, element by element, as far apart as sums of
      so many summands may be in the dtype that travels; and with their norm the factor that
      gradients are multiplied with;
    * masters, and states that are kept in float32, after the update with those of
      :class:`.reference_step.PlainStep` on the whole parameter, from the same averages. For each
      parameter another rank than its owner computes that, with settings of its own;
    * the weights of every rank with the masters, exactly.

    So a wire, a layout, a buffer or a setting of a single rank that is wrong is found, and a rule
    that is wrong for all is not.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import StepError
from ds_layerwise.optimizers.devices import widest_float
from ds_layerwise.optimizers.param_groups import LayerWiseOptimizer
from ds_layerwise.optimizers.rule import State, UpdateError
from ds_layerwise.plan.layout.layout import ParamSpec
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.buffers import DTYPES
from ds_layerwise.ranks.owned.owned import Owned
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.ranks.sync.grad_sync import EagerGradSync, GradSync
from ds_layerwise.ranks.sync.param_sync import ParamSync
from ds_layerwise.zero.setup.run_plan import Planned
from ds_layerwise.zero.setup.run_settings import Settings
from ds_layerwise.zero.step.clip import Decision
from ds_layerwise.zero.step.interrupted import Interrupted
from ds_layerwise.zero.verify.reference_step import PlainStep

#: Rounding errors of a sum of n summands grow about like the root of n; so many times that is no
#: rounding.
_SPREAD = 4.0


@dataclass(slots=True)
class _Local:
    """What the backward passes of a step have left of one gradient on this rank."""

    last: Tensor
    """A copy of the newest, and whose copy it is."""
    whose: weakref.ref[Tensor]
    total: Tensor | None = None
    """The sum of those before, and of their absolute values."""
    sizes: Tensor | None = None
    passes: int = 1

    def fold(self, dtype: torch.dtype) -> None:
        """Add the newest to the sums, which are made in ``dtype``."""
        added = self.last.reshape(-1)
        if self.total is None or self.sizes is None:
            self.total, self.sizes = added.to(dtype, copy=True), added.abs().float()
        else:
            self.total.add_(added)
            self.sizes.add_(added.abs())
        self.last = added[:0]


#: Masters (None), and states by name, of a parameter.
_Values = dict[str | None, Tensor]


class FirstStep:
    """Keeps what the backward passes leave until the first update, and compares that.

    Args:
        params: the trained parameters by name.
        groups: by how many ranks in a row hold other experts, the ranks that hold the same.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        owned: Owned,
        planned: Planned,
        optimizer: LayerWiseOptimizer,
        config: LayerWiseConfig,
        settings: Settings,
        *,
        groups: comm.Groups,
        fast_dtypes: frozenset[torch.dtype],
    ) -> None:
        self._params, self._owned, self._planned, self._optimizer = (
            params,
            owned,
            planned,
            optimizer,
        )
        self._norm_groups, self._settings, self._groups = config.norm_groups, settings, groups
        self._plain = {
            spec.name: PlainStep(planned.routes[spec.name], spec.numel, fast_dtypes=fast_dtypes)
            for spec in planned.specs
        }
        self._pieces = {piece.name: piece for pieces in owned.pieces for piece in pieces}
        # By parameter and state, None for the master, what this rank has computed, and how far
        # others may be from it.
        self._expected: dict[str, dict[str | None, tuple[Tensor, float]]] = {}
        self.arm()

    def arm(self) -> None:
        """Compare the next update."""
        self.is_armed = True
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of the step at hand."""
        self._kept: dict[str, _Local] = {}

    @torch.no_grad()
    def see(self, name: str, grad: Tensor | None) -> None:
        """Keep what a backward pass has left on a parameter, where autograd may add to it later
        on.
        """
        if not self.is_armed or grad is None:
            return
        local = self._kept.get(name)
        if local is None:
            self._kept[name] = _Local(grad.detach().clone(), weakref.ref(grad))
            return
        if local.whose() is not grad:
            local.fold(self._sums_in(name))
            local.passes += 1
        local.last, local.whose = grad.detach().clone(), weakref.ref(grad)

    def _sums_in(self, name: str) -> torch.dtype:
        """What a rank adds up its own micro-batches in, where it does."""
        return (
            torch.float32
            if self._settings.stage == 2
            else (self._settings.accumulation_dtype or self._params[name].dtype)
        )

    # --- before the update

    def before(
        self, decision: Decision, scaled: Mapping[str, Factors], *, by_hand: bool, clip_grad: float
    ) -> bool:
        """Compare averages, and compute what the update is to be. Every rank must call this at the
        same point.

        Args:
            scaled: by parameter, what masters are multiplied with after their update.
            by_hand: whether some gradients of this step come from elsewhere than from backward
                passes.
            clip_grad: the bound of the norm; 0 for none.

        Returns:
            Whether :meth:`after` is to follow.

        Raises:
            StepError: on every rank, if on any an average differs; nothing was updated.
        """
        if not self.is_armed:
            return False
        if any(comm.gather_objects(by_hand, group=None)):
            if comm.rank_of(None) == 0:
                logger.warning(
                    "ds_layerwise: layerwise.verify_first_step waits for the next step: gradients "
                    "of this one were set by hand"
                )
            return False
        norms = _Norms()
        passes = max(
            comm.gather_objects(
                max((local.passes for local in self._kept.values()), default=1), group=None
            )
        )
        found = self._different_averages(norms, passes)
        self.forget()
        self._raise_first(found, "nothing was updated")
        self._raise_first(
            self._different_factors(decision, norms, clip_grad), "nothing was updated"
        )
        groups, failed = self._optimizer.groups_now(), Interrupted()
        for index, spec in enumerate(self._planned.specs):
            grad, (masters, states) = (
                self._whole(spec, self._owned.reduced.piece),
                self._gathered(spec),
            )
            if not failed and comm.rank_of(self._groups[spec.ep_size]) == self._comparing(
                index, spec
            ):
                # The others are on their way to the next parameter, and an optimizer of the script
                # raises anything.
                with failed:
                    self._compute(spec, grad, masters, states, decision, scaled, groups)
        with comm.Alike(None):
            failed.raise_original()
        return True

    def _different_averages(self, norms: _Norms, passes: int) -> list[tuple[int, str]]:
        found = []
        for index, spec in enumerate(self._planned.specs):
            plain, bound = self._plain_average(spec, passes)
            shared_by = comm.size_of(self._groups[spec.ep_size])
            norms.add(self._planned.norm_groups.get(spec.name), plain, bound, shared_by)
            piece = self._pieces.get(spec.name)
            if piece is None:
                continue
            part = slice(piece.param_start, piece.param_start + piece.numel)
            mine = self._owned.reduced.piece(spec.name)
            if told := _first_difference(mine, plain[part], bound[part], piece.param_start):
                found.append(
                    (
                        index,
                        f"{spec.name}: of its averaged gradient, {told}, by an all-reduce of what "
                        "the backward passes of all ranks have left",
                    )
                )
        return found

    def _plain_average(self, spec: ParamSpec, passes: int) -> tuple[Tensor, Tensor]:
        """The average over ranks of what was kept, and how far an element of another sum may be
        from it; 1-D.

        Args:
            passes: how many backward passes there were at most.
        """
        group, local = self._groups[spec.ep_size], self._kept.pop(spec.name, None)
        both = torch.zeros(2, spec.numel, dtype=torch.float32, device=self._owned.device)
        if local is not None:
            if local.passes == 1:
                both[0].copy_(local.last.reshape(-1).to(self._sums_in(spec.name)))
                both[1].copy_(both[0].abs())
            else:
                local.fold(self._sums_in(spec.name))
                for own, value in zip(both, (local.total, local.sizes), strict=True):
                    if value is not None:
                        own.copy_(value)
        comm.sum_over_ranks(both, group=group)
        both.div_(self._settings.divide_by)
        travels, summands = torch.finfo(DTYPES[spec.wire]), comm.size_of(group) * passes + 1
        # What is near the least that the dtype has is rounded to that.
        both[1].mul_(_SPREAD * math.sqrt(summands) * travels.eps / 2).add_(
            summands * travels.tiny * travels.eps
        )
        return both[0], both[1]

    def _different_factors(
        self, decision: Decision, norms: _Norms, clip_grad: float
    ) -> list[tuple[int, str]]:
        keys, scale = ["", *self._norm_groups], decision.loss_scale
        squares = norms.summed(keys, self._settings.group, self._owned.device)
        clips = {
            key: group.gradient_clipping or 0.0
            for key, group in self._norm_groups.items()
            if group.is_apart
        }
        used = {
            self._planned.norm_groups[name]: factor for name, factor in decision.factors.items()
        }
        found = []
        for key, most in {"": clip_grad, **clips}.items():
            together = [key] if key else [each for each in keys if each not in clips]
            norm, apart = (
                math.sqrt(math.fsum(squares[each][i] for each in together)) / scale for i in (0, 1)
            )
            if not math.isfinite(norm):
                continue
            apart, factor = apart + 1e-5 * norm, used.get(key) if key else decision.factor
            low, high = (
                min(1.0, most / (each + 1e-6) if most else 1.0) / scale
                for each in (norm + apart, max(norm - apart, 0.0))
            )
            if factor is not None and not low * (1 - 1e-5) <= factor <= high * (1 + 1e-5):
                found.append(
                    (
                        -1,
                        f"gradients{f' of layerwise.norm_groups.{key}' * bool(key)} were to be "
                        f"multiplied with {factor:g}, which by their norm, {norm:g}, is {high:g}",
                    )
                )
        return found

    def _compute(
        self,
        spec: ParamSpec,
        grad: Tensor,
        masters: Tensor,
        states: State,
        decision: Decision,
        scaled: Mapping[str, Factors],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Keep what the update is to make of a parameter; all but ``decision`` and ``groups`` is
        overwritten.

        Raises:
            StepError: its rule refuses, which it names.
        """
        name, plain, weights = (
            spec.name,
            self._plain[spec.name],
            self._params[spec.name].detach().reshape(-1),
        )
        if weights.dtype != torch.float32:
            # Who has written weights means them.
            masters = torch.where(masters.to(weights.dtype) == weights, masters, weights.float())
        now: _Values = {None: masters, **states}  # type: ignore[dict-item]
        before = {key: value.clone() for key, value in now.items()}
        if name not in decision.frozen:
            try:
                plain.update_(
                    masters,
                    grad.mul_(decision.factors.get(name, decision.factor)),
                    states,
                    groups[self._planned.routes[name].group],
                )
            except UpdateError as error:
                raise StepError(f"{name}: {error}") from error
        if name in scaled:
            scaled[name].scale_(masters, 0)
        # What is kept in fewer bits was rounded since.
        self._expected[name] = {
            key: (value, plain.most(key, before[key], value))
            for key, value in now.items()
            if key is None or plain.states[key].kept_as is None
        }

    def _comparing(self, index: int, spec: ParamSpec) -> int:
        """Which rank of its group compares the update of a parameter: not its owner, where there is
        another.
        """
        bucket, size = (
            self._owned.layout.bucket_of(spec.name),
            comm.size_of(self._groups[spec.ep_size]),
        )
        owner = (
            bucket.owner(self._owned.layout.slot(spec.name)) // spec.ep_size
            if bucket.whole
            else index
        )
        return (owner + 1) % size

    # --- after it

    def after(self, *, failed: bool = False) -> None:
        """Compare masters, states and weights. Every rank must call this at the same point, nothing
        under way.

        Args:
            failed: whether the update ended on this rank before its time: then no rank compares
                anything.

        Raises:
            StepError: on every rank, if on any something differs.
        """
        if any(comm.gather_objects(failed, group=None)):
            self._expected.clear()
            return
        found: list[tuple[int, str]] = []
        for index, spec in enumerate(self._planned.specs):
            if told := self._difference(spec):
                found.append((index, f"{spec.name}: {told}"))
        self.is_armed = False
        self._expected.clear()
        self._raise_first(found, "the update was made, so go on from a checkpoint")

    def _difference(self, spec: ParamSpec) -> str | None:
        masters, states = self._gathered(spec)
        weights = self._params[spec.name].detach().reshape(-1)
        if told := _first_difference(weights, masters.to(weights.dtype), None):
            return f"of its weights, {told}, in the float32 master of its owner"
        expected = self._expected.pop(spec.name, None)
        if expected is None:
            return None
        for key, (value, bound) in expected.items():
            real, flat = (masters if key is None else states[key]).reshape(-1), value.reshape(-1)
            if told := _first_difference(
                real, flat, torch.full_like(flat, bound, dtype=widest_float())
            ):
                rule = self._planned.routes[spec.name].recipe.rule
                return (
                    f"of its {'weights' if key is None else key} after the update, {told}, by "
                    f"{rule} on the whole parameter in one process, with the settings of this rank"
                )
        return None

    # --- together

    def _whole(self, spec: ParamSpec, held: Callable[[str], Tensor]) -> Tensor:
        """What the ranks hold of a parameter, 1-D, on all of them.

        Args:
            held: by name of a parameter, what this rank holds, 1-D.
        """
        whole, name = (
            torch.zeros(spec.numel, dtype=torch.float32, device=self._owned.device),
            spec.name,
        )
        if (mine := self._pieces.get(name)) is not None:
            whole[mine.param_start : mine.param_start + mine.numel].copy_(held(name))
        return comm.sum_over_ranks(whole, group=self._groups[spec.ep_size])

    def _gathered(self, spec: ParamSpec) -> tuple[Tensor, State]:
        """The whole master, 1-D, and whole states of a parameter, on every rank of its group."""
        name, plain, states = spec.name, self._plain[spec.name], {}
        whole = self._planned.routes[name].whole
        for key, state in plain.states.items():
            if not whole and plain.is_like_the_parameter(key):
                states[key] = self._whole(spec, partial(self._owned.value, key=key))
                continue
            dtype: torch.dtype = getattr(torch, state.dtype)
            value = torch.zeros(
                plain.shape_of(key),
                dtype=torch.float64
                if dtype == torch.float64
                else torch.float32
                if dtype.is_floating_point
                else torch.int64,
                device=self._owned.device,
            )
            if (mine := self._pieces.get(name)) is not None and mine.param_start == 0:
                value.copy_(self._owned.value(name, key))
            comm.sum_over_ranks(value, group=self._groups[spec.ep_size])
            states[key] = value.to(dtype=dtype, device="cpu" if state.on_host else value.device)
        return self._whole(spec, self._owned.value), states

    def _raise_first(self, found: Sequence[tuple[int, str]], state: str) -> None:
        """Raise what the first parameter differs in, in the order of the model, found by any rank;
        the same on all.
        """
        everyone = comm.gather_objects(min(found, default=None), group=None)
        first = min(
            ((*each, rank) for rank, each in enumerate(everyone) if each is not None), default=None
        )
        if first is not None:
            self._expected.clear()
            raise StepError(
                f"the first step is not what one process would have made: {first[1]} (found by "
                f"rank {first[2]}); "
                f"{state}. If nothing but backward passes has changed gradients, this is a fault "
                "of this machine or of "
                'this package: report it with the start-up table. layerwise.reduction "ordered" '
                "adds up in another "
                "way; layerwise.verify_first_step false compares nothing"
            )


@contextmanager
def compared(
    first: FirstStep | None,
    decision: Decision,
    grad_sync: GradSync | EagerGradSync,
    param_sync: ParamSync,
    *,
    scaled: Mapping[str, Factors],
    clip: float,
) -> Iterator[None]:
    """Around an update: let ``first``, if there is one, compare it. Every rank must enter this at
    the same point.

    Raises:
        StepError: as :meth:`FirstStep.before` and :meth:`FirstStep.after` do.
    """
    compares = first is not None and first.before(
        decision, scaled, by_hand=grad_sync.by_hand, clip_grad=clip
    )
    update = Interrupted()
    with update:
        yield
    try:
        if first is not None and compares:
            # Also where it has failed: the others are on their way to compare it.
            param_sync.finish()
            first.after(failed=bool(update))
    finally:
        # If the others are gone by now, that is no more than what followed.
        update.raise_original()


class _Norms:
    """Squares of averages, and of how far they may be off, by norm group; "" for none."""

    def __init__(self) -> None:
        self._squares: dict[str, list[Tensor]] = {}

    def add(self, key: str | None, average: Tensor, bound: Tensor, shared_by: int) -> None:
        """Count a parameter that so many ranks count."""
        both = torch.stack(
            [
                torch.linalg.vector_norm(each, dtype=widest_float()).square()
                for each in (average, bound)
            ]
        )
        self._squares.setdefault(key or "", []).append(both / shared_by)

    def summed(
        self, keys: Sequence[str], group: comm.Group, device: torch.device
    ) -> dict[str, list[float]]:
        """Both sums over all ranks, by norm group."""
        none = torch.zeros(2, dtype=widest_float(), device=device)
        sums = torch.stack(
            [torch.stack([none, *self._squares.get(key, ())]).sum(0) for key in keys]
        )
        found: list[list[float]] = comm.sum_over_ranks(sums, group=group).tolist()
        return dict(zip(keys, found, strict=True))


def _first_difference(
    real: Tensor, expected: Tensor, bound: Tensor | None, origin: int = 0
) -> str | None:
    """Where ``real`` is further from ``expected`` than ``bound``, or at all; None if nowhere.

    Args:
        origin: what is added to the number of an element.
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
