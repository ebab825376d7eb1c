"""A location in words, and which fault is named first."""

import io

from rich.console import Console

from specscope.analyze.locate.located import Located, Operation, Proof, Stage, ranked
from specscope.analyze.locate.text import render_location
from tests.analyze.locate.locations import unplaced, wrong


def shown(location, width=80):
    out = io.StringIO()
    render_location(location, Console(file=out, width=width, markup=False))
    return out.getvalue()


def test_a_fault_is_shown_with_its_place_its_figures_and_the_command():
    text = " ".join(shown(wrong()).split())
    for part in (
        "1. layer 0: scores with the mask",
        "drafter: layers.0.self_attn.scores",
        "scores differ by a factor of 0.577 in 8 of 14 rows",
        "looks like: a factor of 0.577 = 1/sqrt(3) from position 96 on",
        "computed in: specscope/speculate/drafters/head.py:88 attend",
        "smallest input: 97 tokens of r3, row 96",
        "next best: a sliding window of 96: leaves 3 of 8 rows",
        "specscope open 'run.jsonl#r3@17/4'",
        "Ruled out",
    ):
        assert part in text
    assert text.endswith("Located: layer 0: scores with the mask, which explains 8 of 8 rows that differ.")


def test_what_has_no_place_and_what_was_left_out_are_named_and_are_no_markup():
    text = shown(unplaced())
    assert "! not judged: drafter: [b]x[/b] is not at hand" in text
    assert "Different, without a place" in text
    assert text.rstrip().endswith("Not located: 1 difference without a place.")


def fault(stage, name, proof, explained=5, spoiled=0):
    return Located(Operation(stage, name, name), name, explained=explained, spoiled=spoiled, differing=112, proof=proof)


def test_a_place_stands_before_rows_and_what_explains_the_most_before_what_explains_little():
    walked = fault(Stage.DRAFTER, "walked", Proof.PLACE, 2)
    above = fault(Stage.TARGET, "above", Proof.PLACE, 1)
    all_rows = fault(Stage.VERDICT, "all rows", Proof.ROWS, 112)
    spoils = fault(Stage.VERDICT, "spoils", Proof.ROWS, 112, spoiled=100)
    two = fault(Stage.SAMPLING, "two of two", Proof.ROWS, 2)
    summed = fault(Stage.SAMPLING, "summed", Proof.SUM, 5000)
    order = [item.operation.name for item in ranked([two, summed, spoils, all_rows, walked, above])]
    assert order == ["above", "walked", "all rows", "spoils", "two of two", "summed"]
