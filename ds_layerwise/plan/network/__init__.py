"""Links between ranks, and the time that collectives take on them."""
