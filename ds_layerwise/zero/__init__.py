"""The ZeRO optimizer that the engine talks to."""
