"""The hooks in vLLM's V2 model runner and its samplers."""
