"""Recipes, their fields, and the dtypes of states."""
