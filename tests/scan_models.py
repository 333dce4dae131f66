"""Routing of the parameters of models in installed libraries: ``python -m tests.scan_models timm``.

It prints the verdicts of transformers' models that tests/support/families.json lacks, all the heads and bare parameters
of timm's and diffusers' models, or, for a few of these, the skeletons that tests/support/other_families.json holds.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import nn

from ds_layerwise.errors import RoutingError
from tests.support.families import architectures, built, described, unexpected, verdicts

#: Models of special structure, of timm by name, of diffusers by class, each with settings that make it small.
SPECIAL: dict[str, dict[str, dict[str, Any]]] = {
    "timm": {
        "swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1)}, "beit_base_patch16_224": {"depth": 1},
        "levit_128": {"depth": (1, 1, 1)}, "crossvit_9_240": {"depth": ((1, 1, 0),)},
        "vit_base_patch16_siglip_224": {"depth": 1}, "dla34": {},
    },
    "diffusers": {
        "DiTTransformer2DModel": {"num_layers": 1}, "PixArtTransformer2DModel": {"num_layers": 1},
        "SanaTransformer2DModel": {"num_layers": 1}, "ZImageTransformer2DModel": {"n_layers": 1, "n_refiner_layers": 1},
        "UNet2DConditionModel": {"block_out_channels": (32,), "layers_per_block": 1, "cross_attention_dim": 32,
                                 "down_block_types": ("CrossAttnDownBlock2D",),
                                 "up_block_types": ("CrossAttnUpBlock2D",)},
    },
}


def timm_models() -> Iterator[tuple[str, Callable[..., nn.Module]]]:
    """Yield the name of a model of each family of timm's, and a function that makes it."""
    timm = import_module("timm")
    for family in timm.list_modules():
        if names := timm.list_models(module=family):
            name = min(names, key=lambda each: (len(each), each))
            yield name, lambda name=name, **sizes: timm.create_model(name, **sizes)


def diffusers_models() -> Iterator[tuple[str, Callable[..., nn.Module]]]:
    """Yield the models of diffusers by their classes."""
    diffusers = import_module("diffusers")
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None)
        if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and cls is not diffusers.ModelMixin:
            yield name, cls


def made(make: Callable[..., nn.Module], **sizes: Any) -> nn.Module | None:
    """Return the model on meta; None where it takes arguments, or needs a package that is not installed."""
    try:
        with torch.device("meta"):
            return make(**sizes)
    except Exception as error:  # of somebody else's constructor
        print(f"not built: {error}"[:120])
        return None


def scan(models: Iterator[tuple[str, Callable[..., nn.Module]]]) -> None:
    """Print heads and bare parameters by name."""
    examples: dict[str, str] = {}
    for name, make in models:
        model = made(make)
        try:
            rows = list(verdicts(model)) if model is not None else []
        except RoutingError as error:
            print(f"{name}: {error}"[:120])
            continue
        for row in rows:
            if row.kind == "head" or not re.search("Linear|Conv|Embedding|Norm", row.cls.__name__):
                examples.setdefault(f"{row.kind:9s} {row.path if row.kind == 'head' else row.leaf:40s}",
                                 f"{row.cls.__name__:24s} {name}: {row.name}")
    for what, where in sorted(examples.items()):
        print(what, where)


def skeletons(library: str) -> None:
    """Print the special models of a library as JSON, with the present verdicts."""
    models = dict(timm_models() if library == "timm" else diffusers_models())
    for name, sizes in SPECIAL[library].items():
        model = made(models.get(name) or (lambda name=name, **sizes: import_module("timm").create_model(name, **sizes)),
                     **sizes)
        if model is not None:
            rows = list(verdicts(model))
            print(json.dumps({name: {
                "heads": sorted(row.name for row in rows if row.kind == "head"),
                "vectors": sorted({row.leaf for row in rows if row.kind == "vector"}),
                "modules": described(model)}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("transformers", "timm", "diffusers"))
    parser.add_argument("--skeletons", action="store_true", help="print those of special models")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.library == "transformers":
        found = {what: (name, message) for name in architectures() if (model := built(name)) is not None
                 for what, message in unexpected(verdicts(model)).items()}
        print("\n".join(f"{name}: {message}" for name, message in found.values()))
    elif options.skeletons:
        skeletons(options.library)
    else:
        scan(timm_models() if options.library == "timm" else diffusers_models())


if __name__ == "__main__":
    main()
