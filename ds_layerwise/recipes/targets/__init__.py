"""Parameters that settings are for: overrides, conditions, norm groups, fused parts."""
