"""Heads as their config says them: judged by plain torch, which convicts an engine that leaves a part out."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.findings import CheckResult, Exit
from specscope.model.heads.eagle_head import EagleHead
from tests import dflash
from tests.analyze.audit.runs import RULES, failed, run
from tests.engines import PROMPTS
from tests.heads import VARIANTS, Reference

BLOCKS = [name for name in dflash.VARIANTS if not name.startswith("its own")]  # whose random embedding is like no other


@pytest.fixture
def of_variant(bench, tmp_path):
    """An engine over a head of a variant, one that several tests share where the bench has it."""

    def made(name, own=False):
        if name in VARIANTS:
            return bench.fresh(name) if own else bench.engine(name)
        return bench.fresh("dflash chain", draft_model=str(dflash.VARIANTS[name](tmp_path)))

    return made


def ran(engine, prompts=3):
    return run(engine, RULES["temperature"], tokens=12, prompts=PROMPTS[:prompts])


@pytest.mark.parametrize("name", [*VARIANTS, *(pytest.param(name, marks=pytest.mark.every(3)) for name in BLOCKS)])
def test_a_healthy_run_agrees(bench, of_variant, name):
    engine = of_variant(name)
    history = ran(engine)
    found = bench.audit(engine, history)
    assert (found.exit, found.unjudged) == (Exit.CONSISTENT, ())
    p, there = found.finding("draft p"), sum(len(part.tree) for record in history.steps for part in record.requests)
    assert (p.result, p.tested) == (CheckResult.PASSED, there)
    assert there > (100 if name in VARIANTS else 50)


def wide(patch, engine):
    """No layer's window is heeded."""
    runner = engine.drafter.runner
    for layer in runner.layers if hasattr(runner, "layers") else (runner.layer, *runner.further):
        patch.setattr(layer, "variant", dataclasses.replace(layer.variant, window=None))
        patch.setattr(layer, "compiled", None)


def causal(patch, engine):
    """Rows do not see those behind them."""
    head = engine.drafter.runner.head
    patch.setattr(head, "config", dataclasses.replace(head.config, causal=(True,) * len(head.config.causal)))


def unchanged(patch, engine):
    """Features are fed as they are."""
    patch.setattr(EagleHead, "before_fc", lambda head, features: features)


def no_vector(patch, engine):
    """The mask token's embedding is zero."""
    patch.setattr(engine.drafter.runner.loaded.embedding, "vector", torch.zeros(48))


LEFT_OUT = {  # of the engine: by the variant in whose runs it is missed
    "norm_output": lambda patch, engine: patch.setattr(EagleHead, "leave", lambda head, x: (head.norm(x), x)),
    "norm_before_fc": unchanged,
    "fc_norm": unchanged,
    "sliding": wide,
    "z-lab": causal,
    "speculators": lambda patch, engine: patch.setattr(engine.drafter.runner.head, "hidden_norm", nn.Identity()),
    "every layer with a window": wide,
    "a mask embedding": no_vector,
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_convicted(bench, of_variant, monkeypatch, name):
    engine = of_variant(name, own=True)
    with monkeypatch.context() as patch:
        LEFT_OUT[name](patch, engine)
        history = ran(engine, prompts=1)
    found = bench.audit(engine, history)
    assert "draft p" in failed(found)
    assert found.exit is Exit.INCONSISTENT


def features(rows):
    return torch.randn(rows, 3 * 48, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_judge_computes_what_the_tensors_say(bench, name):
    """By the tests' own reading of the config, over one text."""
    engine, folder = bench.engine(name), bench.heads[name]
    model = engine.runner.loaded.model
    head = Head(ModelSource(folder, name), model)
    reference = Reference(Path(folder), model.get_input_embeddings().weight)
    tokens, places = torch.tensor([5, 77, 5, 290, 31, 8, 8, 120, 9]), torch.arange(9)
    with torch.inference_mode():
        prepared = head.prepare(tokens, head.combine(features(9)))
        hidden, _ = head.run(prepared, places, places <= places[:, None], head.nothing())
        logits, state = reference.forward(tokens, reference.combine(features(9)))
        torch.testing.assert_close(head.fed_back(hidden), state, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(head.logits(hidden)[:, head.tokens], logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", dflash.VARIANTS)
def test_the_judge_of_blocks_computes_what_the_tensors_say(bench, tmp_path, name):
    folder, model = dflash.VARIANTS[name](tmp_path), bench.engine("eagle").runner.loaded.model
    head = BlockHead(ModelSource(str(folder), name), model)
    embedding, weight = model.get_input_embeddings(), model.get_output_embeddings().weight
    reference = dflash.DFlashReference(folder, embedding, weight)
    rows, tokens = 4 + head.first, torch.full((4 + head.first,), head.mask_token)
    tokens[0] = 41
    with torch.inference_mode():
        kv = head.context(head.combine(features(19)), torch.arange(19))
        seen = torch.ones(rows, 19 + rows, dtype=torch.bool)
        hidden, _ = head.block(tokens, 19 + torch.arange(rows), seen, kv)
        logits = head.logits(hidden[head.first :])
        torch.testing.assert_close(logits, reference.drafts(features(19), 41, 4), rtol=1e-4, atol=1e-4)
