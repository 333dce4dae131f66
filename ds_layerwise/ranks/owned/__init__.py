"""Masters and states that a rank owns, and their updates."""
