"""Steps run once more by our own engine: a healthy run comes out again, a broken one does not."""

import pytest

from specscope.analyze.findings import Exit
from specscope.measure.audit_again import audit_again
from specscope.trace.history.history import History
from tests.analyze.audit.runs import RULES, SETTINGS, Bench, failed, run
from tests.analyze.audit.test_faults import kv_not_moved, short_rotary_table
from tests.engines import each_drafter


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"))


def again(engine, history, **how):
    """With the engine's own models, by name."""
    return audit_again(history, "run.jsonl", engine.config.target, engine.config.draft_model, how.get("sample"))


@pytest.mark.every(3)
@pytest.mark.parametrize("rule", ["greedy", "all", "penalties"])
@pytest.mark.parametrize("name", each_drafter(name for name in SETTINGS if name not in ("none", "ngram")))
def test_a_healthy_run_comes_out_again(bench, name, rule):
    engine = bench.engine(name)
    history = run(engine, RULES[rule], tokens=10)
    found = again(engine, history)
    assert failed(found) == set()
    assert found.exit is Exit.CONSISTENT
    assert found.finding("committed tokens").check.tested > 0.5 * found.audited


def test_the_first_step_that_differs_is_shown(bench, monkeypatch):
    engine = bench.fresh("same model, top")
    with monkeypatch.context() as patch:
        kv_not_moved(engine, patch)
        history = run(engine, RULES["cold"], tokens=12)
    found = again(engine, history)
    p = found.finding("target p")
    assert p.check.failed
    first = p.check.example
    assert first == min((e.where for e in p.examples), key=lambda where: (where.request, where.index))
    before = history.requests[first.request].steps[: history.requests[first.request].place_of(first.index)]
    moved = [s for s in before if s.verdict is not None and s.verdict.path.tolist() != list(range(s.verdict.accepted))]
    assert moved  # nothing differs before a path was moved


def test_a_drafter_that_was_broken_drafts_another_tree(bench, monkeypatch):
    engine = bench.fresh("eagle")
    with monkeypatch.context() as patch:
        short_rotary_table(engine, patch)
        history = run(engine, RULES["greedy"], tokens=30)
    found = again(engine, history, sample=40)
    assert found.audited == 40
    assert "drafter tree" in failed(found)
    assert "target p" not in failed(found)


def test_a_history_without_a_header_is_refused(bench):
    from specscope.errors import UserError

    with pytest.raises(UserError, match="header"):
        audit_again(History(None, bench.engine("ngram").vocabulary), "run.jsonl", None, None, None)
