"""The update rules."""
