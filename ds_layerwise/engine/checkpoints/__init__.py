"""The engine's saving and loading of checkpoints."""
