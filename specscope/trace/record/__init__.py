"""The types: what happened, as an engine leaves it behind."""
