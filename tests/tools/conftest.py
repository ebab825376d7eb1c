"""A tiny target, and training data that it wrote."""

import pytest
import torch
from transformers import AutoTokenizer

from specscope.model.loader import load_model
from specscope.model.runner import ModelRunner, published_aux_layers
from tools.train_head import synthesise
from tools.train_head.shards import Shards, ShardWriter
from tools.train_head.synthesise import Synthesiser


@pytest.fixture(scope="module")
def target(deep):
    return load_model(str(deep), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def data(deep, target, tmp_path_factory):
    """Some 3,600 tokens that the tiny target wrote, which by itself hardly ends an instruction."""
    folder = tmp_path_factory.mktemp("data")
    runner = ModelRunner(target, 200, (*published_aux_layers(7), "final"))
    writer = Synthesiser(runner, AutoTokenizer.from_pretrained(deep), rows=24, longest=80, seed=1)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthesise, "LONGEST_INSTRUCTION", 30)
        writer.write(3600, ShardWriter(folder, {"made": "here"}), made.append)
    shards = Shards(folder)
    assert shards.tokens == sum(made) >= 3600
    return shards
