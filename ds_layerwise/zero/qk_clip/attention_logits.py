"""The largest attention logits of a step: noted in forward passes, reduced over ranks once,
reported, and clipped by.

Note: what counts, and until when
    Forward passes of modules that are in training, of all micro-batches and ranks that hold the
    module; the largest stays on the device until the step. Every step forgets what was noted before
    it, also one that is skipped: its weights stay, and the next forward passes measure them anew.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.config.sections import LayerWiseConfig
from ds_layerwise.errors import ConfigError, RoutingError, StepError
from ds_layerwise.output import announce
from ds_layerwise.plan.routes.routes import Route
from ds_layerwise.ranks.comm import comm
from ds_layerwise.ranks.owned.row_scaling import Factors
from ds_layerwise.recipes.targets.qk_clip_settings import QkClip, power_of
from ds_layerwise.routing.attention import Attention, Scaled, attentions_of, matched
from ds_layerwise.zero.qk_clip import attention_hook
from ds_layerwise.zero.setup.run_settings import Settings

#: So many updates may pass without a logit of a module: layers may be dropped at random.
_PATIENCE = 10


class AttentionLogits:
    """Notes, reduces, reports and clips by the largest attention logits of a model.

    Args:
        params: the trained parameters by name.
        routes: theirs.
        held: the parameters of which this rank holds a piece.

    Raises:
        RoutingError, ConfigError: on every rank alike; see
            :func:`.routing.attention.attentions_of`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LayerWiseConfig,
        settings: Settings,
        *,
        params: Mapping[str, nn.Parameter],
        routes: Mapping[str, Route],
        held: Collection[str],
        device: torch.device,
    ) -> None:
        self.clip, self._settings = config.qk_clip, settings
        # Who compares the first step does so for parameters of others.
        wanted = params if config.verify_first_step else held
        self.measures = self.clip is not None or config.log_max_attention_logit
        self.largest: dict[str, float] = {}
        """By module, the largest logit of the last step that was not skipped, over all ranks and
        parts of the model.
        """
        self._attentions: list[Attention] = []
        self._updates, self._warned = 0, False
        if not self.measures:
            return
        with comm.Alike(None):
            self._attentions = attentions_of(
                model, self.clip, trained=params.keys(), tp_size=settings.tp_size
            )
            _check_hooks(self._attentions, routes)
        own = {each.name: bool(each.scaled) for each in self._attentions}, matched(model, self.clip)
        everyone = (
            [own]
            if settings.model_group is None
            else comm.gather_objects(own, group=settings.model_group)
        )
        self._everywhere = list(dict.fromkeys(name for names, _ in everyone for name in names))
        self._check_found({index for _, indices in everyone for index in indices})
        self._never = {name for names, _ in everyone for name, clipped in names.items() if clipped}
        self._places: dict[nn.Module, tuple[Attention, slice]] = {}
        start = 0
        for attention in self._attentions:
            self._places[attention.module] = attention, slice(start, start + attention.units)
            start += attention.units
        self._modules = {attention.name: attention.module for attention in self._attentions}
        # Whoever says what a module of unknown attention is called means one that may be in
        # evaluation.
        self._by_path = self._modules or dict(model.named_modules())
        # Where nothing has to be known of modules, one more place is for all that are not.
        self._noted = torch.full((start + 1,), -math.inf, dtype=torch.float32, device=device)
        self._factors: dict[str, tuple[Attention, Tensor, Tensor, int, Any]] = {}
        if self.clip is not None:
            self._factors = {
                each.name: _indices(each, params[each.name].shape, attention, self.clip, device)
                for attention in self._attentions
                for each in attention.scaled
                if each.name in wanted
            }
        with comm.Alike(None):
            if self.clip is None or self.clip.hook:
                attention_hook.watch(self._modules.values(), self._note)
        weakref.finalize(self, attention_hook.forget, list(self._modules.values())).atexit = False

    def _check_found(self, used: Collection[int]) -> None:
        """Refuse an entry that is for no module of any part of the model, and a model without
        attention.

        Args:
            used: the entries, by index, that are for one.
        """
        for index, entry in enumerate(self.clip.attention if self.clip else ()):
            if index not in used:
                raise ConfigError(
                    f"layerwise.qk_clip.attention[{index}].name is {entry.name!r}, and no module "
                    "is called so; correct it, or remove the entry"
                )
        if self.clip is not None and not self._everywhere:
            raise ConfigError(
                "layerwise.qk_clip finds attention in models of transformers, and none in this "
                "one; say "
                'where it is in layerwise.qk_clip.attention, like {"name": "blocks.*.attn", '
                '"heads": 8, "qkv": "qkv"}, or leave qk_clip out'
            )

    def destroy(self) -> None:
        """Look at no module any more."""
        attention_hook.forget((attention.module for attention in self._attentions), self._note)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def note(self, attention: nn.Module | str, largest: Any) -> None:
        """Take note of the largest logits of a forward pass; nothing happens for a module in
        evaluation.

        Args:
            attention: the module, or its path in the model.
            largest: (heads,), by head of queries on this rank, before the softmax, scaled; -inf for
                what saw none.

        Raises:
            StepError: nobody asked for logits, the module is not known, or it has another number of
                heads.
        """
        if not self.measures:
            raise StepError(
                "attention logits are noted where layerwise.qk_clip or "
                "layerwise.log_max_attention_logit is set; set one, or do not call "
                "note_attention_logits"
            )
        module = self._by_path.get(attention) if isinstance(attention, str) else attention
        if module is not None and not module.training:
            return
        if module in self._places:
            self._note(module, largest)
        elif self.clip is None and not self._attentions:
            self._raise_to(self._noted[-1:], _flat(largest).amax().reshape(1))
        else:
            known = ", ".join(self._modules) or "none"
            raise StepError(
                "note_attention_logits got "
                f"{attention if isinstance(attention, str) else type(attention)}, which is not "
                f"among the attention modules of this model: {known}"
            )

    def _note(self, module: nn.Module, largest: Any) -> None:
        found, place = self._places[module]
        values = _flat(largest)
        if found.heads is not None and values.numel() != found.heads:
            raise StepError(
                f"note_attention_logits got {values.numel()} logits for {found.name}, which has "
                f"{found.heads} heads on this rank; give the largest of each"
            )
        self._raise_to(self._noted[place], values.reshape(found.units, -1).amax(1))

    @staticmethod
    def _raise_to(place: Tensor, values: Tensor) -> None:
        # A maximum over ranks may lose what is not a number.
        values = torch.nan_to_num(values.to(place), nan=math.inf, posinf=math.inf, neginf=-math.inf)
        torch.maximum(place, values, out=place)

    def forget(self) -> None:
        """Forget what was noted since the last step."""
        if self.measures:
            self._noted.fill_(-math.inf)

    @torch.no_grad()
    def settle(self, frozen: Collection[str]) -> dict[str, Factors]:
        """Reduce what was noted over ranks, and forget it. Every rank must call this at the same
        point.

        Args:
            frozen: the parameters that are not updated in this step.

        Returns:
            By parameter, what it is to be multiplied with after its update; at least those of which
            this rank holds a piece.

        Raises:
            StepError: on every rank, if a logit is not finite, or a module never had one.
        """
        if not self.measures:
            return {}
        reduced = comm.max_over_ranks(self._noted.clone(), group=self._settings.group)
        self.forget()
        mine = {attention.name: reduced[place].max() for attention, place in self._places.values()}
        none = torch.full_like(reduced[-1], -math.inf)
        largest = torch.stack([*(mine.get(name, none) for name in self._everywhere), reduced[-1]])
        if self._settings.model_group is not None:
            comm.max_over_ranks(largest, group=self._settings.model_group)
        # The host waits once.
        values = torch.cat([largest, reduced]).tolist()
        others = values[len(self._everywhere)]
        found = dict(zip(self._everywhere, values))
        values = values[len(largest) :]
        self._judge(found)
        if others > -math.inf:
            found[""] = others
        self.largest = {name: value for name, value in found.items() if value > -math.inf}
        if self.clip is None:
            return {}
        threshold = self.clip.threshold
        over = {
            attention.name
            for attention, place in self._places.values()
            if max(values[place]) > threshold
        }
        return self._scaled(reduced, over, frozen, threshold) if over else {}

    def _scaled(
        self, reduced: Tensor, over: Set[str], frozen: Collection[str], threshold: float
    ) -> dict[str, Factors]:
        units = threshold / reduced.clamp(min=threshold)
        left = {
            attention.name
            for attention in self._attentions
            for each in attention.scaled
            if each.name in frozen
        }
        if left & over and not self._warned and comm.rank_of(self._settings.group) == 0:
            self._warned = True
            announce(
                f"ds_layerwise: queries or keys of {min(left & over)} were frozen after the start, "
                "and are not clipped"
            )
        return {
            name: Factors(units[self._places[attention.module][1]][unit] ** power, axis, cols)
            for name, (attention, unit, power, cols, axis) in self._factors.items()
            if attention.name in over and attention.name not in left
        }

    def _judge(self, found: Mapping[str, float]) -> None:
        """Refuse logits that nothing can be done with.

        Raises:
            StepError: see :meth:`settle`.
        """
        self._updates += 1
        self._never -= {name for name, value in found.items() if value > -math.inf}
        if wrong := next((name for name, value in found.items() if value == math.inf), None):
            raise StepError(
                f"an attention logit of {wrong} is not finite, though all gradients are; look for "
                "what makes it, or leave layerwise.qk_clip and layerwise.log_max_attention_logit "
                "out"
            )
        if self.clip is not None and self._never and self._updates >= _PATIENCE:
            raise StepError(
                f"layerwise.qk_clip got no attention logits of {min(self._never)} in "
                f"{self._updates} updates: it does not attend the way that is measured, or not at "
                "all; give them to engine.optimizer.note_attention_logits, or name the others in "
                "layerwise.qk_clip.attention"
            )

    def values(self) -> dict[str, float]:
        """What DeepSpeed's monitor is told of the last step: the largest of the model, and by path
        of module.
        """
        if not self.largest:
            return {}
        label = "max_attention_logit"
        return {
            label: max(self.largest.values()),
            **{f"{label}/{name}": value for name, value in self.largest.items() if name},
        }

    def told(self) -> str:
        """One line for the start-up table; empty where nothing is measured."""
        if not self.measures:
            return ""
        count, frozen = len(self._attentions), sum(not each.scaled for each in self._attentions)
        modules = f"{count} attention module{'s' * (count != 1)}"
        if self.clip is None:
            return f"attention logits: the largest are reported, of {modules}"
        return (
            f"QK-clip: threshold {self.clip.threshold:g}, alpha {self.clip.alpha:g}, "
            f"{modules}{f', {frozen} of them frozen and left' * bool(frozen)}"
        )


def _check_hooks(attentions: Sequence[Attention], routes: Mapping[str, Route]) -> None:
    """Refuse a rule that brings weights back to a norm, and so undoes what was scaled.

    Raises:
        RoutingError: names the parameter.
    """
    for each in (each for attention in attentions for each in attention.scaled):
        if getattr(routes[each.name].recipe, "hyperball", None) is not None:
            raise RoutingError(
                f"layerwise.qk_clip scales {each.name} down, and hyperball keeps its norm; leave "
                "one of the two out, hyperball by an override for queries and keys"
            )


def _flat(largest: Any) -> Tensor:
    """``largest`` as a tensor of one axis, on the device where it is; numbers of a script as
    float32.
    """
    told = (
        largest
        if isinstance(largest, Tensor)
        else torch.as_tensor(largest, dtype=torch.float32, device="cpu")
    )
    return told.detach().reshape(-1)


def _indices(
    scaled: Scaled, shape: Sequence[int], attention: Attention, clip: QkClip, device: torch.device
) -> tuple[Attention, Tensor, Tensor, int, Any]:
    """Of a parameter, by output, the unit that it is of, and the power; its columns; and the axis
    of outputs.
    """
    heads = scaled.outputs.heads()
    widths = torch.tensor([width for *_, width in heads], dtype=torch.int64, device="cpu")
    per_unit = (attention.heads or attention.units) // attention.units
    unit = torch.tensor(
        [
            0 if role == "other" else head if role == "key" else head // per_unit
            for role, head, _ in heads
        ],
        dtype=torch.int64,
        device="cpu",
    )
    power = torch.tensor(
        [power_of(role, clip.alpha) for role, *_ in heads], dtype=torch.float32, device="cpu"
    )
    return (
        attention,
        unit.repeat_interleave(widths).to(device),
        power.repeat_interleave(widths).to(device),
        shape[1] if len(shape) == 2 else 1,
        scaled.axis,
    )
