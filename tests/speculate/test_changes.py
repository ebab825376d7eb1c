"""Which changes of a fork can make another token come out."""

import dataclasses

import pytest
import torch

from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.verify.batch import step_batch
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Outcome

WARM, GREEDY = SamplingParams(temperature=0.8, seed=1), SamplingParams(seed=1)


def told(changes: Changes, before: SamplingParams, *, lossless: bool = True, ended: bool = False) -> str:
    after = dataclasses.replace(before, **changes.params)
    return changes.explaining(before, after, lossless=lossless, ended=ended)


@pytest.mark.parametrize(
    ("changes", "before", "expected"),
    [
        (Changes(params={"temperature": 0.7}), GREEDY, "temperature=0.7"),
        (Changes(params={"temperature": 0.8}), WARM, ""),  # it was that before
        (Changes(params={"seed": 9}), WARM, "seed=9"),
        (Changes(params={"seed": 9, "top_k": 5}), GREEDY, ""),  # neither moves the likeliest token
        (Changes(params={"presence_penalty": 0.5}), GREEDY, "presence_penalty=0.5"),
        (Changes(params={"max_tokens": 9}), WARM, ""),  # the outputs part before their ends
        (Changes(engine={"drafter": "ngram"}), WARM, "drafter=ngram"),  # other drafts, other coins
        (Changes(coins={(4, 0): 0.1}), WARM, "coin of node 0 0.1"),
        (Changes(coins={(4, 0): 0.1}), GREEDY, ""),
        (Changes(outcomes={(4, 0): False}), GREEDY, "node 0 rejected"),
        (Changes(tokens={4: 65}), GREEDY, "token 65"),
        (Changes(), WARM, ""),
    ],
)
def test_what_can_matter_is_named(changes, before, expected):
    assert told(changes, before) == expected


def test_the_end_of_an_output_is_explained_by_its_length():
    assert told(Changes(params={"max_tokens": 9}), GREEDY, ended=True) == "max_tokens=9"


def test_a_greedy_run_that_is_not_lossless_follows_its_drafts():
    assert told(Changes(engine={"drafter": "suffix"}), GREEDY, lossless=False) == "drafter=suffix"


def test_a_fork_changes_coins_outcomes_and_the_final_token_at_its_position_alone() -> None:
    changes = Changes(outcomes={(2, 0): True, (3, 0): False}, coins={(2, 0): 0.25, (2, 9): 0.5}, tokens={2: 8})
    context = Context("r", [5, 6, 7], 2, SamplingParams(temperature=0.7))
    batch = step_batch([(context, Draft.chain([1]), torch.randn(2, 11))], changes)
    assert batch.trees.forced.tolist() == [0, Outcome.ACCEPTED]
    assert (batch.trees.coin[1], batch.trees.final.tolist()) == (0.25, [8])
