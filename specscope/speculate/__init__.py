"""What to guess, and what to keep."""
