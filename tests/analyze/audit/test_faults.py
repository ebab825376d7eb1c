"""Faults put into a running engine: the audit finds each, and its condition names the place."""

import pytest
import torch

from specscope.speculate.drafters import eagle
from tests.analyze.audit.runs import RULES, failed, run
from tests.engines import PROMPTS
from tests.faults.planted import FAULTS
from tests.faults.planted.drafter_kv import short_table


def masks_at_one_position(patch, engine):
    """Every mask row of a P-EAGLE head lies right behind the root's pair."""
    real = eagle.with_masks

    def with_masks(segment, count, mask_token):
        found = real(segment, count, mask_token)
        found.positions[len(segment.tokens) :] = found.positions[len(segment.tokens) - 1] + 1
        return found

    patch.setattr(eagle, "with_masks", with_masks)


OF_THIS_TARGET = {"rotary table too short": short_table(30), "masks at one position": masks_at_one_position}
MANY = [f"{word} {number}" for number in range(5) for word in ("one two one two", "abc", "so it goes", "x y", "zzz")]
AFTER = ["accepted in the previous step", "the step before is", "nodes of the previous step"]
FOUND = [  # the fault, the engine and the rule that it shows in, the check that fails, words of the condition: any do
    ("mask shows siblings", "same model", "temperature", "target p", ["first sibling", "sibling"]),
    ("positions by index", "same model, top", "cold", "target p", ["ancestors", "the parent", "first sibling"]),
    ("KV not moved", "same model, top", "cold", "target p", ["previous step's path was moved"]),
    ("penalties of the root", "same model", "penalties", "target p", ["depth", "the parent is"]),
    ("temperature twice", "same model", "cold", "target p", ["all "]),
    ("layers in another order", "eagle", "greedy", "draft p", ["all "]),
    ("features of roots only", "eagle dynamic", "greedy", "draft p", AFTER),
    ("rotary table too short", "eagle", "greedy", "draft p", ["position", "context length", "output tokens"]),
    ("nodes one position further", "eagle dynamic", "greedy", "draft p", ["depth", "the parent is"]),
    ("masks at one position", "p-eagle dynamic", "greedy", "draft p", ["depth", "the parent is"]),
    (
        "leaf taken for run",
        "same model, top",
        "cold",
        "draft p",
        ["the step before is full", "accepted in the previous step"],
    ),
    ("lookup one late", "ngram", "greedy", "drafter tree", ["nodes", "depth of the tree", "drafter is"]),
    ("map off by a row", "eagle", "greedy", "drafter tokens", ["all "]),
    ("q told warmer", "draft tree", "temperature", "draft p", ["all "]),
]
# These stay in a cache: one step in each request shows what began it, so it takes several requests.
BEGIN_LATE = ("positions by index", "KV not moved", "leaf taken for run", "features of roots only")


@pytest.mark.every(3)
@pytest.mark.parametrize(("fault", "name", "rule", "check", "words"), FOUND, ids=[row[0] for row in FOUND])
def test_a_fault_is_found_where_it_is(bench, monkeypatch, fault, name, rule, check, words):
    engine = bench.fresh(name)
    with monkeypatch.context() as patch:
        OF_THIS_TARGET[fault](patch, engine) if fault in OF_THIS_TARGET else FAULTS[fault].install(patch, engine)
        with torch.inference_mode():
            history = run(engine, RULES[rule], prompts=MANY if fault in BEGIN_LATE else PROMPTS)
    found = bench.audit(engine, history)
    assert check in failed(found), [(f.name, f.tested, f.failed) for f in found.findings]
    said = found.finding(check).sentence
    assert any(word in said for word in words), said
