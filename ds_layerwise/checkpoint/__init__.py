"""Checkpoints: the record of one rank, and the formats that carry it to files and back."""
