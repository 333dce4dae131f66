"""Names of DeepSpeed that are wrapped, extended or imported."""
