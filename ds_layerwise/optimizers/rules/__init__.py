"""The optimizers of this package, each with its settings, states, costs and update."""
