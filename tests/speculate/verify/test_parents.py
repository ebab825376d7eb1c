"""What is noted at tried parents is what the distributions hold, in float64; how far rounding could flip them."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specscope.engine.engine import Engine
from specscope.speculate.sampling import LogitRows
from specscope.speculate.verify import host
from specscope.speculate.verify.distribution import Residual
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind, Outcome
from specscope.trace.record.rules import ROUNDING
from specscope.trace.record.tree import ROOT, DraftTree, Drawn
from tests.engines import DRAFTERS, PROMPTS
from tests.speculate.verify.enumeration import batch_of, dense

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.2, max_tokens=8, seed=2)


@pytest.mark.every(3)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_notes_are_those_of_the_distributions(engines, name, params):
    engine = engines[name]
    engine.keep_timeline()  # keeps the tensors of the step that ran last
    for prompt in PROMPTS[:3]:
        engine.add(prompt, params)
    seen = 0
    while engine.busy:
        record = engine.step()
        state = engine.last
        for part, turn in zip(record.requests, state.turns, strict=True):
            if part.verdict is not None:
                tokens = turn.request.tokens[: part.position + 1]
                check(part, turn.draft, turn.logits, params, tokens, len(turn.request.prompt_tokens))
                seen += len(part.parents.node)
    assert seen > 1 or name == "none"


def check(part, draft, logits, params, tokens, prompt_len):
    """One part against numbers that are computed one by one, in float64."""
    tree, verdict, notes = part.tree, part.verdict, part.parents
    tried = [node for node in (ROOT, *verdict.path.tolist()) if tree.children(node)]
    assert notes.node.tolist() == tried
    for k, node in enumerate(tried):
        raw = softmax(logits[node + 1])
        assert notes.top[k, 0] == raw.argmax()
        assert np.allclose(notes.top_p[k], np.sort(raw)[::-1][:4], atol=1e-6)
        p = shaped(part, logits, params, tokens, prompt_len, node)
        assert notes.choice[k] == p.argmax()
        assert np.isclose(notes.choice_p[k], p.max(), atol=1e-6)
        assert np.allclose([notes.entropy[k], notes.varentropy[k]], spread(p), atol=2e-5)
        for child in tree.children(node):
            token = int(tree.token[child])
            assert np.isclose(notes.raw_p[child], raw[token], atol=1e-6)
            assert notes.rank[child] == (0 if p[token] == 0 else 1 + int((p > p[token]).sum()))
        check_drafter(k, node, part, draft, raw)
    untried = verdict.outcome == Outcome.UNTRIED
    below = np.isin(tree.parent, tried)
    assert not notes.raw_p[untried & ~below].any()
    check_final(part, draft, shaped(part, logits, params, tokens, prompt_len, above(verdict)))


def check_drafter(k, node, part, draft, raw):
    tree, notes = part.tree, part.parents
    children = tree.children(node)
    if tree.drawn[children[0]] != Drawn.DETERMINISTIC:
        q = draft.q[node].double().numpy()
        assert np.allclose([notes.q_entropy[k], notes.q_varentropy[k]], spread(q), atol=2e-5)
        assert all(notes.q_rank[c] == 1 + (q > q[tree.token[c]]).sum() for c in children)
    row = draft.row([] if node == ROOT else tree.token[tree.path_to(node)].tolist())
    if row is None:
        assert not notes.draft_top_p[k].any()  # nothing, or zeros where the drafter looked at other parents
        return
    own, known = softmax(row.full()[0]), np.isfinite(row.full()[0].numpy())
    assert notes.draft_top[k, 0] == own.argmax()
    assert np.allclose(notes.draft_top_p[k], np.sort(own)[::-1][: notes.draft_top.shape[1]], atol=1e-6)
    choice = int(raw.argmax())
    assert notes.choice_rank[k] == (1 + int((own > own[choice]).sum()) if known[choice] else 0)
    assert np.isclose(notes.choice_q[k], own[choice], atol=1e-6)
    assert np.isclose(notes.outside[k], raw[~known].sum(), atol=1e-5)


def check_final(part, draft, p):
    """The final token's distribution: p, less what each rejected child took."""
    tree, verdict, notes = part.tree, part.verdict, part.parents
    assert np.isclose(notes.final_target_p, p[verdict.token], atol=1e-6)
    if verdict.kind is FinalKind.RECOVERED and p.max() < 1:
        q = draft.q.get(above(verdict))
        q = None if q is None else q.double().numpy()
        for child in tree.children(above(verdict)):
            token = int(tree.token[child])
            left = np.maximum(p - q, 0) if q is not None else np.where(np.arange(len(p)) == token, 0, p)
            p = left / left.sum()
            if q is not None:
                q = np.where(np.arange(len(p)) == token, 0, q)
                q = q / q.sum()
    assert np.isclose(verdict.final_p, p[verdict.token], atol=1e-5)
    assert np.allclose([notes.final_entropy, notes.final_varentropy], spread(p), atol=5e-5)


def above(verdict):
    return int(verdict.path[-1]) if len(verdict.path) else ROOT


def softmax(logits):
    return logits.double().softmax(-1).numpy()


def shaped(part, logits, params, tokens, prompt_len, node):
    """p below a node, as it is sampled from."""
    path = [] if node == ROOT else part.tree.token[part.tree.path_to(node)].tolist()
    found = LogitRows(logits[node + 1 : node + 2], params, tokens, prompt_len, [path]).distributions()[0]
    if hasattr(found, "row"):
        return found.row.double().numpy()
    return torch.nn.functional.one_hot(torch.tensor(found.token), logits.shape[-1]).double().numpy()


def spread(p):
    logs = np.log(np.maximum(p, 2.0**-126))
    entropy = -(p * logs).sum()
    return entropy, (p * logs**2).sum() - entropy**2


def test_lean_evidence_leaves_the_notes_out(tiny):
    engine = Engine(target=str(tiny), dtype="float32", kv_memory=0.01, drafter="ngram", evidence="lean")
    (result,) = engine.generate(PROMPTS[0], GREEDY)
    assert engine.run_info.evidence == "lean"
    assert all(step.parents is None for step in result.steps)
    assert result.steps[-1].preceded is not None


COIN = st.floats(0.001, 0.999)
ROWS = st.integers(0, 10_000).map(lambda seed: np.random.default_rng(seed).dirichlet(np.full(5, 0.7)))


def drawn(row, coin):
    token, _, margin = Residual(dense(row)).draw(coin)
    return token, margin


def test_what_is_certain_has_no_margin():
    assert drawn([0.0, 1.0, 0.0], 1e-9) == (1, 1.0)
    assert drawn([0.5, 0.5], 0.499)[1] == pytest.approx(0.001)
    assert drawn([0.5, 0.5], 1e-9)[1] == pytest.approx(0.5)  # below the first token there is none


def judged(p, coin, q=None, how=Drawn.DETERMINISTIC, forced=None):
    tree = DraftTree.build([0], [-1], None if q is None else [q[0]], how)
    own = {} if q is None else {-1: dense(q)}
    return host.verify(batch_of(tree, [dense(p)] * 2, own, [0.5, coin], forced))[0][0]


@given(ROWS, ROWS, COIN, st.booleans())
def test_another_outcome_needs_the_margin_and_no_less(row, q, coin, sampled):
    q, how = (q, Drawn.WITHOUT_REPLACEMENT) if sampled else (None, Drawn.DETERMINISTIC)
    verdict = judged(row, coin, q, how)
    margin = float(verdict.margin[0])
    for share, same in ((0.999, True), (1.001, False)):
        for way in (-1, 1):
            other = row.copy()
            other[0] += way * share * margin
            other[1:] *= (1 - other[0]) / row[1:].sum()
            if 0 < other[0] < 1:
                outcome = judged(other, coin, q, how).outcome[0]
                if same:
                    assert outcome == verdict.outcome[0]
                elif way == (1 if verdict.outcome[0] == 2 else -1):
                    assert outcome != verdict.outcome[0]


def test_near_ties_follow_the_dtype():
    verdict = judged([0.3, 0.7], 0.3 + 1e-6)
    assert verdict.near_ties("float32") == [0]
    assert judged([0.3, 0.7], 0.301).near_ties("float32") == []
    assert judged([0.3, 0.7], 0.301).near_ties("bfloat16") == [0]
    assert judged([0.3, 0.7], 0.3 + 1e-6, forced={0: True}).near_ties("float32") == []
    assert judged([0.3, 0.7], 0.3 + 1e-6).near_ties("another") == []
    final = dataclasses.replace(judged([0.3, 0.7], 0.9), final_margin=ROUNDING["float32"] / 2)
    assert final.near_ties("float32") == [1]
