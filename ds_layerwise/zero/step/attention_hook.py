"""Attention of transformers whose logits are measured, by its public registry of implementations;
and the largest logit of each head among the unmasked ones, without building the whole matrix.

Note: why under the name of the implementation
    ``AttentionInterface.register`` replaces an implementation ("sdpa", "flash_attention_2") by a
    function that measures logits and then calls it, under the same name. Under a name of its own,
    flash attention of transformers would look for a kernel with that name, Accelerate would refuse
    it for sequence parallelism, and models that ask for "sdpa" would take other ways.

    DeepSpeed's Ulysses looks an implementation up by name when it is set up. The function that it
    finds gets whole sequences and this rank's share of the heads. So :func:`measure_attention`
    comes first; registered later, the function is not called at all.

    "eager" is in no registry: each module passes its own function, which nobody else gets.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError, StepError
from ds_layerwise.routing.attention import implementation_of

#: A method that records the largest logits of a module by head.
Note = Callable[[nn.Module, Tensor], None]


def measure_attention(*implementations: str) -> None:
    """Let engines measure logits in attention of transformers ("sdpa", or with "flash" in its name)
    that other code is going to wrap, such as Ulysses for
    ``ParallelismConfig(sp_backend="deepspeed")``. Others need no call.

    Raises:
        ConfigError: transformers has no such implementation, or it cannot be measured.
    """
    import_module("transformers.modeling_utils")
    for name in implementations:
        if not MEASURED.ask(name):
            raise ConfigError(
                f"measure_attention got {name!r}; it measures 'sdpa' and what has 'flash' in its "
                "name, of those in transformers' AttentionInterface: load the model with one of "
                "these, or give logits to engine.optimizer.note_attention_logits"
            )


class MeasuredAttention:
    """The modules and the implementations of attention that are measured."""

    def __init__(self) -> None:
        self._watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Note]] = (
            weakref.WeakKeyDictionary()
        )
        self._cores: dict[str, Any] = {}
        """The implementations that are measured, as they are without."""
        self._asked: set[str] = set()
        """The implementations that a script has asked for. They stay when engines go."""

    def watch(self, modules: Collection[nn.Module], note: Note) -> None:
        """Call ``note`` for every attention of ``modules`` in training. ``note`` is a bound method
        and is not kept alive.
        """
        for module in modules:
            self._watched[module] = weakref.WeakMethod(note)
        for name in set(map(implementation_of, modules)):
            self._register(name)

    def forget(self, note: Note | None = None) -> None:
        """Undo :meth:`watch` for ``note``, and for watchers that no longer exist."""
        for module, known in list(self._watched.items()):
            if known() in (None, note):
                del self._watched[module]
        self._put_back()

    def ask(self, name: str) -> bool:
        """Measure an implementation whether or not an engine needs it now; return False if it
        cannot be measured.
        """
        self._asked.add(name)
        return self._register(name)

    def forget_asked(self) -> None:
        """Undo :meth:`ask`, as soon as no engine needs it."""
        self._asked.clear()
        self._put_back()

    def note_of(self, module: nn.Module) -> Note | None:
        """Return the method that records the logits of ``module``; None if it is not watched."""
        return self._watched.get(module, lambda: None)()

    def _register(self, name: Any) -> bool:
        """Measure an implementation; return False if it cannot be measured, or is in no
        registry.
        """
        interface = _interface()
        core = interface.get(name)
        if core is None or not is_measured(name):
            return False
        if name not in self._cores:
            self._cores[name] = core
            interface.register(name, partial(_attend, name, core))
        return True

    def _put_back(self) -> None:
        if not self._watched:
            for name in self._cores.keys() - self._asked:
                _interface().register(name, self._cores.pop(name))


#: One for the process, as transformers' registry is.
MEASURED = MeasuredAttention()


def _interface() -> Any:
    """Return the registry; an empty one if no model of transformers is there."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return {} if transformers is None else transformers.AttentionInterface()


def _attend(
    implementation: str,
    core: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    _note(implementation, module, query, key, attention_mask, kwargs)
    return core(module, query, key, value, attention_mask, *args, **kwargs)


# A compiler cannot trace the lookup of a module, and need not.
@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def _note(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> None:
    note = MEASURED.note_of(module)
    if note is None or not module.training:
        return
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    counts = counts_for(implementation, module, query, key, mask, kwargs)
    note(module, largest_logits(query, key, scaling=float(scaling), counts=counts))


#: The number of logits in memory at a time.
_AT_A_TIME = 1 << 24

#: A mask value below this hides a logit. Models use -1e4 or the lowest number of a dtype.
_HIDDEN = -5e3

#: A function that returns which logits of the rows [first, last) count: a bool tensor that
#: broadcasts to (batch, heads, rows, keys).
Counts = Callable[[int, int], Tensor]


@torch.no_grad()
def largest_logits(query: Tensor, key: Tensor, *, scaling: float, counts: Counts) -> Tensor:
    """Return the largest of ``scaling * query @ key.T`` among the logits that count, by query head:
    (heads,), float32; -inf if none counts.

    Products are in the dtype of ``query``; in bfloat16, a logit has three significant digits.

    Args:
        query: (batch, heads, length, width).
        key: (batch, key heads, keys, width); consecutive query heads share one key head.
    """
    batch, heads, length, _ = query.shape
    _, kv_heads, keys, _ = key.shape
    largest = torch.full((heads,), -math.inf, dtype=torch.float32, device=query.device)
    turned = key.to(query.dtype).transpose(-1, -2)
    rows = max(1, _AT_A_TIME // (batch * heads * keys))
    with torch.autocast(query.device.type, enabled=False):
        for first in range(0, length, rows):
            some = query[:, :, first : first + rows] * scaling
            logits = some.reshape(batch, kv_heads, -1, some.shape[-1]) @ turned
            logits = logits.view(batch, heads, -1, keys)
            logits = logits.masked_fill(~counts(first, first + some.shape[2]), -math.inf)
            largest = torch.maximum(largest, logits.amax((0, 2, 3)).float())
    return largest


def is_measured(implementation: str) -> bool:
    """Tell whether logits can be measured in an implementation of transformers."""
    return implementation == "sdpa" or "flash" in implementation


def counts_for(
    implementation: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    mask: Any,
    kwargs: Mapping[str, Any],
) -> Counts:
    """Return which logits count in one of transformers' attention implementations, given its
    arguments.

    Raises:
        StepError: the mask is of another kind than those of transformers.
    """
    length = query.shape[2]
    keys = key.shape[2]
    flash = "flash" in implementation
    if not flash and isinstance(mask, Tensor) and mask.dim() == 4:
        if mask.dtype != torch.bool:
            mask = mask > _HIDDEN
        by_row = mask[..., :keys].expand(-1, -1, length, -1)
        return lambda first, last: by_row[:, :, first:last]
    if mask is not None and not (flash and isinstance(mask, Tensor) and mask.dim() == 2):
        raise StepError(
            f"the attention logits of {type(module).__name__} cannot be measured in implementation "
            f"{implementation!r} with a mask of {type(mask).__name__}; pass 2-D masks to flash "
            "attention and 4-D ones to 'sdpa', as transformers does, or leave "
            "layerwise.log_max_attention_logit and layerwise.qk_clip out"
        )
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    sequences = None
    # Row i is at key i + shift: the implicit mask of "sdpa" starts at the first key, and in flash
    # attention the last row belongs to the last key.
    shift = 0
    window = keys + length
    if flash:
        shift = keys - length
        window = kwargs.get("sliding_window") or window
        sequences = _sequences(length, keys, query.device, kwargs)
    elif length == 1:
        causal = False

    def counts(first: int, last: int) -> Tensor:
        places = torch.arange(keys, device=key.device)
        away = torch.arange(first + shift, last + shift, device=key.device)[:, None] - places
        allowed = away.abs() < window
        if causal:
            allowed &= away >= 0
        if sequences is not None:
            of_query, of_key = sequences
            allowed &= of_query[first:last, None] == of_key
        if mask is not None:
            real = mask[:, -keys:].bool()
            rows = real[:, shift:][:, first:last]
            allowed = allowed & (rows[:, :, None] & real[:, None, :])[:, None]
        return allowed

    return counts


def _sequences(
    length: int, keys: int, device: torch.device, kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Return the sequence number of each query and of each key; None if there is a single
    sequence.
    """
    numbers = []
    for name, count in (("cu_seq_lens_q", length), ("cu_seq_lens_k", keys)):
        ends = kwargs.get(name)
        if isinstance(ends, Tensor):
            places = torch.arange(count, device=device, dtype=ends.dtype)
            numbers.append(torch.searchsorted(ends.to(device).contiguous(), places, right=True))
    if len(numbers) == 2:
        return numbers[0], numbers[1]
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or not positions.shape == (1, length) == (1, keys):
        return None
    # As in transformers: sequences are packed if positions ever go back, and each sequence starts
    # at 0.
    begins = (positions[0] == 0).long().cumsum(0).to(device)
    number = begins * (torch.diff(positions[0]) < 0).any().to(device)
    return number, number
