"""The model as the judge: each recorded step beside what plain transformers say of it."""
