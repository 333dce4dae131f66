"""Routes of parameters: the recipe of each, and the reason."""
