"""What target and drafter gave at one place, read from the sample captures; and the texts of the likeliest tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder
from tests.trace.wire.test_spans import decode

TRACES = Path(__file__).parents[3] / "traces"


def eagle_step():
    """(history, r2@24)."""
    history = read_capture(TRACES / "eagle.jsonl").history
    request = history.requests["r2"]
    return history, request.steps[request.place_of(24)]


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
