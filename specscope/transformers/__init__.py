"""Inside Hugging Face transformers: hooks in assisted generation, and the records that they make."""
