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


def asking(prompt, *, versions=OURS, token=0):
    """A side whose requests have this prompt, each with tokens of its own."""
    made = side(seed=1, requests=4)
    capture = made.captures[0]
    capture.run = dataclasses.replace(capture.run, versions=versions)
    for at, request in enumerate(made.requests):
        tokens = np.array([token, at], np.int32)
        request.info = dataclasses.replace(request.info, prompt=prompt, prompt_tokens=tokens)
    return made


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        ({"prompt": CHAT}, {"prompt": ASKED, "versions": OTHERS}, "A's are within .* r0 of B.: record both with --raw"),
        ({"prompt": ASKED, "versions": OTHERS}, {"prompt": CHAT}, "B's are within .*, and send both to one endpoint"),
        ({"prompt": ASKED}, {"prompt": f" {ASKED}"}, "r0 of A and r0 of B are the same text in different tokens"),
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
    sides = asking(CHAT), asking(ASKED, token=9, versions=OTHERS)
    for request in (made.requests[0] for made in sides):
        request.info = dataclasses.replace(request.info, prompt="x", prompt_tokens=np.array([5], np.int32))
    found = compare(*sides)
    assert (len(found.pairs), found.unpaired) == (1, "")
    hint = "A's are within a chat template (r1 of A and r1 of B): record both with --raw"
    assert any(hint in line for line in found.missing)


def test_requests_with_steps_missing_say_so():
    a, b = asking(ASKED), asking(ASKED)
    for request in b.requests:
        request.whole = False
    assert compare(a, b).unpaired == "no requests are paired: every request of B lacks steps"
