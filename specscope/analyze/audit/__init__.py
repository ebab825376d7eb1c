"""The model as the judge: each recorded step compared with what plain transformers compute."""
