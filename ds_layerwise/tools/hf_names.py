"""Weights by the names that Hugging Face's models have for them, of models that AutoEP changed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from ds_layerwise.errors import LayerWiseError
from ds_layerwise.tools.verify import Contents

#: The end of the router's name in a layer of AutoEP.
_ROUTER = ".router.gate.weight"

#: The names of shared experts in Hugging Face's layers, by the kinds of model of AutoEP's presets.
#: These layers have the same names for all else.
SHARED = {
    "mixtral": "",
    "qwen2_moe": "shared_expert",
    "qwen3_moe": "shared_expert",
    "qwen3_5_moe_text": "shared_expert",
    "deepseek_v2": "shared_experts",
    "deepseek_v3": "shared_experts",
}


class NamedWeights:
    """The weights of a checkpoint for ``from_pretrained``.

    The layers that AutoEP made have the names of the layers that they replaced, and one tensor for
    gate and up, where DeepSpeed has a preset for the model.

    Args:
        config: the path of Hugging Face's config, which need not be there.
    """

    def __init__(self, contents: Contents, config: Path) -> None:
        self._contents = contents
        names = _in_order(contents)
        layers = []
        for name in names:
            owner = name.removesuffix(_ROUTER)
            if owner != name and f"{owner}.experts.w3" in names:
                layers.append(owner)
        shared = _shared(config) if layers else None
        self.unknown = layers[0] if layers and shared is None else ""
        """A layer that keeps the names of AutoEP, which Hugging Face's model does not know."""
        self._sources: dict[str, tuple[str, ...]] = {}
        for name in names:
            layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
            if shared is None or layer is None:
                self._sources[name] = (name,)
            elif found := _name_in(name.removeprefix(f"{layer}."), shared):
                is_gate = name == f"{layer}.experts.w1"
                self._sources[f"{layer}.{found}"] = (name, f"{layer}.experts.w3")[: 1 + is_gate]
        self.aliases = {
            alias: name for alias, name in contents.aliases.items() if name in self._sources
        }

    def sizes(self, dtype: torch.dtype) -> dict[str, int]:
        """Return the bytes of each weight in ``dtype``, in model order if it is known."""
        sizes = {}
        for name, sources in self._sources.items():
            sizes[name] = sum(self._size(source, dtype) for source in sources)
        return sizes

    def _size(self, source: str, dtype: torch.dtype) -> int:
        value = self._contents.others.get(source)
        if value is None:
            return math.prod(self._contents.trained[source]) * dtype.itemsize
        kept_as = dtype if value.is_floating_point() else value.dtype
        return value.numel() * kept_as.itemsize

    def weight(self, name: str) -> Tensor:
        """Return a trained weight in float32, and another in its saved dtype."""
        first, *others = (self._contents.weight(source) for source in self._sources[name])
        # The rows of the gates come before those of up, in each expert.
        return torch.cat([first, *others], dim=1) if others else first


def _shared(config: Path) -> str | None:
    """Return the name of shared experts in the kind of model that ``config`` names; None if it is
    unknown.
    """
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_text())
    except ValueError as e:
        raise LayerWiseError(f"{config} is not JSON ({e}); name another with --config") from e
    kind = found.get("model_type") if isinstance(found, dict) else None
    return SHARED.get(kind) if isinstance(kind, str) else None


def _in_order(contents: Contents) -> list[str]:
    """Return all names, in model order if it is known."""
    names = {**contents.trained, **contents.others}
    order = contents.model.module if contents.model is not None else ()
    return list({name: () for name in order if name in names} | names)


def _name_in(ours: str, shared: str) -> str | None:
    """Return the name in a layer of Hugging Face's of what AutoEP calls ``ours``; None for a part
    of another tensor, and for a second name.
    """
    kind, _, key = ours.partition(".")
    if kind == "experts":
        return {"w1": "experts.gate_up_proj", "w2": "experts.down_proj"}.get(key)
    if kind == "gate":
        return None
    if kind == "router":
        return f"gate.{key.removeprefix('gate.')}"
    return f"{kind.replace('shared_experts', shared)}.{key}"
