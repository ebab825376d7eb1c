"""EAGLE heads: what a published one says of itself, its modules, and passes over it."""
