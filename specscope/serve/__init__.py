"""The OpenAI-compatible server: HTTP on one side, an engine on a thread of its own on the other."""
