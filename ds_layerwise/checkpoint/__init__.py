"""What leaves memory for a file and comes back: the record of one rank, and the formats that carry
it.
"""
