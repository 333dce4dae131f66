"""The routes of parameters: the recipe of each, and the reason for it."""
