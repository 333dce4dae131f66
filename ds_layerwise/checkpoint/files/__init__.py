"""The files of checkpoints: atomic writes, lists with checksums, safe reading."""
