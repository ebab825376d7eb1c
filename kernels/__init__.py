"""Triton kernels and their torch references. Free of imports: transformers probes for a module of this name."""
