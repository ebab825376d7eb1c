"""Which requests are paired; where none are, why, what to type, and that nothing is said of what was not compared."""

import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console

from specscope.analyze.compare import tables
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.text import render_text
from tests.analyze.compare.runs import side

OURS, OTHERS = {"specscope": "0.1"}, {"vllm": "0.32.0"}
ASKED = "What is the capital of France?"
CHAT = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"


def asking(prompt, *, title="", versions=OURS, seed=1, token=0, requests=4):
    """A side whose requests have this prompt, each with tokens of its own."""
    made = side(seed=seed, requests=requests)
    capture = made.captures[0]
    capture.run = dataclasses.replace(capture.run, versions=versions)
    for at, request in enumerate(made.requests):
        tokens = np.array([token, at], np.int32)
        request.info = dataclasses.replace(request.info, prompt=prompt, title=title, prompt_tokens=tokens)
    return made


def shown(comparison):
    console = Console(width=200, record=True, file=io.StringIO())
    render_text(comparison, console)
    return console.export_text()


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (
            asking(CHAT, title=ASKED),
            asking(ASKED, token=9, versions=OTHERS),
            "A's are within a chat template.*record A with --raw",
        ),
        (
            asking(CHAT, versions=OTHERS),
            asking(ASKED, token=9),
            "A's are within a chat template.*record B without --raw",
        ),
        (asking(ASKED, versions=OTHERS), asking(CHAT, token=9), "B's are within a chat template.*record B with --raw"),
        (asking(ASKED, versions=OTHERS), asking(CHAT, token=9, versions=OTHERS), "send both to the same endpoint"),
        (asking(ASKED), asking(f" {ASKED}", token=9), "r0 of A and r0 of B are one text in different tokens"),
        (
            asking("a template of A", title="Hi"),
            asking("B has another", title="Hi", token=9),
            "ask the same within other",
        ),
        (asking("Hi"), asking("This is another", token=9), "has the prompt of one of B$"),  # Hi is in This by chance
    ],
)
def test_why_nothing_is_paired_is_said_with_what_to_type(a, b, why):
    found = compare(a, b)
    assert not found.pairs
    assert found.unpaired.startswith("no request of A has the prompt of one of B")
    assert re.search(why, found.unpaired)
    text = " ".join(shown(found).split())
    assert f"No outputs are compared: {found.unpaired}." in text
    assert "same output" not in text
    assert "pairs part" not in text
    assert "No step of A stands at the context of one of B" in text


def test_a_part_that_has_no_pair_is_hinted_at_too():
    a, b = asking(CHAT, title=ASKED), asking(ASKED, token=9, versions=OTHERS)
    for made in (a, b):
        made.requests[0].info = dataclasses.replace(
            made.requests[0].info, prompt="x", prompt_tokens=np.array([5], np.int32)
        )
    found = compare(a, b)
    assert (len(found.pairs), found.unpaired) == (1, "")
    assert any(
        "A's are within a chat template (r1 of A and r1 of B): record A with --raw" in line for line in found.missing
    )


def test_requests_without_tokens_or_with_steps_missing_say_so():
    a, b = asking(ASKED), asking(ASKED)
    for request in b.requests:
        request.whole = False
    assert compare(a, b).unpaired == "no requests are paired: of each request of B steps are missing"


def test_outputs_that_are_the_same_are_counted():
    def note(requests):
        table = tables.partings(compare(side(seed=1, requests=requests), side(seed=1, requests=requests)))
        return table.note

    assert note(1) == "The pair has the same output."
    assert note(3) == "All 3 pairs have the same output."


def test_without_a_run_nothing_is_said_of_its_configuration():
    a, b = side(seed=1), side(seed=1)
    b.captures[0].run = None
    assert tables.configuration(compare(a, b)).note == "The configuration of B is not recorded."


def models_of(first, second):
    sides = side(seed=1), side(seed=1)
    for made, fields in zip(sides, (first, second), strict=True):
        made.captures[0].run = dataclasses.replace(made.captures[0].run, **fields)
    found = compare(*sides)
    return (found.a.target, found.b.target), {line.name: line for line in found.differences}


def test_the_same_weights_under_another_name_are_no_other_model():
    """And explain no difference in p."""
    names, lines = models_of({"target": "m", "target_digest": "1"}, {"target": "m-0.1", "target_digest": "1"})
    assert names == ("m", "m-0.1")
    assert "model" not in lines
    assert lines["model's name"].note == "the same weights under another name"
    assert "model" in models_of({"target": "m", "target_digest": "1"}, {"target": "m-0.1"})[1]


def test_other_models_of_one_name_are_told_apart():
    digests = {"target": "m", "target_digest": "12345678aa"}, {"target": "m", "target_digest": "87654321aa"}
    assert models_of(*digests)[0] == ("m (12345678)", "m (87654321)")
    paths = {"target": "m", "target_path": "/a/m"}, {"target": "m", "target_path": "/b/m"}
    assert models_of(*paths)[0] == ("/a/m", "/b/m")
    same = {"target": "m", "target_digest": "1", "target_path": "/a/m"}, {"target": "m", "target_digest": "1"}
    assert models_of(*same)[0] == ("m", "m")


def test_values_that_begin_alike_are_shown_from_where_they_differ():
    _, lines = models_of({"draft_model": "x" * 300 + "tail"}, {"draft_model": "x" * 300 + "end"})
    line = lines["draft model"]
    assert (line.a, line.b) == (f"…{'x' * 10}tail", f"…{'x' * 10}end")
