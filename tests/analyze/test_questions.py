"""What a report answers, on runs that can be counted by hand, on lean evidence and on counts."""

import dataclasses

import numpy as np
import orjson
import pytest

from specscope.analyze import tables
from specscope.analyze.questions.answers import Count, answer, rejections, tokens_table
from specscope.analyze.questions.evidence import COUNTS_ONLY, Evidence
from specscope.analyze.questions.missed import LEAN, PLACES, ChoicePlace, RejectionKinds, places_of
from specscope.analyze.report import build_report
from specscope.analyze.text import render_text
from specscope.analyze.why import why_run
from specscope.trace.history.history import History
from specscope.trace.record.records import Preceded
from specscope.trace.record.tree import Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from tests.analyze.edits import TRACES, sample
from tests.analyze.histories import decode, noted, run_of
from tests.analyze.synthetic import Synthetic
from tests.analyze.texts import page

T = 77  # the final token
DRAFT = {"draft_top": [[5, 6, 7, 8]], "draft_top_p": [[0.4, 0.3, 0.2, 0.1]]}
TOP = [[T, 1, 2, 3]], [[0.9, 0.05, 0.01, 0.01]]


def at_root(top=TOP, rank=0, nodes=1, **more):
    """What was noted at the root, of whose likeliest token the drafter had this rank."""
    return noted([-1], nodes, *top, [0.0] * nodes, **DRAFT | more, choice_rank=[rank])


def rejected(rank):
    """A chain of two whose first node was rejected."""
    return decode([5, 9], rejected=[0], final=T, parents=at_root(rank=rank, nodes=2))


def kinds(*parts):
    return RejectionKinds(Evidence.of(run_of(parts))).all()


WHOLE = decode([5, 9], path=[0, 1], final=T)  # a chain of two that was accepted whole


def test_a_kind_is_the_place_of_the_token_the_depth_and_what_preceded():
    answers = kinds(rejected(7), rejected(7), rejected(50), WHOLE, rejected(7))
    assert {(kind.place, kind.depth, kind.preceded): kind.rejections for kind in answers} == {
        (ChoicePlace.RANKED, 1, Preceded.PREFILL): 1,
        (ChoicePlace.RANKED, 1, Preceded.NOTHING): 1,
        (ChoicePlace.LOWER, 1, Preceded.NOTHING): 1,
        (ChoicePlace.RANKED, 1, Preceded.FULL): 1,
    }
    assert {kind.of_rejections for kind in answers} == {4}


def test_the_cost_is_what_steps_that_got_past_the_depth_kept_more():
    """Two steps accepted 2 and 1 nodes: past depth 1 a step kept 1.5, and each rejection at depth 1 kept none."""
    one = decode([5, 9], path=[0], rejected=[1], final=T)
    answers = kinds(rejected(7), WHOLE, one, rejected(7), rejected(7))
    first = answers[0]
    assert (first.place, first.depth, first.compared_drafts) == (ChoicePlace.RANKED, 1, 2)
    lost = {depth: sum(kind.tokens_lost for kind in answers if kind.depth == depth) for depth in (1, 2)}
    assert lost == pytest.approx({1: 3 * 1.5, 2: 1})  # the one that got to depth 2 kept 2, this one 1
    assert [kind.tokens_lost for kind in answers] == sorted((kind.tokens_lost for kind in answers), reverse=True)
    (alone,) = kinds(rejected(7))  # no step got past the depth: a token each
    assert (alone.tokens_lost, alone.compared_drafts) == (1.0, 0)


def test_a_kind_is_about_the_token_that_was_wanted_and_not_the_one_that_came():
    """The target's likeliest token is the drafter's second, and not in the tree; a coin drew another one."""
    parents = at_root(([[6, T, 2, 3]], TOP[1]), rank=2, nodes=2)
    parents = dataclasses.replace(parents, choice=np.array([6], np.int32))
    (kind,) = kinds(decode([5, 9], rejected=[0], final=T, parents=parents))
    assert kind.place is ChoicePlace.TOP


def ends_in(*parts):
    """Where the final token of each part was."""
    evidence = Evidence.of(run_of(parts))
    found = places_of(evidence, np.arange(len(parts)), evidence.columns.final)
    return [PLACES[place] for place in found.tolist()]


def test_dropped_by_re_ranking():
    part = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, 0)])
    assert ends_in(part) == [ChoicePlace.DROPPED]
    elsewhere = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, -1), (T, 2)])
    assert ends_in(elsewhere) == [ChoicePlace.UNKNOWN]


@pytest.mark.parametrize(
    ("notes", "place"),
    [
        (at_root(draft_top=[[5, T, 7, 8]]), ChoicePlace.TOP),
        (at_root(rank=32), ChoicePlace.RANKED),
        (at_root(rank=33), ChoicePlace.LOWER),
        (at_root(rank=0), ChoicePlace.OUTSIDE),  # the target's first choice, and the drafter has no rank for it
        (at_root(([[1, T, 2, 3]], TOP[1])), ChoicePlace.LOWER),  # not the first choice: its rank is not known
        (at_root(draft_top=np.zeros((1, 0)), draft_top_p=np.zeros((1, 0))), ChoicePlace.UNKNOWN),
        (at_root(draft_top=[[T, 0, 0, 0]], draft_top_p=[[0, 0, 0, 0]]), ChoicePlace.UNKNOWN),  # no distribution here
        (None, ChoicePlace.UNKNOWN),
    ],
)
def test_what_the_drafter_thought_of_it(notes, place):
    assert ends_in(decode([9], rejected=[0], final=T, parents=notes)) == [place]


def test_what_is_rejected_where_and_what_was_taken():
    """X is always rejected at depth 2 and Y taken; GOOD is rejected once of three times, at the root."""
    x, y, good = 50, 51, 60
    parts = [
        decode([good, x, 1], path=[0], rejected=[1], final=y, own=[0.9, 0.3, 0.2], request="a", output=0),
        decode([good, x, 1], path=[0], rejected=[1], final=y, own=[0.9, 0.8, 0.2], request="b", output=20),
        decode([good, x], rejected=[0], final=7, own=[0.4, 0.5], request="b", output=40),
    ]
    found = rejections(Evidence.of(run_of(parts, {"a": "code", "b": "chat"}), None))
    assert (found.rejected.count, found.rejected.total) == (3, 5)  # the third X was not tried
    of_x, of_good = found.tokens
    assert (of_x.token, of_x.rejected.count, of_x.rejected.total, of_x.taken) == (x, 2, 2, (Count(y, 2),))
    assert (of_good.token, of_good.rejected.count, of_good.rejected.total) == (good, 1, 3)
    assert of_good.taken == (Count(7, 1),)
    assert str(of_x.examples.first) == "a@0/1"
    assert str(of_x.examples.clearest) == "b@0/1"  # the drafter was surer
    assert not found.notes


def test_lean_evidence_says_what_it_lacks():
    lean, full = (Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT, notes=notes).run(3, 20) for notes in (False, True))
    assert answer(lean).rejections == answer(full).rejections
    assert LEAN in why_run(lean).notes
    assert LEAN not in why_run(full).notes


def test_counts_only_and_nothing():
    counts = read_capture(TRACES.parent / "tests" / "data" / "vllm" / "watched.jsonl").history
    table = tokens_table(answer(counts), counts.vocabulary)
    assert (table.rows, table.notes) == ((), (COUNTS_ONLY,))
    assert "answers" not in build_report(counts, source="x").to_dict()
    table = tokens_table(answer(History()), Vocabulary())
    assert (table.rows, table.notes) == ((), ("nothing was drafted",))
    assert page(render_text, build_report(History(), source="x"))


def test_the_report_prints_rows_with_their_examples_and_the_json_has_all():
    report = build_report(sample("eagle"), source="traces/eagle.jsonl")
    values = orjson.loads(orjson.dumps(report.to_dict()))["answers"]
    tokens = report.answers.rejections.tokens
    assert [one["token"] for one in values["rejections"]["tokens"]] == [one.token for one in tokens]
    assert values["rejections"]["tokens"][0]["examples"]["clearest"] == str(tokens[0].examples.clearest)
    text = page(render_text, report, width=160)
    assert str(tokens[0].examples.clearest) in text
    assert f"{len(tokens) - 10} more; --top {len(tokens)} or --json shows all" in " ".join(text.split())
    assert len(tables.questions(report, 3)[0].rows) == 3
    assert len(tables.questions(report, 10**6)[0].rows) == len(tokens)
