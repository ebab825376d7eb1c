"""What a grammar allows is a function of the tokens: whatever was asked before, forward, back or on another path."""

import random

import pytest

from specscope.trace.record.tree import ROOT
from tests.speculate.structured.test_compiler import EOS, SIZE, allowed, grammars, ids, state  # noqa: F401

pytest.importorskip("xgrammar")
FORMS = [{"regex": "(ab|ba|c)*d?"}, {"json_object": True}, {"choice": ("abab", "abba", "ab")}]


def afresh(grammars, form, output, path):  # noqa: F811
    here = state(grammars, **form)
    here.follow(output)
    return here.row(path).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_a_function_of_output_and_path(grammars, form):  # noqa: F811
    """Random walks with refused tokens, ends, rollbacks and jumps, beside a matcher made anew for each question."""
    rng, here = random.Random(3), state(grammars, **form)
    output = []
    for _ in range(150):
        if rng.random() < 0.3:
            output = output[: rng.randint(0, len(output))]
        else:
            output = [*output, *rng.choices([*ids('abcd{}"1:'), EOS, 1], k=rng.randint(0, 2))]
        path = rng.choices([*ids('abcd{}"'), EOS, 0], k=rng.randint(0, 3))
        here.follow(output)
        assert here.row(path).tolist() == afresh(grammars, form, output, path)


def test_behind_the_end_nothing_is_allowed_and_nothing_raises(grammars):  # noqa: F811
    here = state(grammars, regex="ab")
    here.follow([*ids("ab"), EOS])
    assert not here.row(()).any()
    assert not here.row(ids("a")).any()
    here.follow(ids("ab"))  # back over the stop token
    assert allowed(here.row(())) == [EOS]


def test_each_node_of_a_tree_has_the_row_of_its_own_path_not_of_a_chain(grammars):  # noqa: F811
    """Siblings after one another: a chain's rows would give the second sibling what follows the first."""
    here = state(grammars, choice=("ax", "by"))
    here.follow([])
    tokens, parents = ids("abxy"), [ROOT, ROOT, 0, 1]
    paths = [[], ids("a"), ids("b"), ids("ax"), ids("by")]
    assert [allowed(here.row(path)) for path in paths] == [ids("ab"), ids("x"), ids("y"), [EOS], [EOS]]
    assert len(tokens) == len(parents)
