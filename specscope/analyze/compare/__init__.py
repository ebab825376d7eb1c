"""Two runs compared: what is configured differently, where they part, and whether their acceptance differs."""
