"""DFlash heads as their config says them: judged by plain torch, which convicts an engine that leaves a part out."""

import dataclasses

import pytest
import torch
from torch import nn

from specscope import Engine
from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.findings import Exit
from tests.analyze.audit.runs import RULES, SMALL, assert_agrees, failed, run
from tests.dflash import VARIANTS, DFlashReference
from tests.engines import PROMPTS

JUDGED = [name for name in VARIANTS if not name.startswith("its own")]  # whose random embedding is like no other


def windowless(patch, engine):
    """No layer's window is heeded."""
    for layer in engine.drafter.runner.layers:
        patch.setattr(layer, "variant", dataclasses.replace(layer.variant, window=None))
        patch.setattr(layer, "compiled", None)


def causal(patch, engine):
    """Rows do not see those behind them."""
    head = engine.drafter.runner.head
    patch.setattr(head, "config", dataclasses.replace(head.config, causal=(True,) * len(head.config.causal)))


LEFT_OUT = {  # by the variant in whose runs it is missed
    "z-lab": causal,
    "speculators": lambda patch, engine: patch.setattr(engine.drafter.runner.head, "hidden_norm", nn.Identity()),
    "every layer with a window": windowless,
    "a mask embedding": lambda patch, engine: patch.setattr(
        engine.drafter.runner.loaded.embedding, "vector", torch.zeros(48)
    ),
}


def audited(deep, head, spoil=None):
    engine = Engine(target=str(deep), drafter="dflash", draft_model=str(head), **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        if spoil is not None:
            spoil(patch, engine)
        history = run(engine, RULES["temperature"], tokens=12, prompts=PROMPTS[:3])
    options = Options(ModelSource(str(deep), "tiny"), ModelSource(str(head), "head", kind="dflash"), None)
    return history, audit(history, "run.jsonl", options)


@pytest.mark.parametrize("name", JUDGED)
def test_a_healthy_run_agrees(deep, tmp_path, name):
    assert_agrees(*audited(deep, VARIANTS[name](tmp_path)), drafted=50)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_is_left_out_is_convicted(deep, tmp_path, name):
    _, found = audited(deep, VARIANTS[name](tmp_path), LEFT_OUT[name])
    assert "draft p" in failed(found)
    assert found.exit is Exit.INCONSISTENT


@pytest.mark.parametrize("name", VARIANTS)
def test_the_judge_computes_what_the_tensors_say(bench, tmp_path, name):
    """By the tests' own reading of the config, over one text."""
    folder, model = VARIANTS[name](tmp_path), bench.engine("eagle").runner.loaded.model
    head = BlockHead(ModelSource(str(folder), name), model)
    reference = DFlashReference(folder, model.get_input_embeddings(), model.get_output_embeddings().weight)
    features = torch.randn(19, 3 * 48, generator=torch.Generator().manual_seed(3))
    rows, tokens = 4 + head.first, torch.full((4 + head.first,), head.mask_token)
    tokens[0] = 41
    with torch.inference_mode():
        kv = head.context(head.combine(features), torch.arange(19))
        seen = torch.ones(rows, 19 + rows, dtype=torch.bool)
        hidden, _ = head.block(tokens, 19 + torch.arange(rows), seen, kv)
        logits = head.logits(hidden[head.first :])
        torch.testing.assert_close(logits, reference.drafts(features, 41, 4), rtol=1e-4, atol=1e-4)
