"""The choice of parameters for settings: overrides, conditions, norm groups, fused parts."""
