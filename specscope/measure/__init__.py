"""Runs an engine to time it, or to judge a capture by it."""
