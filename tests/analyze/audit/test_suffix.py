"""Trees from the text, drawn a second time: healthy ones agree, and each planted mistake is seen."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specscope.analyze.audit.audit import audit
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.findings import CheckResult
from specscope.speculate.drafters import suffix
from specscope.trace.record.notes import BOTH, MODEL, TEXT
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import RULES, changed, run
from tests.engines import PROMPTS
from tests.faults.models import TARGET

BEFORE = Path(__file__).parents[2] / "data" / "before_deletion"


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
    assert "The drafter was not judged: its lookups went through the texts of other requests too." in found.unjudged


def shifted_grow(text, places, nodes, depth, real=suffix.grow):
    """What follows is taken a token too late."""
    late = [end + 1 for end in places if end + 1 < len(text)]
    return real(text, late or places, nodes, depth)


def test_a_shifted_lookup_is_seen(bench, monkeypatch):
    monkeypatch.setattr(suffix, "grow", shifted_grow)
    assert tree_check(bench, bench.fresh("suffix")).failed > 0


def test_a_branch_that_is_left_out_is_seen(bench, monkeypatch):
    branches = ["abx aby abx abz ab", "1 2 1 3 1 2 1 4 1 2 1"]  # two tokens that were followed by different ones
    assert tree_check(bench, bench.fresh("suffix"), branches).failed == 0
    monkeypatch.setattr(suffix, "LEAST", 0.6)
    assert tree_check(bench, bench.fresh("suffix"), branches).failed > 0


def other_source(part):
    """The text's nodes as the model's, and the model's as the text's."""
    if part.method is None or not len(part.method.source):
        return part
    return replace(part, method=replace(part.method, source=np.array([TEXT, MODEL, BOTH])[part.method.source]))


def other_match(part):
    """The text's nodes with other tokens."""
    if part.method is None or not part.method.match_length:
        return part
    return replace(part, tree=replace(part.tree, token=np.where(part.method.source >= TEXT, 7, part.tree.token)))


@pytest.mark.parametrize("name", ["combined", "combined_draft"])
@pytest.mark.parametrize("change", [None, other_source, other_match])
def test_text_beside_a_model_is_drawn_again_in_older_captures(name, change):
    history = read_capture(BEFORE / f"{name}.jsonl.gz").history
    if change is not None:
        history = changed(history, change)
    found = audit(history, "run.jsonl", Options(target=ModelSource(str(TARGET), "target")))
    check = found.finding("drafter tree")
    assert check.tested > 20
    assert (check.failed > 0) == (change is not None)
