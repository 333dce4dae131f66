"""The transfer of buckets: gradients to owners, parameters to all ranks."""
