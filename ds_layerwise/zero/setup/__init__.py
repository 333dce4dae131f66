"""The start of an engine: its plan, settings and parameters."""
