"""A Hugging Face causal LM on a paged KV cache; the target and the drafters both run on it."""
