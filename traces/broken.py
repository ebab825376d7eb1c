"""A specscope command over an engine with a fault that no row of the known causes describes.

    python traces/broken.py capture "Why is the sky blue?" -o broken.jsonl --drafter ngram --dtype float32
    python traces/broken.py diagnose --only locate broken.jsonl

What loads the target loses a slice of one matrix: in layer 12, what the third attention head gives is multiplied by 0.
"""

from pathlib import Path
from typing import Any

from specscope.model import loader
from specscope.model.loader import LoadedModel

LAYER, HEAD = 12, 2
adopt = loader.adopt


def lossy(model: Any, name: str, folder: Path | None = None) -> LoadedModel:  # noqa: ANN401
    """Take a model over, without the slice."""
    attention = model.model.layers[LAYER].self_attn
    size = attention.head_dim
    attention.o_proj.weight[:, HEAD * size : (HEAD + 1) * size] = 0
    return adopt(model, name, folder)


if __name__ == "__main__":
    loader.adopt = lossy
    from specscope.__main__ import entry

    entry()
