"""p against the sampling parameters: a run judged under others is convicted, and so are rules left out at depth."""

import dataclasses

import pytest

from specscope.analyze.findings import CheckResult
from specscope.speculate.sampling import LogitRows
from specscope.trace.record.tree import ROOT
from tests.analyze.edits import check, edited, failed, of, passed, put, under
from tests.analyze.verify.conftest import run

SAMPLED = {
    "top-k": {"temperature": 1.3, "top_k": 20},
    "min-p": {"temperature": 1.1, "min_p": 0.05},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "temperature and penalties": {"temperature": 0.9, "presence_penalty": 0.5, "logit_bias": {65: 2.0}},
}
OTHER = {
    "top-k": {"top_k": 2},
    "min-p": {"min_p": 0.5},
    "top-p": {"top_p": 0.2},
    "temperature and penalties": {"presence_penalty": 0.0},
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("engine", ["draft tree", "eagle dynamic"])
def test_each_rule_is_seen_and_passes(bench, name, engine):
    history = run(bench.engine(engine), **SAMPLED[name])
    assert failed(history) == []
    assert passed(history, name)
    found = check(under(history, **OTHER[name]), name)
    assert found.result is CheckResult.FAILED
    assert "at depth" in found.detail


def test_tokens_that_tie_at_a_border_of_top_p_are_all_kept(bench):
    """In 16 bits logits lie on a grid, and many share the last place of a long tail: more mass than top_p is kept."""
    history = run(bench.engine("draft tree"), temperature=1.0, top_p=0.7)
    kept = of(
        lambda part: part.parents is not None and part.verdict.p[0] > 0 and part.tree.parent[0] == ROOT,
        parents__rank=lambda part: put(part.parents.rank, 0, 180),
        parents__raw_p=lambda part: put(part.parents.raw_p, 0, 1e-4),
        parents__choice_p=lambda part: part.parents.choice_p * _kept(part) / 0.7025,
    )
    assert "top-p" in failed(edited(history, kept))
    history.run = dataclasses.replace(history.run, dtype="bfloat16")
    assert "top-p" not in failed(edited(history, kept))
    assert check(under(history, top_p=0.2), "top-p").result is CheckResult.FAILED


def _kept(part):
    """The raw mass that the first parent's top-p kept."""
    notes = part.parents
    return notes.top_p[0][notes.top[0] == notes.choice[0]].sum() / notes.choice_p[0]


@pytest.mark.parametrize("said", [1.0, 2.0])
def test_q_of_another_temperature(bench, said):
    """A drafter that sampled colder than the request asked for."""
    history = run(bench.engine("draft tree"), temperature=0.05)
    assert failed(history) == []
    assert passed(history, "draft's temperature")
    assert check(under(history, temperature=said), "draft's temperature").result is CheckResult.FAILED


def test_repetition_penalty_has_a_direction(bench):
    """Where a token was seen before, p may only be less than without it."""
    history = run(bench.engine("draft tree"), temperature=0.9, repetition_penalty=1.3)
    assert failed(history) == []
    assert "temperature and penalties" in failed(under(history, repetition_penalty=1.0))
    assert "temperature and penalties" in failed(under(history, repetition_penalty=0.7))


def test_penalties_that_forget_the_path_are_convicted(bench, monkeypatch):
    """The root's row is right, deeper ones count the output without the drafted tokens on the way."""

    def forgets(context, draft, logits):
        return LogitRows(logits, context.params, context.tokens, context.prompt_len, [[]] * len(logits))

    monkeypatch.setattr("specscope.speculate.verify.batch.logit_rows", forgets)
    history = run(bench.engine("draft tree"), max_tokens=120, temperature=0.7, frequency_penalty=1.5)
    found = check(history, "temperature and penalties")
    assert found.result is CheckResult.FAILED
    assert "at depth 2" in found.detail


def test_rules_that_stop_at_the_root_are_convicted(bench, monkeypatch):
    """top-k is applied to the root's row alone."""
    from specscope.speculate import sampling

    real = sampling.softmax_

    def first_row(rows, params):
        deeper = real(rows[1:].clone(), dataclasses.replace(params, top_k=0))
        rows[1:] = deeper
        real(rows[:1], params)
        return rows

    monkeypatch.setattr("specscope.speculate.sampling.softmax_", first_row)
    history = run(bench.engine("eagle dynamic"), temperature=0.8, top_k=3)
    found = check(history, "top-k")
    assert found.result is CheckResult.FAILED
    assert "at depth 1" not in found.detail
