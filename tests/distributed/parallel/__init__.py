"""Experts, pipelines, sequences and tensors over ranks."""
