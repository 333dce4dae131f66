"""Formats of checkpoints."""
