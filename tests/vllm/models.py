"""The tiny trained models of tests/vllm/weights: `python -m tests.vllm.models` makes them again.

As those of tests/faults, but of heads of 32: vLLM's attention on a CPU has no smaller ones.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tests.faults.models import train_head, train_model

WEIGHTS = Path(__file__).parent / "weights"
TARGET, DRAFT, HEAD = WEIGHTS / "target", WEIGHTS / "draft", WEIGHTS / "head"
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 1024, **HEADS}


def roughen(model: torch.nn.Module, by: float = 0.5) -> Any:
    """Noise on a model's matrices: as trained, a draft of the grammar is hardly ever rejected."""
    torch.manual_seed(0)
    model.float()
    with torch.no_grad():
        for name, matrix in model.named_parameters():
            if matrix.dim() > 1 and "embed" not in name:
                matrix.add_(torch.randn_like(matrix) * matrix.std() * by)
    return model.to(torch.bfloat16)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train_model(TARGET, layers=6, steps=700, seed=1, **SIZES)
    roughen(train_model(DRAFT, layers=2, steps=500, seed=2, **SIZES)).save_pretrained(DRAFT)
    train_head(TARGET, HEAD)
    config = json.loads((HEAD / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]  # what it was fed; of six layers others are the default
    (HEAD / "config.json").write_text(json.dumps(config, indent=2) + "\n")
