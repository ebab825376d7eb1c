"""`specscope bench serve`: a load client for any OpenAI-compatible server. No torch."""
