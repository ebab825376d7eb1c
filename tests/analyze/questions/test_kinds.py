"""Kinds of rejection: what they are told apart by, and what each cost, on runs that can be counted by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.missed import ChoicePlace, RejectionKinds
from specscope.trace.record.records import Preceded

from .made import decode, noted, run_of

T = 77  # the final token
TOP = [[T, 1, 2, 3]], [[0.9, 0.05, 0.01, 0.01]]
DRAFT = [[5, 6, 7, 8]], [[0.4, 0.3, 0.2, 0.1]]


def rejected(rank, index=0, sure=0.9):
    """A chain of two whose first node was rejected; the target's token had this rank in the drafter."""
    parents = noted([-1], 2, TOP[0], [[sure, 0.05, 0.01, 0.01]], [0.0, 0.0], draft_top=DRAFT[0], draft_top_p=DRAFT[1],
                    choice_rank=[rank])  # fmt: skip
    return decode([5, 9], rejected=[0], final=T, parents=parents, index=index)


def whole(index):
    """A chain of two that was accepted whole."""
    return decode([5, 9], path=[0, 1], final=T, index=index)


def kinds(*parts):
    return RejectionKinds(Evidence.of(run_of(parts)))


def test_a_kind_is_the_place_of_the_token_the_depth_and_what_preceded():
    answers = kinds(rejected(7), rejected(7, 1), rejected(50, 2), whole(3), rejected(7, 4)).all()
    told = {(kind.place, kind.depth, kind.preceded): kind.rejections for kind in answers}
    assert told == {
        (ChoicePlace.RANKED, 1, Preceded.PREFILL): 1,
        (ChoicePlace.RANKED, 1, Preceded.NOTHING): 1,
        (ChoicePlace.LOWER, 1, Preceded.NOTHING): 1,
        (ChoicePlace.RANKED, 1, Preceded.FULL): 1,
    }
    assert {kind.of_rejections for kind in answers} == {4}


def test_the_cost_is_what_steps_that_got_past_the_depth_kept_more():
    """Two steps accepted 2 and 1 nodes: past depth 1 a step kept 1.5, and each rejection at depth 1 kept none."""
    one = decode([5, 9], path=[0], rejected=[1], final=T, index=2)
    answers = kinds(rejected(7), whole(1), one, rejected(7, 3), rejected(7, 4)).all()
    first = answers[0]
    assert (first.place, first.depth, first.compared_drafts) == (ChoicePlace.RANKED, 1, 2)
    by_depth = {depth: [kind for kind in answers if kind.depth == depth] for depth in (1, 2)}
    assert sum(kind.tokens_lost for kind in by_depth[1]) == pytest.approx(3 * 1.5)
    assert sum(kind.tokens_lost for kind in by_depth[2]) == pytest.approx(
        1
    )  # the one that got there kept 2, this one 1
    assert [kind.tokens_lost for kind in answers] == sorted((kind.tokens_lost for kind in answers), reverse=True)
    (alone,) = kinds(rejected(7)).all()  # no step got past the depth: a token each
    assert (alone.tokens_lost, alone.compared_drafts) == (1.0, 0)


def test_a_kind_is_about_the_token_that_was_wanted_and_not_the_one_that_came():
    """The target's likeliest token is the drafter's second, and not in the tree; a coin drew another one."""
    parents = noted([-1], 2, [[6, T, 2, 3]], [[0.9, 0.05, 0.01, 0.01]], [0.0, 0.0], draft_top=DRAFT[0],
                    draft_top_p=DRAFT[1], choice_rank=[2])  # fmt: skip
    parents = dataclasses.replace(parents, choice=np.array([6], np.int32))
    (kind,) = kinds(decode([5, 9], rejected=[0], final=T, parents=parents)).all()
    assert kind.place is ChoicePlace.TOP
