"""Optimizers as values: settings, work and states. It loads neither torch nor deepspeed."""
