"""Which requests are paired; where none are, why, what to type, and that nothing is said of what was not compared."""

import dataclasses

import numpy as np

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


def test_why_nothing_is_paired_is_said_with_what_to_type():
    found = compare(asking(CHAT), asking(ASKED, token=9, versions=OTHERS))
    assert not found.pairs
    assert found.unpaired.startswith("no request of A has the same prompt as one of B: if a chat template was applied")
    text = " ".join(text_of(found, 200).split())
    assert f"No outputs are compared: {found.unpaired}." in text
    assert "same output" not in text
    assert "pairs part" not in text
    assert "No step of A has the same context as a step of B" in text


def test_requests_with_steps_missing_say_so():
    a, b = asking(ASKED), asking(ASKED)
    for request in b.requests:
        request.whole = False
    assert compare(a, b).unpaired == "no requests are paired: every request of B lacks steps"
