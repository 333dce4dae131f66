"""Every optimizer there is, by the name that a config uses: its recipe, and the class of the rule that runs it."""

from __future__ import annotations

from typing import NamedTuple

from ds_layerwise.recipes import adafactor, adamuon, elementwise, muon, namo, normuon, polargrad, scion
from ds_layerwise.recipes.recipe import Recipe


class Entry(NamedTuple):
    """One optimizer. The rule is named, not imported: it takes torch."""

    recipe: type[Recipe]
    rule: str
    """``module:Class``; the class is built from the recipe, see :func:`ds_layerwise.optimizers.registry.rule_of`."""


REGISTRY: dict[str, Entry] = {
    "muon": Entry(muon.Muon, "ds_layerwise.optimizers.muon:Muon"),
    "normuon": Entry(normuon.NorMuon, "ds_layerwise.optimizers.normuon:NorMuon"),
    "adamuon": Entry(adamuon.AdaMuon, "ds_layerwise.optimizers.adamuon:AdaMuon"),
    "namo": Entry(namo.Namo, "ds_layerwise.optimizers.namo:Namo"),
    "scion": Entry(scion.Scion, "ds_layerwise.optimizers.scion:Scion"),
    "polargrad": Entry(polargrad.PolarGrad, "ds_layerwise.optimizers.polargrad:PolarGrad"),
    "adafactor": Entry(adafactor.Adafactor, "ds_layerwise.optimizers.adafactor:Adafactor"),
    "adamw": Entry(elementwise.AdamW, "ds_layerwise.optimizers.elementwise:Adam"),
    "adam": Entry(elementwise.Adam, "ds_layerwise.optimizers.elementwise:Adam"),
    "lion": Entry(elementwise.Lion, "ds_layerwise.optimizers.elementwise:Lion"),
    "sgd": Entry(elementwise.Sgd, "ds_layerwise.optimizers.elementwise:Sgd"),
    "signum": Entry(elementwise.Signum, "ds_layerwise.optimizers.elementwise:Signum"),
    "laprop": Entry(elementwise.LaProp, "ds_layerwise.optimizers.elementwise:LaProp"),
    "ademamix": Entry(elementwise.AdEMAMix, "ds_layerwise.optimizers.elementwise:AdEMAMix"),
}

#: Keys of other packages' optimizers that mean something else here, and what to do.
NOT_HERE = {
    "max_grad_norm": "set gradient_clipping at the top level",
    "use_shape_scaling": "scalar optimizers see pieces of parameters, which have no shape; multiply the rate by 2 / "
                         "(rows + columns) with lr_scale in layerwise.overrides",
}


def names(*, whole: bool) -> tuple[str, ...]:
    """The optimizers that need whole parameters, or those that do not."""
    return tuple(name for name, entry in REGISTRY.items() if entry.recipe.whole is whole)
