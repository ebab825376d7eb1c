"""The hooks in vLLM's V1 model runner and sampler, and what only it can do: a debugger that holds it."""
