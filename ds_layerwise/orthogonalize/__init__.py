"""The orthogonalisation of whole matrices: iterations, coefficient tables, batches of equal
shape.
"""
