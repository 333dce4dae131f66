"""Names of DeepSpeed that are wrapped, or extended."""
