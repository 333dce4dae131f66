"""The largest attention logits of a step. They are recorded in forward passes, reduced over ranks
once, reported, and used for clipping.

Note: which forward passes count
    Those of modules in training, over all micro-batches and all ranks that hold the module. The
    maximum stays on the device until the step. Every step, also a skipped one, forgets the logits
    recorded before it: after a skipped step the weights are the same, and the next forward passes
    measure them anew.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError, RoutingError, StepError
from ds_layerwise.output import announce
from ds_layerwise.parallel import sequence
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.routing.attention import (
    Attention,
    Scaled,
    attentions_of,
    implementation_of,
)
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.attention_hook import MEASURED, is_measured
from ds_layerwise.zero.step.update import Step, StepObserver

#: The number of updates that may pass without a logit of a module; layers may be dropped at random.
_PATIENCE = 10


class AttentionLogits(StepObserver):
    """Records, reduces and reports the largest attention logits of a model, and clips by them.

    Raises:
        RoutingError, ConfigError: on every rank; see :func:`.routing.attention.attentions_of`.
    """

    def __init__(self, run: RunState) -> None:
        self.clip = run.config.qk_clip
        self.measures = self.clip is not None or run.config.log_max_attention_logit
        self.largest: dict[str, float] = {}
        """The largest logits over all ranks and parts of the model in the last step that was not
        skipped, by module.
        """
        self._run = run
        self._updates = 0
        self._warned = False
        if not self.measures:
            return
        with comm.errors_on_all_ranks():
            self._attentions = attentions_of(
                run.model, self.clip, trained=run.params.keys(), tp_size=run.settings.tp_size
            )
            for scaled in chain(*(attention.scaled for attention in self._attentions)):
                # Such a rule restores the norm of weights, which undoes the scaling.
                if getattr(run.planned.routes[scaled.name].recipe, "hyperball", None) is not None:
                    raise RoutingError(
                        f"layerwise.qk_clip scales {scaled.name} down, but hyperball restores its "
                        "norm; remove one of the two, or set hyperball to null for queries and "
                        "keys in layerwise.overrides"
                    )
        self._compare()
        self._outputs: dict[str, tuple[Tensor, Tensor, int, Any]] = {}
        self._places: dict[nn.Module, tuple[Attention, slice]] = {}
        start = 0
        for attention in self._attentions:
            self._places[attention.module] = attention, slice(start, start + attention.units)
            start += attention.units
            for scaled in attention.scaled:
                name = scaled.name
                # verify_first_step also needs parameters that this rank does not own.
                if name in run.pieces or run.config.verify_first_step:
                    self._outputs[name] = _indices(scaled, run.shapes[name], run.device)
        self._others = Attention("", run.model)
        self._sequence_group = sequence.group_of(run.engine())
        # The last element is for all modules that need not be known.
        self._noted = torch.full((start + 1,), -math.inf, dtype=torch.float32, device=run.device)
        self._by_path = dict(run.model.named_modules())
        # Also attention that needs no entry counts where nothing is clipped.
        self._watches = list(self._places if self.clip else self._by_path.values())
        MEASURED.watch(self._watches, self._note_measured)
        weakref.finalize(self, MEASURED.forget).atexit = False

    def _compare(self) -> None:
        """Gather the attention modules of all parts of the model.

        Raises:
            ConfigError: an entry of the config matches no module of any part.
        """
        everywhere = {}
        for attention in self._attentions:
            everywhere[attention.name] = (attention.entry, bool(attention.scaled))
        if self._run.settings.model_group is not None:
            parts = comm.gather_objects(everywhere, group=self._run.settings.model_group)
            # In the order of ranks, which is the same on all of them.
            everywhere = {}
            for part in parts:
                everywhere |= part
        # "" is for modules that need not be known.
        self._everywhere = [*everywhere, ""]
        # By module that is clipped, the number of the last update with a logit of it.
        self._last = {name: 0 for name, (_, clipped) in everywhere.items() if clipped}
        used = {entry for entry, _ in everywhere.values()}
        for index, entry in enumerate(self.clip.attention if self.clip else ()):
            if entry.name not in used:
                raise ConfigError(
                    f"layerwise.qk_clip.attention[{index}].name is {entry.name!r}, and no module "
                    "is called so; correct it, or remove the entry"
                )

    def destroy(self) -> None:
        """Stop watching modules."""
        MEASURED.forget(self._note_measured)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def note(self, attention: nn.Module | str, largest: Any) -> None:
        """Record the largest logits of a forward pass. Nothing happens for a module in evaluation
        mode.

        Args:
            attention: the module, or its path in the model.
            largest: (heads,), by query head on this rank, after scaling and before the softmax;
                -inf for a head without logits.

        Raises:
            StepError: no setting needs logits, the module is unknown, or it has another number of
                heads.
        """
        if not self.measures:
            raise StepError(
                "attention logits are noted where layerwise.qk_clip or "
                "layerwise.log_max_attention_logit is set; set one, or do not call "
                "note_attention_logits"
            )
        module: Any = attention
        name: Any = type(attention)
        if isinstance(attention, str):
            module = self._by_path.get(attention)
            name = attention
        if module is not None and not module.training:
            return
        found, place = self._places.get(module, (self._others, slice(-1, None)))
        if found is self._others and self.clip is not None:
            known = ", ".join(known.name for known in self._attentions)
            raise StepError(
                f"note_attention_logits got {name}, which is not among the attention modules of "
                f"this model: {known or 'none'}"
            )
        noted = self._noted[place]
        if not isinstance(largest, Tensor):
            largest = torch.as_tensor(largest, dtype=noted.dtype, device="cpu")
        values = largest.detach().to(noted).reshape(-1)
        if found.heads not in (None, values.numel()):
            raise StepError(
                f"note_attention_logits got {values.numel()} logits for {found.name}, which "
                f"has {found.heads} heads on this rank; give the largest of each"
            )
        by_unit = values.reshape(found.units, -1).amax(1)
        # A maximum over ranks may lose a nan, so it becomes inf.
        by_unit.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        torch.maximum(noted, by_unit, out=noted)

    def _note_measured(self, module: nn.Module, largest: Tensor) -> None:
        """Note the logits of attention of transformers, of which a rank of a sequence group has its
        share of the heads.
        """
        group = self._sequence_group
        if self.clip is None or group is None:
            self.note(module, largest)
        else:
            # Ulysses deals heads out in the order of ranks.
            by_rank = largest.new_full((comm.size_of(group), largest.numel()), -math.inf)
            by_rank[comm.rank_of(group)] = largest
            self.note(module, by_rank)

    def restart(self) -> None:
        """Forget the logits recorded since the last step: they belong to old weights."""
        self._noted.fill_(-math.inf)

    def before_update(self, step: Step) -> None:
        """Reduce and report the recorded logits, and set the scaling factors. A skipped step drops
        the logits.

        Raises:
            StepError: on every rank, if a logit is not finite, or a module never had one.
            ConfigError: on every rank, if the first update has no logits at all.
        """
        if step.decision.skipped:
            self.restart()
            return
        step.scaled.update(self._settle(step.decision.frozen))
        if self.largest:
            label = "max_attention_logit"
            step.values[label] = max(self.largest.values())
            for name, value in self.largest.items():
                if name:
                    step.values[f"{label}/{name}"] = value

    def _settle(self, frozen: Collection[str]) -> dict[str, Factors]:
        """Reduce the recorded logits over ranks, and forget them. Every rank must call this at the
        same point.

        Args:
            frozen: the parameters that are not updated in this step.

        Returns:
            The factors by parameter, for at least the parameters of which this rank holds a piece.
        """
        settings = self._run.settings
        reduced = comm.max_over_ranks(self._noted.clone(), group=settings.group)
        self.restart()
        own = dict.fromkeys(self._everywhere, torch.full_like(reduced[-1], -math.inf))
        own[""] = reduced[-1]
        for attention, place in self._places.values():
            own[attention.name] = reduced[place].max()
        largest = torch.stack(list(own.values()))
        if settings.model_group is not None:
            comm.max_over_ranks(largest, group=settings.model_group)
        # One transfer, so that the host waits once.
        values = torch.cat([largest, reduced]).tolist()
        by_module = dict(zip(own, values))
        self._judge(by_module)
        self.largest = {name: value for name, value in by_module.items() if value > -math.inf}
        if self.clip is None:
            return {}
        return self._scaled(reduced, values[len(largest) :], frozen, self.clip.threshold)

    def _scaled(
        self, reduced: Tensor, by_unit: list[float], frozen: Collection[str], threshold: float
    ) -> dict[str, Factors]:
        factors = {}
        left = []
        for attention, place in self._places.values():
            if max(by_unit[place]) <= threshold:
                continue
            names = {scaled.name for scaled in attention.scaled}
            if not names.isdisjoint(frozen):
                left.append(attention.name)
                continue
            units = threshold / reduced[place].clamp(min=threshold)
            for name in names & self._outputs.keys():
                unit, power, cols, axis = self._outputs[name]
                factors[name] = Factors(units[unit] ** power, axis, cols)
        if left and not self._warned and self._run.rank == 0:
            self._warned = True
            announce(
                f"ds_layerwise: queries or keys of {min(left)} were frozen after the start, and "
                "are not clipped"
            )
        return factors

    def _judge(self, largest: Mapping[str, float]) -> None:
        """Raise an error for logits that clipping cannot handle.

        Raises:
            StepError, ConfigError: see :meth:`before_update`.
        """
        self._updates += 1
        for name in self._last:
            if largest[name] > -math.inf:
                self._last[name] = self._updates
        for name, value in largest.items():
            if value == math.inf:
                raise StepError(
                    f"an attention logit of {name or 'the model'} is not finite, though all "
                    "gradients are; look for what makes it, or leave layerwise.qk_clip and "
                    "layerwise.log_max_attention_logit out"
                )
        waits = self.clip is None or not all(self._last.values())
        if waits and self._updates == 1 and max(largest.values()) == -math.inf:
            found = sorted(set(map(implementation_of, self._watches)) - {None})
            name = next(filter(is_measured, found), "sdpa")
            raise ConfigError(
                "layerwise.qk_clip and layerwise.log_max_attention_logit need attention logits of "
                "modules in training, and none came in the first update. Of transformers, 'sdpa' "
                "and flash attention are measured; this model attends by "
                f"{' and '.join(found) or 'none'}. Call ds_layerwise.measure_attention({name!r}) "
                f"before sequence parallelism takes {name!r} as its core_attn_implementation or "
                "sp_attn_implementation. Attention of your own gives its logits to "
                "engine.optimizer.note_attention_logits"
            )
        name = min(self._last, key=self._last.__getitem__, default="")
        if name and self._updates - self._last[name] >= _PATIENCE:
            raise StepError(
                f"layerwise.qk_clip got no attention logits of {name} in "
                f"{_PATIENCE} updates: it does not compute attention in a way that is "
                "measured, or not at all; pass logits to engine.optimizer.note_attention_logits, "
                "or list only the other modules in layerwise.qk_clip.attention"
            )

    def summary(self) -> str:
        """Return a line for the start-up table; empty if nothing is measured."""
        if not self.measures:
            return ""
        if self.clip is None:
            return "attention logits: the largest are reported"
        count = len(self._attentions)
        frozen = sum(not attention.scaled for attention in self._attentions)
        return (
            f"QK-clip: threshold {self.clip.threshold:g}, alpha {self.clip.alpha:g}, "
            f"{count} attention module{'s' * (count != 1)}"
            f"{f', {frozen} of them frozen and left' * bool(frozen)}"
        )


def _indices(
    scaled: Scaled, shape: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, int, Any]:
    """Return how to scale a parameter: the unit and the power of each output, the number of
    columns, and the axis of outputs.
    """
    of_blocks = torch.tensor(scaled.outputs, dtype=torch.float32, device="cpu")
    _, unit, power = of_blocks.repeat_interleave(of_blocks[0].long(), 1).to(device)
    return unit.long(), power, math.prod(shape[1:]), scaled.axis
