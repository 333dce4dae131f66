"""Orthogonalisation of whole matrices: iterations, coefficient tables, batches of equal shape."""
