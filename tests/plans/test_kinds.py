"""The table of drafters: names of other engines and older captures lead to its rows, and to nothing else."""

import pytest

from specscope.plans.kinds import KINDS, drafter_named, model_part, runs_head, text_part


@pytest.mark.parametrize(
    ("drafter", "text", "model", "head"),
    [
        ("eagle", "", "eagle", True),
        ("draft_model", "", "draft_model", False),
        ("suffix+eagle", "suffix", "eagle", True),
        ("ngram+draft_model", "ngram", "draft_model", False),
        ("suffix", "suffix", "", False),
        ("medusa", "", "", False),  # known, and not run here
        ("synthetic:0.8", "", "", False),
        ("none", "", "", False),
        ("my:Drafter", "", "", False),
    ],
)
def test_parts(drafter, text, model, head):
    assert (text_part(drafter), model_part(drafter), runs_head(drafter)) == (text, model, head)


@pytest.mark.parametrize(
    ("method", "name"),
    [("eagle3", "eagle"), ("EAGLE3", "eagle"), ("STANDALONE", "draft_model"), ("ngram_gpu", "ngram"), ("ours", "ours")],
)
def test_names_of_other_engines(method, name):
    assert drafter_named(method) == name


def test_no_name_stands_twice():
    names = [name for kind in KINDS for name in (kind.name, *kind.also)]
    assert len(names) == len(set(names))
