"""The JSON config of a run, read once into frozen values."""
