"""The memory of a rank, and the traffic between ranks."""
