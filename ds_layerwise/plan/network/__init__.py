"""Links between ranks, and the times of collectives on them."""
