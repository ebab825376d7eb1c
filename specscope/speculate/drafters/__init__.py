"""Drafters: who guesses, and how trees are built."""
