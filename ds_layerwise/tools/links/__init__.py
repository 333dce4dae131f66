"""``ds-layerwise links``: measured links."""
