"""The routes of parameters: recipes, overrides and tensor parallelism."""
