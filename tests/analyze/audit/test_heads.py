"""Heads as their config says them: judged by plain torch, which convicts an engine that leaves a part out."""

from pathlib import Path

import pytest
import torch

from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.findings import Exit
from specscope.model.heads.eagle_head import EagleHead
from tests.analyze.audit.runs import RULES, assert_agrees, failed, run
from tests.engines import PROMPTS
from tests.heads import VARIANTS, Reference

# Left out of the engine: by the variant in whose runs it is missed
LEFT_OUT = {
    "norm_output": lambda patch, engine: patch.setattr(EagleHead, "leave", lambda head, x: (head.norm(x), x)),
    "norm_before_fc": lambda patch, engine: patch.setattr(EagleHead, "before_fc", lambda head, features: features),
    "fc_norm": lambda patch, engine: patch.setattr(EagleHead, "before_fc", lambda head, features: features),
    "sliding": lambda patch, engine: wide(engine.drafter.runner),
}


def wide(runner):
    """No layer's window is heeded."""
    for layer in (runner.layer, *runner.further):
        object.__setattr__(layer.variant, "window", None)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_healthy_run_agrees(bench, name):
    engine = bench.engine(name)
    history = run(engine, RULES["temperature"], tokens=12, prompts=PROMPTS[:3])
    assert_agrees(history, bench.audit(engine, history), drafted=100)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_convicted(bench, monkeypatch, name):
    engine = bench.fresh(name)
    LEFT_OUT[name](monkeypatch, engine)
    history = run(engine, RULES["temperature"], tokens=12, prompts=PROMPTS[:3])
    found = bench.audit(engine, history)
    assert "draft p" in failed(found)
    assert found.exit is Exit.INCONSISTENT


@pytest.mark.parametrize("name", VARIANTS)
def test_the_judge_computes_what_the_tensors_say(bench, name):
    """By the tests' own reading of the config, over one text."""
    engine, folder = bench.engine(name), bench.heads[name]
    model = engine.runner.loaded.model
    head = Head(ModelSource(folder, name), model)
    reference = Reference(Path(folder), model.get_input_embeddings().weight)
    features = torch.randn(9, 3 * 48, generator=torch.Generator().manual_seed(3))
    tokens, places = torch.tensor([5, 77, 5, 290, 31, 8, 8, 120, 9]), torch.arange(9)
    with torch.inference_mode():
        prepared = head.prepare(tokens, head.combine(features))
        hidden, _ = head.run(prepared, places, places <= places[:, None], head.nothing())
        logits, state = reference.forward(tokens, reference.combine(features))
        torch.testing.assert_close(head.fed_back(hidden), state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(hidden)[:, head.tokens], logits, rtol=1e-4, atol=1e-4)
