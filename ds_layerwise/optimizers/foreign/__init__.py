"""Optimizers of other libraries, by class or as objects of a script."""
