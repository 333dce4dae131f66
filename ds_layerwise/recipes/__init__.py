"""What each optimizer computes, in values: its settings, its work, its states. Loads neither torch
nor deepspeed.
"""
