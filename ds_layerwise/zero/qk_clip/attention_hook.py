"""The hook into attention of transformers' models: the place in which a module asks for its
implementation.

Note: why not the public registry
    ``AttentionInterface.register`` names implementations for all models at once. "eager" is in no
    registry: a module passes its own function, which a registered one would not be given. And an
    implementation that is registered after the start, as one of the hub's kernels is, would not be
    seen. ``get_interface`` is asked in each forward pass, by name and with that function.

Note: what is changed, and for how long
    ``AttentionInterface.get_interface`` gives what attends. While an engine watches a module, it
    gives a function that tells the engine what it is called with, and then does the same. Nothing
    changes for other modules, and the last engine that goes puts the method back. What attention
    gives is the probabilities, if anything, and not the logits.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ds_layerwise.errors import ConfigError
from ds_layerwise.zero.qk_clip.max_logits import counts_for, largest_logits

#: A method that takes note of the largest logits of a module by head.
Note = Callable[[nn.Module, Tensor], None]

_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Note]] = (
    weakref.WeakKeyDictionary()
)
_original: list[Any] = []


def watch(modules: Iterable[nn.Module], note: Note) -> None:
    """Tell ``note``, a bound method that is not kept alive, of every forward pass of ``modules`` in
    training.

    Raises:
        ConfigError: the installed transformers has no such place.
    """
    modules = list(modules)
    transformers = sys.modules.get("transformers.modeling_utils")
    if not modules or transformers is None:
        return
    interface: Any = getattr(transformers, "AttentionInterface", None)
    if not hasattr(interface, "get_interface"):
        raise ConfigError(
            f"transformers {sys.modules['transformers'].__version__} does not say where its models "
            "get their attention; install 5 or later, or set layerwise.qk_clip.hook to false and "
            "give logits to engine.optimizer.note_attention_logits"
        )
    for module in modules:
        _watched[module] = weakref.WeakMethod(note)
    if not _original:
        _original.append(interface.get_interface)
        interface.get_interface = _get_interface


def forget(modules: Iterable[nn.Module], note: Note | None = None) -> None:
    """Undo :func:`watch`, as far as nobody else watches by now; ``note`` None: what took note is
    gone.
    """
    for module in modules:
        known = _watched.get(module)
        if known is not None and known() in (None, note):
            del _watched[module]
    if not _watched and _original:
        sys.modules[
            "transformers.modeling_utils"
        ].AttentionInterface.get_interface = _original.pop()


def _get_interface(self: Any, attn_implementation: Any, default: Any) -> Any:
    attend = _original[0](self, attn_implementation, default)

    def noted(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        _note(attn_implementation or "eager", module, query, key, attention_mask, kwargs)
        return attend(module, query, key, value, attention_mask, *args, **kwargs)

    return noted


# A compiler cannot trace what looks a module up, and need not.
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
    note = _watched.get(module, lambda: None)()
    if note is None or not module.training:
        return
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    counts = counts_for(implementation, module, query, key, mask, kwargs)
    note(module, largest_logits(query, key, scaling=float(scaling), counts=counts))
