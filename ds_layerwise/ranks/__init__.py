"""What a rank holds and what travels between ranks."""
