"""Loads by the engine."""
