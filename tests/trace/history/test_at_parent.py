"""What target and drafter gave at one place, read from the sample captures; and the texts of the likeliest tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from specscope.trace.history.at_parent import OUTSIDE, AtParent, above, draft_ps, end, raw_ps
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.tree import ROOT
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder
from tests.trace.wire.test_spans import decode

TRACES = Path(__file__).parents[3] / "traces"


def eagle_step():
    """(history, r2@24)."""
    history = read_capture(TRACES / "eagle.jsonl").history
    request = history.requests["r2"]
    return history, request.steps[request.place_of(24)]


def test_a_token_that_was_not_drafted_is_known_by_the_ranks_of_the_target_s_first_choice():
    _, step = eagle_step()
    place = AtParent(step, ROOT)
    there = place.of_token(327)
    assert (there.raw_rank, there.draft_rank) == (1, 15)
    assert there.raw_p == pytest.approx(0.92087466)
    assert there.draft_p == pytest.approx(0.005893985)
    assert there.p == 1
    assert place.of_token(40_000).draft_rank is None  # nothing is recorded of it


def test_a_first_choice_that_the_drafter_does_not_know_has_the_rank_outside():
    _, step = eagle_step()
    parents = dataclasses.replace(step.parents, choice_rank=np.array([0], np.int32), choice_q=np.zeros(1, np.float32))
    there = AtParent(dataclasses.replace(step, parents=parents), ROOT).of_token(327)
    assert (there.draft_rank, there.draft_p) == (OUTSIDE, None)


def test_of_a_place_that_was_not_tried_only_the_tree_is_known():
    _, step = eagle_step()
    place = above(step, 4)  # below a node that was rejected
    assert (place.notes, place.likeliest, place.choice, place.outside) == (None, (), None, None)
    there = place.of_node(4)
    assert (there.raw_p, there.raw_rank) == (None, None)
    assert there.draft_p == pytest.approx(0.16484304)
    assert raw_ps(step)[4] is None
    assert raw_ps(step)[0] == pytest.approx(0.029053293)


def test_the_final_token_was_drawn_where_the_path_ended():
    history, _ = eagle_step()
    for request in history.requests.values():
        for step in request.steps:
            if step.verdict is not None:
                path = step.verdict.path.tolist()
                assert end(step).parent == above(step, len(step.tree)).parent == (path[-1] if path else ROOT)


def test_a_drafter_that_is_no_model_has_no_probability():
    history = read_capture(TRACES / "ngram.jsonl").history
    steps = [step for request in history.requests.values() for step in request.steps if len(step.tree)]
    assert steps
    for step in steps:
        assert set(draft_ps(step)) == {None}
        assert AtParent(step, ROOT).drafters_likeliest == ()


@pytest.mark.parametrize("text", [True, False])
def test_the_likeliest_tokens_come_with_their_texts(text):
    """Of a run that keeps text; the ids alone of one that does not."""
    history, step = eagle_step()
    encoder = Encoder(
        dataclasses.replace(history.run, privacy=Privacy.of(no_text=not text, no_tokens=False)), history.vocabulary
    )
    decoder, back = decode([span for record in history.steps for span in encoder.encode(record)])
    assert len(back) == len(history.steps)
    named = step.parents.named(step.tokens_shown)
    assert named
    assert 327 not in named  # the final token has its text in the tree
    for token in named:
        known = decoder.vocabulary.pieces.get(token)
        assert known == (history.vocabulary.pieces[token] if text else None)


def test_texts_that_are_not_as_many_as_their_tokens_are_damage():
    history, _ = eagle_step()
    encoder = Encoder(history.run, history.vocabulary)
    spans = [span for record in history.steps for span in encoder.encode(record)]
    first = next(span for span in spans if '"text":["' in str(span.attributes.get("specscope.parents")))
    first.attributes["specscope.parents"] = first.attributes["specscope.parents"].replace('"text":["', '"text":["x","')
    decoder, _ = decode(spans)
    assert any("specscope.parents" in line and "texts for" in line for line in decoder.faults.lines())
