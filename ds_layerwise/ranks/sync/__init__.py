"""Buckets on their way: gradients to owners, parameters to all."""
