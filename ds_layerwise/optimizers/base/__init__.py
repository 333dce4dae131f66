"""Recipes: their settings, states and weight decay."""
