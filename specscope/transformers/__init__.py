"""Inside Hugging Face transformers: hooks in assisted generation, and the records that they make."""

UTILS = "transformers.generation.utils"  # the module whose functions are wrapped
