"""Where the target's choice was: every place planted once."""

from __future__ import annotations

import numpy as np
import pytest

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.missed import Place, missed
from specscope.trace.draft_vocabulary import pack

from .made import decode, noted, run_of

T = 77  # the final token
DRAFT = [[5, 6, 7, 8]], [[0.4, 0.3, 0.2, 0.1]]
TOP = [[T, 1, 2, 3]], [[0.9, 0.05, 0.01, 0.01]]


def places(*parts, **run):
    found = missed(Evidence.of(run_of(parts, **run)))
    return {one.place: one for one in found.choices}


def at_root(draft=DRAFT, top=TOP, rank=0, nodes=1):
    return noted([-1], nodes, *top, [0.0] * nodes, draft_top=draft[0], draft_top_p=draft[1], choice_rank=[rank])


def ends_in(part, **run):
    (place,) = [one for one in places(part, **run) if one is not Place.ACCEPTED]
    return place


def test_accepted_and_beyond_a_leaf():
    found = places(decode([1, 2], path=[0, 1], final=T))
    assert {place: one.decisions.count for place, one in found.items()} == {Place.ACCEPTED: 2, Place.BEYOND: 1}
    assert found[Place.ACCEPTED].decisions.total == 3
    assert found[Place.ACCEPTED].per_draft == 2


def test_a_branch_that_begins_with_the_same_tokens():
    """Two chains 1 2 3 and 1 2 T: the first is walked, its 3 rejected, and T stood on the other."""
    part = decode([1, 1, 2, 2, 3, T], [-1, -1, 0, 1, 2, 3], path=[0, 2], rejected=[4], final=T)
    found = places(part)
    assert found[Place.BRANCH].decisions.count == 1
    assert str(found[Place.BRANCH].examples.first) == "a@0/5"
    deeper = decode([1, 1, 2, T], [-1, -1, 0, 1], path=[0, 2], final=T)
    assert ends_in(deeper) is Place.BEYOND  # 1 T is there, 1 2 T is not
    leaf = decode([1, 1, T], [-1, -1, 1], path=[0], final=T)
    assert ends_in(leaf) is Place.BRANCH  # the path ended at a leaf, and went on elsewhere
    other = decode([1, 2, T], [-1, -1, 1], path=[0], final=T)
    assert ends_in(other) is Place.BEYOND  # another branch, but after another token


def test_the_tokens_of_one_step_are_not_looked_for_in_another():
    found = places(decode([1, 9], path=[0], rejected=[1], final=T), decode([1, T], path=[0, 1], final=3))
    assert Place.BRANCH not in found
    assert found[Place.UNKNOWN].decisions.count == 1


def test_a_child_that_was_not_accepted():
    assert ends_in(decode([T, 2], rejected=[0, 1], final=T, rule="block")) is Place.CHILD


def test_dropped_by_re_ranking():
    part = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, 0)])
    assert ends_in(part) is Place.DROPPED
    elsewhere = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, -1), (T, 2)])
    assert ends_in(elsewhere) is Place.UNKNOWN


@pytest.mark.parametrize(
    ("notes", "place"),
    [
        (at_root(([[5, T, 7, 8]], DRAFT[1])), Place.TOP),
        (at_root(rank=32), Place.RANKED),
        (at_root(rank=33), Place.LOWER),
        (at_root(rank=0), Place.OUTSIDE),  # the target's first choice, and the drafter has no rank for it
        (at_root(top=([[1, T, 2, 3]], TOP[1])), Place.LOWER),  # not the first choice: its rank is not known
        (at_root((np.zeros((1, 0)), np.zeros((1, 0)))), Place.UNKNOWN),
        (at_root(([[T, 0, 0, 0]], [[0, 0, 0, 0]])), Place.UNKNOWN),  # no distribution here
        (None, Place.UNKNOWN),
    ],
)
def test_what_the_drafter_thought_of_it(notes, place):
    assert ends_in(decode([9], rejected=[0], final=T, parents=notes)) is place


def test_outside_a_reduced_vocabulary_is_known_from_the_run():
    part = decode([9], rejected=[0], final=T)
    known = {"draft_vocab": 3, "draft_tokens": pack([1, 9, 10])}
    assert ends_in(part, **known) is Place.OUTSIDE
    assert ends_in(part, draft_vocab=3, draft_tokens=pack([1, 9, T])) is Place.UNKNOWN


def test_the_clearest_is_where_the_drafter_thought_most_of_it():
    low = at_root(([[5, 6, 7, T]], DRAFT[1]))
    high = at_root(([[T, 6, 7, 8]], DRAFT[1]))
    found = places(*(decode([9], rejected=[0], final=T, parents=one) for one in (low, high, low)))
    assert str(found[Place.TOP].examples.first) == "a@0"
    assert str(found[Place.TOP].examples.clearest) == "a@1"
    assert found[Place.TOP].draft_p == pytest.approx(0.2)


def test_forced_drafts_are_left_out():
    found = places(decode([9], rejected=[0], final=T), decode([9], path=[0], final=T, forced=[0]))
    assert {place: one.decisions.count for place, one in found.items()} == {Place.UNKNOWN: 1}
