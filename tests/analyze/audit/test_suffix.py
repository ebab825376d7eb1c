"""Trees from the text, drawn a second time: healthy ones agree, and each planted mistake is seen."""

import pytest

from specscope.analyze.audit.shelf import EndedTexts
from specscope.analyze.findings import CheckResult
from specscope.speculate.drafters import candidates, ngram, suffix
from specscope.speculate.drafters.candidates import Candidates
from specscope.trace.record.method import MODEL, TEXT
from tests.analyze.audit.runs import RULES, SETTINGS, Bench, run
from tests.engines import PROMPTS

SHARED = {"drafter": "suffix", "tree": "dynamic:6,depth=4", "suffix_shared": 600}


@pytest.fixture(scope="module")
def bench(deep, tmp_path_factory):
    return Bench(deep, tmp_path_factory.mktemp("head"))


def tree_check(bench, engine, prompts=PROMPTS):
    history = run(engine, RULES["temperature"], tokens=16, prompts=prompts)
    return bench.audit(engine, history).finding("drafter tree").check


def test_texts_of_earlier_requests_are_taken_from_the_capture(bench, monkeypatch):
    monkeypatch.setitem(SETTINGS, "shared", SHARED)
    engine = bench.fresh("shared")
    history = run(engine, RULES["temperature"], tokens=12, prompts=[*PROMPTS, *PROMPTS])
    told = [part.method.match_source for r in history.steps for part in r.requests if part.method is not None]
    assert any("other requests" in source for source in told)
    check = bench.audit(engine, history).finding("drafter tree").check
    assert (check.result, check.failed) == (CheckResult.PASSED, 0)
    assert check.tested == sum(part.verdict is not None for r in history.steps for part in r.requests)
    assert "600 tokens of requests before" in check.about


def test_where_it_is_not_known_what_was_kept_is_said(bench, monkeypatch):
    monkeypatch.setitem(SETTINGS, "shared", SHARED)
    engine = bench.fresh("shared")
    engine.runner.cache.pool.__init__(9)
    long = ["abcabcabcab " * 4, "hello hello hel " * 3, "x y z x y z " * 3]
    history = run(engine, RULES["temperature"], prompts=long)
    assert sum(one.preempted for one in history.requests.values()) > 0
    check = bench.audit(engine, history).finding("drafter tree").check
    assert check.failed == 0
    assert "left out" in check.about


def test_the_shelf_holds_the_last_that_ended(bench, monkeypatch):
    monkeypatch.setitem(SETTINGS, "shared", SHARED)
    history = run(bench.fresh("shared"), {}, tokens=6)
    shelf = EndedTexts.of(history, 20)
    end = history.steps[-1].step + 1
    kept = shelf.before(end, "nobody")
    assert kept
    assert sum(map(len, kept)) <= 20
    assert shelf.before(0, "nobody") == []


def shifted_grow(places, nodes, depth, real=suffix.grow):
    """What follows is taken a token too late."""
    late = [(text, end + 1) for text, end in places if end + 1 < len(text)]
    return real(late or places, nodes, depth)


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
