"""Checkpoints: the record of one rank, and the formats that store it in files."""
