"""Routes of parameters: recipes, overrides and tensor parallelism."""
