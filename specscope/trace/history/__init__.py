"""A run in memory: its figures, and what is said of its places."""
