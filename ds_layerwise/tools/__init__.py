"""What works on checkpoints and configs without an engine."""
