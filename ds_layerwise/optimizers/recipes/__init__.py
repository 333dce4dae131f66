"""The recipe of each rule: its settings, states and work."""
