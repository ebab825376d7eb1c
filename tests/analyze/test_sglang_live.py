"""Captures of the real SGLang 0.5.23 (tests/data/sglang): it is not accused of what it does by design, and what is
wrong with it has its name. The default model and the bundled head judge."""

from pathlib import Path

import pytest

from specscope.analyze.audit.audit import audit, verdict
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from specscope.analyze.report import build_report
from specscope.analyze.verify.trial import judge
from specscope.analyze.why import why_run
from specscope.measure.judges import DEFAULT_HEAD, audit_options
from specscope.model.places import bundled_model
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import failed

CAPTURES = Path(__file__).parent.parent / "data" / "sglang"
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in CAPTURES.glob("*.gz"))


def history_of(name):
    return read_capture(CAPTURES / f"{name}.jsonl.gz").history


def options(history, sample=None):
    model = str(bundled_model(lambda _: None))
    draft = {"eagle": str(DEFAULT_HEAD), "draft_model": model}.get(history.run.drafter)
    return audit_options(history, model, draft, sample)


def audited(name, sample=None):
    history = history_of(name)
    return audit(history, name, options(history, sample))


@pytest.mark.parametrize("name", NAMES)
def test_verify_finds_each_consistent(name):
    trial = judge(history_of(name), source=name)
    assert [check.name for check in trial.failed] == []
    assert trial.exit is Exit.CONSISTENT


def test_filled_trees_are_a_remark():
    trial = judge(history_of("ngram_greedy"), source="")
    assert (
        "this engine fills its trees with a token that was not drafted: 329 of 520 nodes are verified for nothing"
        in trial.notes
    )


def test_a_first_token_of_which_nobody_saw_p_is_left_out_and_counted():
    found = audited("chain_sampled", sample=4)
    assert failed(found) == set()
    assert found.finding("final p").note == "1 step whose p was not recorded left out"


@pytest.mark.slow
def test_lookups_in_the_texts_of_all_requests_are_not_judged():
    found = audited("ngram_greedy", sample=4)
    assert failed(found) == set()
    text = verdict(found.findings, found.audited, found.unjudged)
    assert "The drafter was not judged: this engine looks up drafts in the texts of all its requests" in text


def test_what_is_not_recorded_is_not_judged_and_has_no_figure():
    history = history_of("tree_sampled")
    (likeliest,) = [check for check in judge(history, source="").checks if check.name == "drafter's likeliest"]
    assert likeliest.note == "the drafter's likeliest tokens are not recorded"
    assert build_report(history, source="").engine.peak_kv_usage is None


def test_that_ranks_are_not_known_is_said_once():
    lines = why_run(history_of("tree_sampled")).lines()
    assert sum("unknown" in line for line in lines) == 1
    assert lines[-1].startswith("! the drafter's likeliest tokens are not recorded")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain_greedy", "chain_sampled"])
def test_audit_agrees_at_all_nodes(name):
    assert failed(audited(name)) == set()


@pytest.mark.slow
def test_penalties_are_relaxed_by_design_and_the_drafter_takes_none():
    found = audited("situations")
    assert failed(found) == set()
    assert any("takes penalties on drafted rows from tokens committed" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("tree_sampled", Cause.DRAFTER_KV),
        ("tree_greedy", Cause.DRAFTER_KV),
        ("standalone_cached", Cause.DRAFTER_KV),
        ("faults/other_layers", Cause.DRAFTER_FED),
        ("faults/row_before", Cause.DRAFTER_FED),
        ("faults/kv_not_moved", Cause.TARGET_KV),
    ],
)
def test_what_is_wrong_with_it_is_named_first(name, cause):
    """Its own mistakes, and those of tests/sglang/live.py planted into it."""
    history = history_of(name)
    assert examine(history, name, options(history, 120)).suspects[0].cause is cause
