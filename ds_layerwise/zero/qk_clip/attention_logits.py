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
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError, RoutingError, StepError
from ds_layerwise.output import announce
from ds_layerwise.plan.routes.routes import Routes
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.recipes.targets.qk_clip_settings import QkClip, power_of
from ds_layerwise.routing.attention import Attention, Scaled, attentions_of, matched
from ds_layerwise.zero.qk_clip import attention_hook
from ds_layerwise.zero.run_state import RunState
from ds_layerwise.zero.step.observer import Step, StepObserver

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
        self._attentions: list[Attention] = []
        self._places: dict[nn.Module, tuple[Attention, slice]] = {}
        if not self.measures:
            return
        with comm.errors_on_all_ranks():
            self._attentions = attentions_of(
                run.model, self.clip, trained=run.params.keys(), tp_size=run.settings.tp_size
            )
            _check_hooks(self._attentions, run.planned.routes)
        self._compare()
        start = 0
        for attention in self._attentions:
            self._places[attention.module] = attention, slice(start, start + attention.units)
            start += attention.units
        # If a script names a module whose attention is unknown, the module may be in evaluation
        # mode.
        known = {attention.name: attention.module for attention in self._attentions}
        self._by_path = known or dict(run.model.named_modules())
        # The last element is for all modules that need not be known.
        self._noted = torch.full((start + 1,), -math.inf, dtype=torch.float32, device=run.device)
        self._outputs: dict[str, tuple[Tensor, Tensor, int, Any]] = {}
        if self.clip is not None:
            self._find_outputs(self.clip)
        with comm.errors_on_all_ranks():
            if self.clip is None or self.clip.hook:
                attention_hook.watch(self._places, self._note)
        weakref.finalize(self, attention_hook.forget, list(self._places)).atexit = False

    def _compare(self) -> None:
        """Gather the attention modules of all parts of the model.

        Raises:
            ConfigError: an entry of the config matches no module of any part, or there is no
                attention.
        """
        clipped = {}
        for attention in self._attentions:
            clipped[attention.name] = bool(attention.scaled)
        parts = [(clipped, matched(self._run.model, self.clip))]
        if self._run.settings.model_group is not None:
            parts = comm.gather_objects(parts[0], group=self._run.settings.model_group)
        everywhere = {}
        self._never: set[str] = set()
        used = set()
        for theirs, entries in parts:
            everywhere.update(dict.fromkeys(theirs))
            self._never.update(filter(theirs.get, theirs))
            used.update(entries)
        self._everywhere = list(everywhere)
        if self.clip is None:
            return
        for index, entry in enumerate(self.clip.attention):
            if index not in used:
                raise ConfigError(
                    f"layerwise.qk_clip.attention[{index}].name is {entry.name!r}, and no module "
                    "is called so; correct it, or remove the entry"
                )
        if not self._everywhere:
            raise ConfigError(
                "layerwise.qk_clip finds attention in models of transformers, and none in this "
                'one; say where it is in layerwise.qk_clip.attention, like {"name": '
                '"blocks.*.attn", "heads": 8, "qkv": "qkv"}, or leave qk_clip out'
            )

    def _find_outputs(self, clip: QkClip) -> None:
        run = self._run
        for attention in self._attentions:
            for scaled in attention.scaled:
                name = scaled.name
                # verify_first_step also needs parameters that this rank does not own.
                if name in run.pieces or run.config.verify_first_step:
                    shape = run.shapes[name]
                    self._outputs[name] = _indices(scaled, shape, attention, clip, run.device)

    def destroy(self) -> None:
        """Stop watching modules."""
        attention_hook.forget(self._places, self._note)

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
        if module in self._places:
            self._note(module, largest)
        elif self.clip is None and not self._attentions:
            self._raise_to(self._noted[-1:], _flat(largest).amax().reshape(1))
        else:
            known = ", ".join(known.name for known in self._attentions)
            raise StepError(
                f"note_attention_logits got {name}, which is not among the attention modules of "
                f"this model: {known or 'none'}"
            )

    def _note(self, module: nn.Module, largest: Any) -> None:
        attention, place = self._places[module]
        values = _flat(largest)
        if attention.heads is not None and values.numel() != attention.heads:
            raise StepError(
                f"note_attention_logits got {values.numel()} logits for {attention.name}, which "
                f"has {attention.heads} heads on this rank; give the largest of each"
            )
        self._raise_to(self._noted[place], values.reshape(attention.units, -1).amax(1))

    @staticmethod
    def _raise_to(place: Tensor, values: Tensor) -> None:
        # A maximum over ranks may lose a nan, so it becomes inf.
        values = torch.nan_to_num(values.to(place), nan=math.inf, posinf=math.inf, neginf=-math.inf)
        torch.maximum(place, values, out=place)

    def restart(self) -> None:
        """Forget the logits recorded since the last step: they belong to old weights."""
        self._noted.fill_(-math.inf)

    def before_update(self, step: Step) -> None:
        """Reduce and report the recorded logits, and set the scaling factors. A skipped step drops
        the logits.

        Raises:
            StepError: on every rank, if a logit is not finite, or a module never had one.
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
        for attention, place in self._places.values():
            own[attention.name] = reduced[place].max()
        largest = torch.stack([*own.values(), reduced[-1]])
        if settings.model_group is not None:
            comm.max_over_ranks(largest, group=settings.model_group)
        # One transfer, so that the host waits once.
        values = torch.cat([largest, reduced]).tolist()
        by_module = dict(zip(self._everywhere, values))
        self._judge(by_module)
        others = values[len(by_module)]
        if others > -math.inf:
            # Otherwise "" is the entry of the model itself, if the model is an attention module.
            by_module[""] = others
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
            StepError: see :meth:`before_update`.
        """
        self._updates += 1
        self._never -= {name for name, value in largest.items() if value > -math.inf}
        for name, value in largest.items():
            if value == math.inf:
                raise StepError(
                    f"an attention logit of {name} is not finite, though all gradients are; look "
                    "for what makes it, or leave layerwise.qk_clip and "
                    "layerwise.log_max_attention_logit out"
                )
        if self.clip is not None and self._never and self._updates >= _PATIENCE:
            raise StepError(
                f"layerwise.qk_clip got no attention logits of {min(self._never)} in "
                f"{self._updates} updates: it does not compute attention in a way that is "
                "measured, or not at all; pass logits to engine.optimizer.note_attention_logits, "
                "or list only the other modules in layerwise.qk_clip.attention"
            )

    def summary(self) -> str:
        """Return a line for the start-up table; empty if nothing is measured."""
        if not self.measures:
            return ""
        count = len(self._attentions)
        modules = f"{count} attention module{'s' * (count != 1)}"
        if self.clip is None:
            return f"attention logits: the largest are reported, of {modules}"
        frozen = sum(not attention.scaled for attention in self._attentions)
        return (
            f"QK-clip: threshold {self.clip.threshold:g}, alpha {self.clip.alpha:g}, "
            f"{modules}{f', {frozen} of them frozen and left' * bool(frozen)}"
        )


def _check_hooks(attentions: Sequence[Attention], routes: Routes) -> None:
    """Refuse a rule that restores the norm of weights, which undoes the scaling.

    Raises:
        RoutingError: names the parameter.
    """
    for attention in attentions:
        for scaled in attention.scaled:
            if getattr(routes[scaled.name].recipe, "hyperball", None) is not None:
                raise RoutingError(
                    f"layerwise.qk_clip scales {scaled.name} down, but hyperball restores its "
                    "norm; remove one of the two, or set hyperball to null for queries and keys in "
                    "layerwise.overrides"
                )


def _flat(largest: Any) -> Tensor:
    """Return ``largest`` as a 1-D tensor on its own device; a script's numbers become float32."""
    if not isinstance(largest, Tensor):
        largest = torch.as_tensor(largest, dtype=torch.float32, device="cpu")
    flat: Tensor = largest.detach().reshape(-1)
    return flat


def _indices(
    scaled: Scaled, shape: Sequence[int], attention: Attention, clip: QkClip, device: torch.device
) -> tuple[Tensor, Tensor, int, Any]:
    """Return how to scale a parameter: the unit and the power of each output, the number of
    columns, and the axis of outputs.
    """
    per_unit = (attention.heads or attention.units) // attention.units
    units = []
    powers = []
    for role, head, width in scaled.outputs.heads():
        if role == "other":
            head = 0
        elif role != "key":
            head //= per_unit
        units += [head] * width
        powers += [power_of(role, clip.alpha)] * width
    unit = torch.tensor(units, dtype=torch.int64, device="cpu").to(device)
    power = torch.tensor(powers, dtype=torch.float32, device="cpu").to(device)
    return unit, power, math.prod(shape[1:]), scaled.axis
