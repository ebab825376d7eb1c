"""Faults put into a running engine: the audit finds each and its place; heads of every kind, and what fed them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.audit.tally import FED
from specscope.analyze.findings import CheckResult, Exit
from specscope.measure.judges import audit_options
from specscope.model.heads.eagle_head import EagleHead
from specscope.speculate.drafters import eagle, text
from tests import dflash
from tests.analyze.audit.runs import RULES, failed, run
from tests.analyze.edits import changed, replaced
from tests.engines import PROMPTS
from tests.faults import fault as faults
from tests.faults.planted import FAULTS
from tests.faults.planted.drafter_kv import short_table
from tests.faults.settings import capture, history, short
from tests.heads import VARIANTS, Reference


@faults.replaced(eagle, "with_masks")
def masks_at_one_position(real, segment, count, mask_token):
    """Every mask row of a P-EAGLE head lies right behind the root's pair."""
    found = real(segment, count, mask_token)
    found.positions[len(segment.tokens) :] = found.positions[len(segment.tokens) - 1] + 1
    return found


@faults.replaced(text, "grow")
def shifted_grow(real, seen, places, nodes, depth):
    """What follows is taken a token too late."""
    late = [end + 1 for end in places if end + 1 < len(seen)]
    return real(seen, late or places, nodes, depth)


OF_THIS_TARGET = {
    "rotary table too short": short_table(30),
    "masks at one position": masks_at_one_position,
    "suffix one late": shifted_grow,
}
MANY = [f"{word} {number}" for number in range(3) for word in ("one two one two", "abc", "so it goes", "x y", "zzz")]
AFTER = ["accepted in the previous step", "the step before is", "nodes of the previous step"]
FOUND = [  # the fault, the engine and the rule that it shows in, the check that fails, words of the condition: any do
    ("mask shows siblings", "same model", "temperature", "target p", ["first sibling", "sibling"]),
    ("positions by index", "same model, top", "cold", "target p", ["ancestors", "the parent", "first sibling"]),
    ("KV not moved", "same model, top", "cold", "target p", ["previous step's path was moved"]),
    ("penalties of the root", "same model", "penalties", "target p", ["depth", "the parent is"]),
    ("temperature twice", "same model", "cold", "target p", ["all "]),
    ("layers in another order", "eagle", "greedy", "draft p", ["all "]),
    ("features of roots only", "eagle dynamic", "greedy", "draft p", AFTER),
    ("rotary table too short", "eagle", "greedy", "draft p", ["position", "context length", "output tokens"]),
    ("nodes one position further", "eagle dynamic", "greedy", "draft p", ["depth", "the parent is"]),
    ("masks at one position", "p-eagle dynamic", "greedy", "draft p", ["depth", "the parent is"]),
    ("leaf taken for run", "same model, top", "cold", "draft p", ["the step before is full", AFTER[0]]),
    ("suffix one late", "suffix", "temperature", "drafter tree", [""]),
    ("lookup one late", "ngram", "greedy", "drafter tree", ["nodes", "depth of the tree", "drafter is"]),
    ("map off by a row", "eagle", "greedy", "drafter tokens", ["all "]),
    ("q told warmer", "draft tree", "temperature", "draft p", ["all "]),
]
# These stay in a cache: one step in each request shows what began it, so it takes several requests.
BEGIN_LATE = ("positions by index", "KV not moved", "leaf taken for run", "features of roots only")


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("fault", "name", "rule", "check", "words"),
    [pytest.param(*row, id=row[0], marks=pytest.mark.slow if row[0] in BEGIN_LATE else ()) for row in FOUND],
)
def test_a_fault_is_found_where_it_is(bench, monkeypatch, fault, name, rule, check, words):
    engine = bench.fresh(name)
    with monkeypatch.context() as patch:
        (OF_THIS_TARGET.get(fault) or FAULTS[fault].install)(patch, engine)
        with torch.inference_mode():
            history = run(engine, RULES[rule], prompts=MANY if fault in BEGIN_LATE else PROMPTS)
    found = bench.audit(engine, history)
    assert check in failed(found), [(f.name, f.tested, f.failed) for f in found.findings]
    said = found.finding(check).sentence
    assert any(word in said for word in words), said


def recorded(fault=None):
    """A short run of a head, with a fault or without."""
    return history(capture(short("eagle chain" if fault is None else fault.setting), fault))


def fed(history):
    """What an audit finds of the rows that fed the head."""
    return audit(history, "run", audit_options(history, None, None, 30)).finding(FED)


@pytest.fixture(scope="module")
def healthy():
    return recorded()


def test_a_healthy_run_was_fed_what_the_text_gives(healthy):
    check = fed(healthy)
    drafted = sum(part.notes is not None for record in healthy.steps for part in record.requests)
    assert (check.result, check.failed) == (CheckResult.PASSED, 0)
    assert 20 < check.tested <= drafted


LOOKS = {
    "layers one lower": "layers 1, 2, 3 instead of 2, 3, 4",
    "layers in another order": "layers 4, 3, 2 instead of 2, 3, 4",
    "features one late": "the hidden states of the position before",
}


@pytest.mark.every(2)
@pytest.mark.parametrize("fault", LOOKS)
def test_whose_hidden_states_were_fed_is_said(fault):
    check = fed(recorded(FAULTS[fault]))
    assert check.failed == check.tested > 20
    assert check.about.endswith(f"it looks like {LOOKS[fault]}")


def test_one_token_that_is_not_the_texts_is_named_with_its_step(healthy):
    step = next(part for part in healthy.requests["r1"].steps if part.index > 3 and part.notes is not None)
    first = [1] + [0] * (len(step.notes.fed_token) - 1)
    other = replaced(step, notes__fed_token=step.notes.fed_token + first)
    found = fed(changed(healthy, lambda part: other if part == step else None))
    assert found.failed == 1
    assert (found.example.request, found.example.index) == ("r1", step.index)
    assert f"at position {step.notes.fed_position[0]}, where the text has" in found.detail


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


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*VARIANTS, *BLOCKS])
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


@pytest.mark.every(2)
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
