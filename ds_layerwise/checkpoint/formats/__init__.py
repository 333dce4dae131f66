"""The formats of checkpoints."""
