"""Data from the target itself, and the loop that teaches drafters from it."""
