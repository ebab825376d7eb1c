"""The plugin inside vLLM: the evidence of every step, from the sampler's own tensors. Imports trace/ alone."""
