"""The last line of `specscope capture`."""

from collections import Counter

from specscope.cli.run import summary
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.history.totals import Undrafted
from tests.analyze.histories import step


def test_a_stranger_reads_what_the_length_is_of_why_steps_drafted_nothing_and_that_text_loops():
    total = measure([step(tree="2", path=(0, 1)), step(tree="2"), *[step()] * 6])
    reasons = Counter({Undrafted.NO_MATCH: 5, Undrafted.PROMPT: 1})
    assert summary(total, reasons, 0.05) == (
        "8 decode steps, 10 tokens (1.25 per step), mean acceptance length 2.00 over 2 drafts; 6 of 8 steps "
        "drafted nothing: no match in the text 83%, first token after the prompt 17%"
    )
    assert summary(measure([step(tree="2", path=(0, 1))]), Counter(), 0.5) == (
        "1 decode step, 3 tokens (3.00 per step), mean acceptance length 3.00 over 1 draft; 50% of the output in loops "
        "(specscope report)"
    )
    assert summary(Acceptance(), Counter(), 0.0) == "0 decode steps, 0 tokens, no drafts"
