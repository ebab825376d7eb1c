"""Text that loops, against its definition; and the acceptance without it."""

from dataclasses import replace

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope.trace.history.loops import LONGEST, TIMES, in_loops, loops_of, together
from specscope.trace.history.stats import measure
from tests.analyze.histories import step


def by_definition(tokens):
    """Every stretch that is one cycle, three times."""
    inside = [False] * len(tokens)
    for period in range(1, LONGEST + 1):
        for start in range(len(tokens) - TIMES * period + 1):
            if tokens[start : start + period] * TIMES == tokens[start : start + TIMES * period]:
                inside[start : start + TIMES * period] = [True] * (TIMES * period)
    return inside


pieces = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=35), st.integers(1, 5))
outputs = st.lists(pieces, max_size=4).map(lambda found: [token for cycle, times in found for token in cycle * times])


@settings(max_examples=100, deadline=None)
@given(st.lists(outputs, max_size=4))
@example([])
@example([[1, 1], [1, 1, 1]])
@example([list(range(32)) * 3, list(range(33)) * 3])
@example([[0, 1] * 3 + [0]])  # the half cycle at its end is part of another one, [1, 0]
def test_a_token_lies_in_a_loop_of_its_text_as_the_definition_says(texts):
    tokens = np.array([token for text in texts for token in text], np.int64)
    of = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    assert in_loops(tokens, of).tolist() == [inside for text in texts for inside in by_definition(text)]
    for text in texts:
        assert in_loops(np.array(text, np.int64)).tolist() == by_definition(text)


def chain(index, tokens, accepted):
    """A draft of two tokens, of which so many are accepted; then the final token."""
    return replace(step(tree="2", path=range(accepted), tokens=tokens[:2], final=tokens[accepted]), index=index)


def test_the_length_without_steps_whose_output_lies_in_loops():
    novel = [chain(0, (1, 2, 3), 0), chain(1, (4, 5, 6), 1)]  # 1, then 4 5
    loop = [chain(at, (7, 8, 7) if at % 2 else (8, 7, 8), 2) for at in range(3, 7)]  # 787 878 787 878
    both = chain(2, (6, 8, 8), 1)  # 6, then 8 which begins the loop: it is counted
    found = [loops_of([*novel, both, *loop]), loops_of(novel)]
    assert [(one.tokens, one.looped) for one in found] == [(17, 13), (3, 0)]
    assert found[0].share == 13 / 17
    assert found[0].rest == measure([*novel, both])
    assert found[0].rest.tau == 1 + 2 / 3
    whole = together(found)
    assert (whole.tokens, whole.looped, whole.rest.drafts) == (20, 13, 5)
