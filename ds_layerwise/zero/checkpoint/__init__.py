"""Saves and loads of the optimizer."""
