"""Optimizers as values: settings, states, work, and the update of lists of parameters."""
