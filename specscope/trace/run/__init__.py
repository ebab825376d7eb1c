"""A run in memory: its request steps in columns."""
