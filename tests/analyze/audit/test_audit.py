"""Healthy runs are what plain transformers gives, within what rounding allows; and what cannot be audited is said."""

import itertools

import numpy as np
import pytest
import torch

from specscope import Engine, SamplingParams
from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.audit.tally import Tally, span
from specscope.analyze.evidence.visits import visits
from specscope.analyze.findings import CheckResult, Exit
from specscope.errors import UserError
from specscope.measure.judges import audit_options
from specscope.measure.prompts import PLAIN
from specscope.plans.kinds import text_part
from specscope.trace.history.history import History
from tests.analyze.audit.runs import RULES, drained, failed, run
from tests.engines import PROMPTS
from tests.heads import head_tensors, write_head

KINDS = itertools.cycle(("draft tree", "eagle", "ngram", "p-eagle dynamic", "dflash", "suffix", "mtp"))


@pytest.mark.every(2)
@pytest.mark.parametrize(("rule", "name"), zip(RULES, KINDS, strict=False))
def test_a_healthy_run_has_no_difference(bench, name, rule):
    """tests/engine/test_invariances.py has every drafter, under pressure."""
    engine, history = bench.engine(name), bench.ran(name, rule)
    found = bench.audit(engine, history)
    assert failed(found) == set()
    assert found.exit is Exit.CONSISTENT
    drafted = sum(len(part.tree) for record in history.steps for part in record.requests)
    greedy = found.finding("final token") is not None
    assert found.audited == sum(one.acceptance.steps for one in history.requests.values())
    assert (found.finding("final token" if greedy else "final p").tested) >= 0.9 * found.audited
    if drafted:
        p = found.finding("target p")
        assert p.tested + (p.note != "") >= 0.9 * drafted
        if text_part(engine.config.drafter):
            tree = found.finding("drafter tree")
            assert (tree.result, tree.tested) == (CheckResult.PASSED, found.audited)
        else:
            p = found.finding("draft p")
            assert (p.result, p.tested) == (CheckResult.PASSED, drafted)


def test_a_sample_is_spread_evenly(bench):
    found = bench.audit(bench.engine("draft tree"), bench.ran("draft tree", "top-k"), sample=10)
    assert found.audited == 10
    assert found.steps > 20
    assert failed(found) == set()


def test_a_long_text_is_fed_in_pieces(bench, monkeypatch):
    from specscope.analyze.audit.model import causal

    monkeypatch.setattr(causal, "PIECE", 7)
    history = bench.ran("same model", "temperature")
    assert failed(bench.audit(bench.engine("same model"), history)) == set()


def test_a_head_that_amplifies_rounding_is_not_convicted_of_it(bench, tmp_path):
    tensors = head_tensors(version=1, bias=True)
    path = write_head(tmp_path, tensors | {name: tensors[name] * 8 for name in ("fc.weight", "fc.bias")})
    engine = bench.fresh("sharp", drafter="eagle", draft_model=str(path), tree="2x3")
    found = bench.audit(engine, run(engine, {}, 30, PROMPTS[:3]))
    assert (failed(found), found.finding("draft p").tested > 500) == (set(), True)


@pytest.mark.parametrize(("has_tails", "times", "passes"), [(True, 2, True), (True, 5, False), (False, 2, False)])
def test_two_figures_of_a_short_run_may_lie_in_the_tails_of_half_precision(bench, has_tails, times, passes):
    """A context may round more than any that was measured; not by many times as much, and not in float32."""
    history, tally = bench.ran("ngram", "temperature"), Tally("target p", "p is the model's", has_tails=has_tails)
    for number, visit in enumerate(v for v in visits(history) if v.part.is_judged):
        off = 0.1 * times if number in (3, 4) else 0.0
        recorded = span(0.5, off)[1]
        tally.compare(visit.reference(), recorded, 0.5, span(0.5, 0.1), "", cuts=False)
    assert (tally.finding(history).result is CheckResult.PASSED) == passes


def test_a_lookup_is_not_missed_while_drafting_is_off(bench):
    engine = bench.fresh("ngram", disable_above=1)
    history = run(engine, {}, 30, PROMPTS[:3])
    assert not all(record.speculation for record in history.steps)
    assert failed(bench.audit(engine, history)) == set()


def test_another_target_differs_everywhere(bench, tiny):
    found = audit(bench.ran("ngram", "temperature"), "run.jsonl", Options(ModelSource(str(tiny), "another")))
    assert found.exit is Exit.INCONSISTENT
    assert found.finding("final p").failed > 0.9 * found.finding("final p").tested
    assert "final p" in found.finding("final p").sentence


def test_what_cannot_be_audited_is_said(bench):
    engine, history = bench.engine("ngram"), bench.ran("ngram", "greedy")
    options = bench.options(engine)
    with pytest.raises(UserError, match="header"):
        audit(History(None, engine.vocabulary), "run.jsonl", options)
    with pytest.raises(UserError, match="no decode step"):
        audit(History(engine.run_info, engine.vocabulary), "run.jsonl", options)
    with pytest.raises(UserError, match="cannot load nothing"):
        audit(history, "run.jsonl", Options(ModelSource("/nowhere", "nothing")))


def test_a_judge_that_disagrees_with_itself_does_not_judge(bench, monkeypatch):
    """Were the mask not kept, every tolerance would be wide enough for anything."""
    from specscope.analyze.audit.model.causal import Causal

    real = Causal.masks
    monkeypatch.setattr(Causal, "masks", lambda self, seen, distance: real(self, seen | True, distance))
    with pytest.raises(UserError, match="disagrees with itself"):
        bench.audit(bench.engine("same model, top"), bench.ran("same model, top", "cold"))


def test_a_least_length_that_was_not_held_is_found(bench, monkeypatch):
    """The engine forgets the mask: the recorded p is the free model's."""
    engine = bench.fresh("same model")
    monkeypatch.setattr("specscope.speculate.sampling.mask_", lambda logits, rows: logits)
    history = run(engine, {"min_tokens": 12, "logit_bias": {2: 7.0}, "temperature": 1.0})
    assert failed(bench.audit(engine, history)) & {"target p", "final p"}


def test_without_xgrammar_requests_with_a_form_are_left_out_and_named(bench, monkeypatch):
    pytest.importorskip("xgrammar")
    engine = bench.engine("ngram")
    choice = {"structured_outputs": {"choice": ("abab", "a\nb", "hello")}, "temperature": 1.0}
    history = run(engine, choice, prompts=PROMPTS[:2])
    for step in run(engine, {}, prompts=PROMPTS[2:3]).steps:
        history.append(step)
    monkeypatch.setattr("specscope.analyze.audit.audit._HAS_GRAMMARS", False)
    found = bench.audit(engine, history)
    assert failed(found) == set()
    assert found.exit is Exit.NOT_JUDGED
    assert any("2 requests with structured output left out: pip install" in sentence for sentence in found.unjudged)


OF_DEFAULT = [{}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2}]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thousands_of_nodes_of_the_default_model_have_no_false_difference(dtype):
    engine = Engine(dtype=dtype, tree="dynamic:10,depth=4,top=4", threads=1)
    for at, prompt in enumerate(PLAIN * 3):
        engine.add(engine.turn(prompt), SamplingParams(max_tokens=32, seed=at, **OF_DEFAULT[at % len(OF_DEFAULT)]))
    history = drained(engine)
    found = audit(history, "run.jsonl", audit_options(history, None, None, None))
    assert found.nodes > 2000
    assert failed(found) == set(), [(one.sentence, one.examples) for one in found.findings if one.failed]


SLACK = 0.5  # of logits against each other
CUTS = {
    "top-p": {"top_p": 0.5},
    "top-k": {"top_k": 4},
    "min-p": {"min_p": 0.2},
    "top-k and top-p": {"top_k": 10, "top_p": 0.6, "temperature": 1.4},
    "all": {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 0.7},
}


@pytest.mark.parametrize("name", CUTS)
def test_whatever_rounding_makes_of_logits_is_allowed(name):
    params = SamplingParams(**{"temperature": 1.0, **CUTS[name]})
    rules, slack = Rules(params, []), SLACK / params.temperature
    for seed in range(60):
        draw = np.random.default_rng(seed)
        row = torch.tensor(draw.normal(0, draw.choice([0.5, 2.0]), 40), dtype=torch.float32)
        low, high = rules.bounds(row, SLACK)
        rounded = row + torch.tensor(draw.uniform(-SLACK / 2, SLACK / 2, 40), dtype=torch.float32)
        p = rules.scores(rounded[None]).softmax(-1)[0]
        for token in range(40):
            allowed = span(float(low[token]), slack)[0], span(float(high[token]), slack)[1]
            assert allowed[0] <= float(p[token]) <= allowed[1], (seed, token, float(p[token]), allowed)


def test_a_token_far_from_the_border_keeps_its_bounds():
    """One that is surely in is never allowed to be out, and one that is surely out never to be in."""
    rules = Rules(SamplingParams(temperature=1.0, top_k=2), [])
    low, high = rules.bounds(torch.tensor([10.0, 8.0, 2.0, 1.0]), SLACK)
    assert low[:2].min() > 0.1
    assert (high[2:].max(), float(high[0])) == (0, pytest.approx(float(low[0])))
