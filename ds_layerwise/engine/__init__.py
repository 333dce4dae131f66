"""Hooks into DeepSpeed."""
