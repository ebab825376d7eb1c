"""Trees from the text, drawn a second time: healthy ones agree, and each planted mistake is seen."""

from dataclasses import replace

import pytest

from specscope.analyze.findings import CheckResult
from specscope.speculate.drafters import candidates, ngram, suffix
from specscope.speculate.drafters.candidates import Candidates
from specscope.trace.record.method import MODEL, TEXT
from tests.analyze.audit.runs import RULES, Bench, run
from tests.engines import PROMPTS


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"))


def tree_check(bench, engine, prompts=PROMPTS):
    history = run(engine, RULES["temperature"], tokens=16, prompts=prompts)
    return bench.audit(engine, history).finding("drafter tree").check


def test_where_other_requests_texts_were_searched_too_nothing_is_accused(bench):
    """As captures made before --suffix-shared went say."""
    engine = bench.fresh("suffix")
    history = run(engine, RULES["temperature"], tokens=4)
    history.run = replace(history.run, speculation={"suffix_shared": 600})
    found = bench.audit(engine, history)
    check = found.finding("drafter tree").check
    assert (check.result, check.tested) == (CheckResult.SKIPPED, 0)
    assert "The drafter was not judged: its lookups went through the texts of other requests too." in found.unjudged


def shifted_grow(text, places, nodes, depth, real=suffix.grow):
    """What follows is taken a token too late."""
    late = [end + 1 for end in places if end + 1 < len(text)]
    return real(text, late or places, nodes, depth)


@pytest.mark.parametrize("name", ["suffix", "suffix+eagle"])
def test_a_shifted_lookup_is_seen(bench, monkeypatch, name):
    monkeypatch.setattr(suffix, "grow", shifted_grow)
    assert tree_check(bench, bench.fresh(name)).failed > 0


def test_a_branch_that_is_left_out_is_seen(bench, monkeypatch):
    branches = ["abx aby abx abz ab", "1 2 1 3 1 2 1 4 1 2 1"]  # two tokens that were followed by different ones
    assert tree_check(bench, bench.fresh("suffix"), branches).failed == 0
    monkeypatch.setattr(suffix, "LEAST", 0.6)
    assert tree_check(bench, bench.fresh("suffix"), branches).failed > 0


def test_prompt_lookup_beside_a_head_is_drawn_again_too(bench, monkeypatch):
    real = ngram.trie
    monkeypatch.setattr(ngram, "trie", lambda found: real([one[1:] or one for one in found]))
    assert tree_check(bench, bench.fresh("ngram+eagle")).failed > 0


def test_a_source_that_is_swapped_is_seen(bench, monkeypatch):
    real = Candidates._source
    swapped = {TEXT: MODEL, MODEL: TEXT}
    monkeypatch.setattr(candidates.Candidates, "_source", lambda self, node: swapped.get(real(self, node), 2))
    assert tree_check(bench, bench.fresh("suffix+eagle")).failed > 0
