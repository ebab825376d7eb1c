"""Trees from the text, drawn a second time: healthy ones agree, and each planted mistake is seen."""

from dataclasses import replace

from specscope.analyze.findings import CheckResult
from specscope.speculate.drafters import text
from tests.analyze.audit.runs import RULES, run
from tests.engines import PROMPTS


def tree_check(bench, engine, prompts=PROMPTS):
    history = run(engine, RULES["temperature"], tokens=16, prompts=prompts)
    return bench.audit(engine, history).finding("drafter tree")


def test_where_other_requests_texts_were_searched_too_nothing_is_accused(bench):
    """As captures made before --suffix-shared went say."""
    engine = bench.fresh("suffix")
    history = run(engine, RULES["temperature"], tokens=4)
    history.run = replace(history.run, speculation={"suffix_shared": 600})
    found = bench.audit(engine, history)
    check = found.finding("drafter tree")
    assert (check.result, check.tested) == (CheckResult.SKIPPED, 0)
    assert "The drafter was not judged: it also looked in the texts of other requests." in found.unjudged


def shifted_grow(seen, places, nodes, depth, real=text.grow):
    """What follows is taken a token too late."""
    late = [end + 1 for end in places if end + 1 < len(seen)]
    return real(seen, late or places, nodes, depth)


def test_a_shifted_lookup_is_seen(bench, monkeypatch):
    monkeypatch.setattr(text, "grow", shifted_grow)
    assert tree_check(bench, bench.fresh("suffix")).failed > 0
