"""Which tokens are rejected and what is taken instead, with answers that were planted."""

from __future__ import annotations

from specscope.analyze.questions.answers import Count, rejections
from specscope.analyze.questions.evidence import Evidence

from .made import decode, run_of

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
    assert (good.token, good.rejected.count, good.rejected.total) == (GOOD, 1, 3)
    assert good.taken == (Count(7, 1),)
    assert str(x.examples.first) == "a@0/1"
    assert str(x.examples.clearest) == "b@0/1"  # the drafter was surer
    assert not found.notes
