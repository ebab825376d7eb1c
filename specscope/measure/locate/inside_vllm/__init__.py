"""Where a vLLM breaks: its own forwards, tapped while it runs a capture's requests again, held against references."""
