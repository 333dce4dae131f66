"""Tools for checkpoints and configs that work without an engine."""
