"""Every optimizer there is, by the name that a config uses: its recipe, and the class of the rule that runs it."""

from __future__ import annotations

from typing import NamedTuple

from ds_layerwise.recipes import elementwise, muon, shampoo, soap
from ds_layerwise.recipes.recipe import Recipe


class Entry(NamedTuple):
    """One optimizer. The rule is named, not imported: it takes torch."""

    recipe: type[Recipe]
    rule: str
    """``module:Class``; the class is built from the recipe, see :func:`ds_layerwise.optimizers.registry.rule_of`."""


REGISTRY: dict[str, Entry] = {
    "muon": Entry(muon.Muon, "ds_layerwise.optimizers.muon:Muon"),
    "soap": Entry(soap.Soap, "ds_layerwise.optimizers.soap:Soap"),
    "kl_soap": Entry(soap.KlSoap, "ds_layerwise.optimizers.soap:Soap"),
    "shampoo": Entry(shampoo.Shampoo, "ds_layerwise.optimizers.shampoo:Shampoo"),
    "adamw": Entry(elementwise.AdamW, "ds_layerwise.optimizers.elementwise:Adam"),
    "adam": Entry(elementwise.Adam, "ds_layerwise.optimizers.elementwise:Adam"),
    "lion": Entry(elementwise.Lion, "ds_layerwise.optimizers.elementwise:Lion"),
    "sgd": Entry(elementwise.Sgd, "ds_layerwise.optimizers.elementwise:Sgd"),
}


def names(*, whole: bool) -> tuple[str, ...]:
    """The optimizers that need whole parameters, or those that do not."""
    return tuple(name for name, entry in REGISTRY.items() if entry.recipe.whole is whole)
