"""Collectives and groups of ranks."""
