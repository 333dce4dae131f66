"""Optimizers in values: settings, work and states. Loads neither torch nor deepspeed."""
