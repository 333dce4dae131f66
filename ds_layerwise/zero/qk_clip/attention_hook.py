"""The hook into the attention of transformers' models, at the point where a module looks up its
implementation.

Note: why not the public registry
    ``AttentionInterface.register`` sets implementations for all models at once. "eager" is in no
    registry: a module passes its own function, which a registered function would not get. And an
    implementation registered after the start, such as a kernel of the hub, would be missed.
    ``get_interface`` is called in each forward pass, with the name and that function.

Note: what changes, and for how long
    ``AttentionInterface.get_interface`` returns the attention function. For a module that an engine
    watches, it returns a function that passes its arguments to the engine and then does the same as
    the original. Other modules are not affected, and the last engine to go restores the method. The
    engine needs the arguments because attention returns at most the probabilities, not the logits.
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

#: A method that records the largest logits of a module by head.
Note = Callable[[nn.Module, Tensor], None]

_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod[Note]] = (
    weakref.WeakKeyDictionary()
)
_original: list[Any] = []


def watch(modules: Iterable[nn.Module], note: Note) -> None:
    """Call ``note`` in every forward pass of ``modules`` in training. ``note`` is a bound method
    and is not kept alive.

    Raises:
        ConfigError: the installed transformers has no ``get_interface``.
    """
    modules = list(modules)
    transformers = sys.modules.get("transformers.modeling_utils")
    if not modules or transformers is None:
        return
    interface: Any = getattr(transformers, "AttentionInterface", None)
    if not hasattr(interface, "get_interface"):
        raise ConfigError(
            f"transformers {sys.modules['transformers'].__version__} has no "
            "AttentionInterface.get_interface, which measuring attention logits needs; install 5 "
            "or later, or set layerwise.qk_clip.hook to false and give logits to "
            "engine.optimizer.note_attention_logits"
        )
    for module in modules:
        _watched[module] = weakref.WeakMethod(note)
    if not _original:
        _original.append(interface.get_interface)
        interface.get_interface = _get_interface


def forget(modules: Iterable[nn.Module], note: Note | None = None) -> None:
    """Undo :func:`watch` for ``note``; watchers registered since stay. With ``note`` None, the
    watcher no longer exists.
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
    note = _watched.get(module, lambda: None)()
    if note is None or not module.training:
        return
    scaling = kwargs.get("scaling")
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    counts = counts_for(implementation, module, query, key, mask, kwargs)
    note(module, largest_logits(query, key, scaling=float(scaling), counts=counts))
