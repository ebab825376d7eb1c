"""What is known of candidates is counted from a request's own steps, and taken back exactly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.speculate.sizing.acceptance import (
    KINDS,
    MODEL_LEVELS,
    OTHERS,
    PRIOR,
    STRENGTH,
    TEXT_LEVELS,
    UNSEEN,
    CandidateHistory,
    code,
    model_level,
    text_level,
)

steps = st.lists(st.lists(st.tuples(st.integers(0, KINDS - 1), st.booleans()), max_size=5), max_size=12)


def filled(outcomes):
    found = CandidateHistory()
    for position, step in enumerate(outcomes, 10):
        found.learn(position, step)
    return found


@given(steps, st.integers(0, 30))
def test_what_is_cut_was_never_counted(outcomes, position):
    found = filled(outcomes)
    found.cut(position)
    assert found == filled(outcomes[: max(position - 10, 0)]) == filled(outcomes).before(position)


def test_chances_move_from_what_is_known_beforehand_to_what_was_counted():
    kind = code(text_level(1.0, 3), UNSEEN)
    found = CandidateHistory()
    assert found.chance(kind) == pytest.approx(PRIOR[kind])
    found.learn(5, [(kind, False)] * 4)
    assert found.chance(kind) == pytest.approx(PRIOR[kind] * STRENGTH / (STRENGTH + 4))
    found.learn(6, [(kind, False)] * 400)
    assert found.chance(kind) < 0.03


def test_every_kind_is_one_number_that_fits_a_byte_with_its_outcome():
    kinds = {code(text, model) for text in range(-2, TEXT_LEVELS) for model in range(-2, MODEL_LEVELS)}
    assert kinds == set(range(KINDS))
    assert 2 * KINDS <= 256
    assert all(0 <= chance < 1 for chance in PRIOR)


def test_surer_sources_and_sources_that_agree_are_believed_more():
    assert text_level(0.2, 2) < text_level(0.5, 2) < text_level(1.0, 2) < text_level(1.0, 20)
    assert model_level(0.05) < model_level(0.3) < model_level(0.95)
    sure, likely = text_level(1.0, 20), model_level(0.6)
    assert PRIOR[code(sure, OTHERS)] < PRIOR[code(sure, UNSEEN)] < PRIOR[code(sure, likely)]
    assert PRIOR[code(OTHERS, likely)] < PRIOR[code(UNSEEN, likely)] < PRIOR[code(sure, likely)]
