"""The names of DeepSpeed that are wrapped or extended."""
