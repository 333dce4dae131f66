"""Forecasts of memory, bytes and time."""
