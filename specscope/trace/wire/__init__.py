"""How records travel: spans and captures, written and read, and every sink of an engine."""
