"""How the bundled EAGLE-3 head was made: data that the target writes, and training on it."""
