"""The parts of a step."""
