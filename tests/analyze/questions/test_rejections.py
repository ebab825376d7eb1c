"""Which tokens are rejected and what is taken instead, with answers that were planted."""

from __future__ import annotations

import pytest

from specscope.analyze.plain import plain
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.rates import Count, rejections

from .made import decode, noted, run_of

X, Y, GOOD = 50, 51, 60


def planted():
    """X is always rejected at depth 2 and Y taken; GOOD is rejected once of three times, at the root."""
    parts = [
        decode([GOOD, X, 1], path=[0], rejected=[1], final=Y, own=[0.9, 0.3, 0.2], request="a", output=0),
        decode([GOOD, X, 1], path=[0], rejected=[1], final=Y, own=[0.9, 0.8, 0.2], request="b", output=20),
        decode([GOOD, X], rejected=[0], final=7, own=[0.4, 0.5], request="b", output=40),
    ]
    return run_of(parts, {"a": "code", "b": "chat"})


def answered(history, request=None):
    return rejections(Evidence.of(history, request))


def test_what_is_rejected_where_and_what_was_taken():
    found = answered(planted())
    assert (found.rejected.count, found.rejected.total) == (3, 5)  # the third X was not tried
    x, good = found.tokens
    assert (x.token, x.rejected.count, x.rejected.total) == (X, 2, 2)
    assert x.taken == (Count(Y, 2),)
    assert x.depth == 2
    assert (good.token, good.rejected.count, good.rejected.total) == (GOOD, 1, 3)
    assert good.taken == (Count(7, 1),)
    assert str(x.examples.first) == "a@0/1"
    assert str(x.examples.clearest) == "b@0/1"  # the drafter was surer
    assert any("need full evidence" in note for note in found.notes)


@pytest.mark.parametrize(
    ("raw_p", "top", "top_p", "rank", "shown"),
    [
        (0.2, [Y, 1, 2, 3], [0.6, 0.1, 0.1, 0.05], 0, None),  # None: somewhere below the likeliest four
        (0.05, [Y, 1, 2, 3], [0.45, 0.1, 0.1, 0.05], 9, 9),
        (0.02, [Y, X, 2, 3], [0.9, 0.02, 0.01, 0.01], 0, 2),  # second of all
        (0.02, [Y, 1, 2, 3], [0.9, 0.03, 0.03, 0.03], 3, 5),  # a rank in p after rules is not raw
    ],
)
def test_a_rejected_token_has_its_raw_p_and_rank(raw_p, top, top_p, rank, shown):
    notes = noted([-1], 1, [top], [top_p], [raw_p], rank=[rank])
    found = answered(run_of([decode([X], rejected=[0], final=Y, parents=notes)]))
    (row,) = found.tokens
    assert row.raw_p == pytest.approx(raw_p)
    assert plain(row)["rank"] == shown
    assert not found.notes
