"""The plugin inside vLLM: the evidence of every step, from the sampler's own tensors. v1/, v2/: its two runners."""
