"""Attention of transformers whose logits are measured, by its public registry of implementations.

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

import sys
import weakref
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError
from ds_layerwise.routing.attention import implementation_of
from ds_layerwise.zero.qk_clip.max_logits import counts_for, is_measured, largest_logits

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
        if not self._register(name):
            return False
        self._asked.add(name)
        return True

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
