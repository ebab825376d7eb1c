"""Where the target's choice was: every place planted once."""

from __future__ import annotations

import numpy as np
import pytest

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.missed import PLACES, ChoicePlace, places_of

from .made import decode, noted, run_of

T = 77  # the final token
DRAFT = [[5, 6, 7, 8]], [[0.4, 0.3, 0.2, 0.1]]
TOP = [[T, 1, 2, 3]], [[0.9, 0.05, 0.01, 0.01]]


def ends_in(*parts, **run):
    """Where the final token of each part was."""
    evidence = Evidence.of(run_of(parts, **run))
    found = places_of(evidence, np.arange(len(parts)), evidence.columns.final)
    return [PLACES[place] for place in found.tolist()]


def at_root(draft=DRAFT, top=TOP, rank=0, nodes=1):
    return noted([-1], nodes, *top, [0.0] * nodes, draft_top=draft[0], draft_top_p=draft[1], choice_rank=[rank])


def test_dropped_by_re_ranking():
    part = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, 0)])
    assert ends_in(part) == [ChoicePlace.DROPPED]
    elsewhere = decode([1, 2], path=[0], rejected=[1], final=T, own=[0.5, 0.5], dropped=[(T, -1), (T, 2)])
    assert ends_in(elsewhere) == [ChoicePlace.UNKNOWN]


@pytest.mark.parametrize(
    ("notes", "place"),
    [
        (at_root(([[5, T, 7, 8]], DRAFT[1])), ChoicePlace.TOP),
        (at_root(rank=32), ChoicePlace.RANKED),
        (at_root(rank=33), ChoicePlace.LOWER),
        (at_root(rank=0), ChoicePlace.OUTSIDE),  # the target's first choice, and the drafter has no rank for it
        (at_root(top=([[1, T, 2, 3]], TOP[1])), ChoicePlace.LOWER),  # not the first choice: its rank is not known
        (at_root((np.zeros((1, 0)), np.zeros((1, 0)))), ChoicePlace.UNKNOWN),
        (at_root(([[T, 0, 0, 0]], [[0, 0, 0, 0]])), ChoicePlace.UNKNOWN),  # no distribution here
        (None, ChoicePlace.UNKNOWN),
    ],
)
def test_what_the_drafter_thought_of_it(notes, place):
    assert ends_in(decode([9], rejected=[0], final=T, parents=notes)) == [place]
