"""The memory of a rank, and the transfers between ranks."""
