"""Which requests are paired; where none are, why, what to type, and that nothing is said of what was not compared."""

import dataclasses
import re

import numpy as np
import pytest

from specscope.analyze.compare.comparison import compare
from tests.analyze.compare.runs import side
from tests.analyze.compare.test_text import text_of

OURS, OTHERS = {"specscope": "0.1"}, {"vllm": "0.32.0"}
ASKED = "What is the capital of France?"
CHAT = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"


def asking(prompt, *, title="", versions=OURS, token=0):
    """A side whose requests have this prompt, each with tokens of its own."""
    made = side(seed=1, requests=4)
    capture = made.captures[0]
    capture.run = dataclasses.replace(capture.run, versions=versions)
    for at, request in enumerate(made.requests):
        tokens = np.array([token, at], np.int32)
        request.info = dataclasses.replace(request.info, prompt=prompt, title=title, prompt_tokens=tokens)
    return made


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ({"prompt": CHAT, "title": ASKED}, {"prompt": ASKED, "versions": OTHERS}, "A's.*: record A with --raw"),
        ({"prompt": CHAT, "versions": OTHERS}, {"prompt": ASKED}, "A's.*: record B without --raw"),
        ({"prompt": ASKED, "versions": OTHERS}, {"prompt": CHAT}, "B's.*: record B with --raw"),
        (
            {"prompt": ASKED, "versions": OTHERS},
            {"prompt": CHAT, "versions": OTHERS},
            "are within a chat template.*send both to the same endpoint",
        ),
        ({"prompt": ASKED}, {"prompt": f" {ASKED}"}, "r0 of A and r0 of B are the same text in different tokens"),
        ({"prompt": "of A", "title": "Hi"}, {"prompt": "of B", "title": "Hi"}, "ask the same in different"),
        (
            {"prompt": "Hi"},
            {"prompt": "This is another"},
            "has the same prompt as one of B$",
        ),  # Hi is in This by chance
    ],
)
def test_why_nothing_is_paired_is_said_with_what_to_type(a, b, why):
    found = compare(asking(**a), asking(token=9, **b))
    assert not found.pairs
    assert found.unpaired.startswith("no request of A has the same prompt as one of B")
    assert re.search(why, found.unpaired)
    text = " ".join(text_of(found, 200).split())
    assert f"No outputs are compared: {found.unpaired}." in text
    assert "same output" not in text
    assert "pairs part" not in text
    assert "No step of A has the same context as a step of B" in text


def test_a_part_that_has_no_pair_is_hinted_at_too():
    sides = asking(CHAT, title=ASKED), asking(ASKED, token=9, versions=OTHERS)
    for request in (made.requests[0] for made in sides):
        request.info = dataclasses.replace(request.info, prompt="x", prompt_tokens=np.array([5], np.int32))
    found = compare(*sides)
    assert (len(found.pairs), found.unpaired) == (1, "")
    hint = "A's are within a chat template (r1 of A and r1 of B): record A with --raw"
    assert any(hint in line for line in found.missing)


def test_requests_with_steps_missing_say_so():
    a, b = asking(ASKED), asking(ASKED)
    for request in b.requests:
        request.whole = False
    assert compare(a, b).unpaired == "no requests are paired: every request of B lacks steps"


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"target_digest": "12345678aa"}, {"target_digest": "87654321aa"}, ("m (12345678)", "m (87654321)")),
        ({"target_path": "/a/m"}, {"target_path": "/b/m"}, ("/a/m", "/b/m")),
        ({"target_digest": "1", "target_path": "/a/m"}, {"target_digest": "1"}, ("m", "m")),
        ({"target_digest": "1"}, {"target_digest": "1", "target": "m-0.1"}, ("m", "m-0.1")),
    ],
)
def test_other_models_of_one_name_are_told_apart(first, second, names):
    sides = side(seed=1), side(seed=1)
    for made, fields in zip(sides, (first, second), strict=True):
        made.captures[0].run = dataclasses.replace(made.captures[0].run, **{"target": "m", **fields})
    found = compare(*sides)
    assert (found.a.target, found.b.target) == names
