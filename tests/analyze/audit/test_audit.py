"""Healthy runs: every number that was recorded is the one that plain transformers gives."""

import pytest

from specscope import Engine, SamplingParams
from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.findings import CheckResult, Exit
from specscope.errors import UserError
from specscope.measure.judges import audit_options
from specscope.measure.prompts import PLAIN
from specscope.plans.kinds import text_part
from specscope.trace.history.history import History
from tests.analyze.audit.runs import RULES, SETTINGS, failed, run
from tests.engines import PROMPTS, each_drafter


@pytest.mark.every(6)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", each_drafter(SETTINGS))
def test_a_healthy_run_has_no_difference(bench, name, rule):
    engine = bench.engine(name)
    history = run(engine, RULES[rule], tokens=16, prompts=PROMPTS[:4])
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
    engine = bench.engine("draft tree")
    history = run(engine, RULES["top-k"])
    found = bench.audit(engine, history, sample=20)
    assert found.audited == 20
    assert found.steps > 20
    assert failed(found) == set()


def test_a_long_text_is_fed_in_pieces(bench, monkeypatch):
    from specscope.analyze.audit.model import causal

    monkeypatch.setattr(causal, "PIECE", 7)
    engine = bench.engine("same model")
    assert failed(bench.audit(engine, run(engine, RULES["temperature"]))) == set()


def test_another_target_differs_everywhere(bench, tiny):
    engine = bench.engine("ngram")
    history = run(engine, RULES["temperature"])
    found = audit(history, "run.jsonl", Options(ModelSource(str(tiny), "another")))
    assert found.exit is Exit.INCONSISTENT
    assert found.finding("final p").failed > 0.9 * found.finding("final p").tested
    assert "final p" in found.finding("final p").sentence


def test_what_cannot_be_audited_is_said(bench):
    engine = bench.engine("ngram")
    history = run(engine, {}, prompts=["abcabc"])
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
    engine = bench.engine("same model, top")
    with pytest.raises(UserError, match="disagrees with itself"):
        bench.audit(engine, run(engine, RULES["cold"]))


FORMS = {
    "json": {"structured_outputs": {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}},
    "choice": {"structured_outputs": {"choice": ("abab", "a\nb", "hello")}, "temperature": 1.0},
    "regex": {
        "structured_outputs": {"regex": "([!-@]|[a-z]{2}[A-Z])+"},
        "temperature": 1.2,
        "top_k": 40,
        "min_tokens": 9,
    },
    "min tokens": {"min_tokens": 8, "temperature": 1.0, "logit_bias": {2: 9.0, 80: 5.0}, "stop_token_ids": (80,)},
}


def test_a_least_length_that_was_not_held_is_found(bench, monkeypatch):
    """The engine forgets the mask: the recorded p is the free model's."""
    engine = bench.fresh("same model")
    monkeypatch.setattr("specscope.speculate.sampling.mask_", lambda logits, rows: logits)
    history = run(engine, {"min_tokens": 12, "logit_bias": {2: 7.0}, "temperature": 1.0})
    assert failed(bench.audit(engine, history)) & {"target p", "final p"}


def test_without_xgrammar_requests_with_a_form_are_left_out_and_named(bench, monkeypatch):
    pytest.importorskip("xgrammar")
    engine = bench.engine("ngram")
    history = run(engine, FORMS["choice"], prompts=PROMPTS[:2])
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
    history = History(engine.run_info, engine.vocabulary)
    for at, prompt in enumerate(PLAIN * 3):
        engine.add(engine.turn(prompt), SamplingParams(max_tokens=32, seed=at, **OF_DEFAULT[at % len(OF_DEFAULT)]))
    while engine.busy:
        history.append(engine.step())
    found = audit(history, "run.jsonl", audit_options(history, None, None, None))
    assert found.nodes > 2000
    assert failed(found) == set(), [(one.sentence, one.examples) for one in found.findings if one.failed]
