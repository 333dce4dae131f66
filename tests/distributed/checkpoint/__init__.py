"""Saves, loads, conversions, and what goes wrong between them."""
