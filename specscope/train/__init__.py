"""`specscope train`: data from a target, and drafters that are trained on it."""
