"""Saves by the engine."""
