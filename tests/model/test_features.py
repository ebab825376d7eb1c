"""Taps give transformers' own hidden states, of plain tokens and of the nodes of a tree."""

import pytest
import torch

from specscope.model.batch import Segment
from specscope.model.kv_cache import BlockTable
from specscope.model.loader import adopt
from specscope.model.runner import ModelRunner
from specscope.trace.record.tree import ROOT, DraftTree
from tests.model.test_architectures import build

ARCHITECTURES = ["llama", "qwen3", "gemma3_mixed", "cohere2", "gpt_neox"]
PROMPTS = [[5, 9, 11, 42, 42, 180, 3, 77, 12], [8, 100, 23, 4]]
TREE = DraftTree.build([50, 60, 61, 51, 70], [ROOT, ROOT, 1, 0, 2])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_features_are_transformers_hidden_states(name):
    """Taps in any order, one of them twice; a prefill chunk, then the rest with a tree, two requests at once."""
    aux_layers = (2, "final", 0, 3, 2)
    model, runner = build(name), ModelRunner(adopt(build(name), name), blocks=8, aux_layers=aux_layers)

    def wanted(tokens):
        """Features of every token of a sequence."""
        with torch.inference_mode():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        assert len(states) == 5  # what enters each of 4 layers, and what enters the head
        return torch.cat([states[-1 if aux_layer == "final" else aux_layer][0] for aux_layer in aux_layers], dim=-1)

    tables = [BlockTable(), BlockTable()]
    for table in tables:
        runner.cache.reserve(table, 16, 0)
    first, second = PROMPTS
    logits, got = runner.forward_with_features(
        [
            Segment.of_tree(tables[0], 0, first[:6], DraftTree.empty(), logits=False),
            Segment.of_tree(tables[1], 0, second, DraftTree.empty(), logits=True),
        ]
    )
    assert [len(x) for x in logits] == [0, 1]
    torch.testing.assert_close(got[0], wanted(first)[:6], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got[1], wanted(second), rtol=1e-3, atol=1e-3)

    root = 99
    _, got = runner.forward_with_features(
        [
            Segment.of_tree(tables[1], len(second), [root], DraftTree.empty(), logits=True),
            Segment.of_tree(tables[0], 6, first[6:], TREE, logits=True),
        ]
    )
    torch.testing.assert_close(got[0], wanted([*second, root])[-1:], rtol=1e-3, atol=1e-3)
    rows = [wanted(first)[6:]]
    for node in range(len(TREE)):
        rows.append(wanted([*first, *TREE.token[TREE.path_to(node)].tolist()])[-1:])
    torch.testing.assert_close(got[1], torch.cat(rows), rtol=1e-3, atol=1e-3)


def test_without_taps_there_are_no_features():
    runner = ModelRunner(adopt(build("llama"), "llama"), blocks=2)
    table = BlockTable()
    runner.cache.reserve(table, 4, 0)
    _, features = runner.forward_with_features([Segment.of_tree(table, 0, [5, 6], DraftTree.empty(), logits=True)])
    assert features == []
