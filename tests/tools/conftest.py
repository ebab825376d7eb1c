"""A tiny target, and training data that it wrote."""

import pytest
import torch
from transformers import AutoTokenizer

from specscope.model.loader import load_model
from specscope.model.runner import ModelRunner, published_aux_layers
from tools.train_head.shards import Shards, ShardWriter
from tools.train_head.synthesise import Synthesiser


@pytest.fixture(scope="module")
def target(deep):
    return load_model(str(deep), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def data(deep, target, tmp_path_factory):
    """Some 6,000 tokens that the tiny target wrote."""
    folder = tmp_path_factory.mktemp("data")
    runner = ModelRunner(target, 200, (*published_aux_layers(7), "final"))
    writer = Synthesiser(runner, AutoTokenizer.from_pretrained(deep), rows=24, longest=100, seed=1)
    made = []
    writer.write(6000, ShardWriter(folder, {"made": "here"}), made.append)
    shards = Shards(folder)
    assert shards.tokens == sum(made) >= 6000
    return shards
