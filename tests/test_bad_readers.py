"""The reader of each kind of value, with every bad spelling: a UserError of one line. test_bad_input.py: the flags."""

import json

import click
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope.cli.options import checked_endpoint, real_from, whole_from
from specscope.debug.breakpoints import EventKind, types_of
from specscope.debug.commands import Commands
from specscope.debug.session import Session
from specscope.engine.config import EngineConfig
from specscope.engine.prompts import PromptSpec, parse_row, read_prompts
from specscope.errors import UserError
from specscope.plans.plan import parse_plan
from specscope.remote.attached import checked_address
from specscope.trace.history.conditions import Expression
from specscope.trace.record.params import PARAM_NAMES, SamplingParams
from specscope.trace.wire.reading import read_capture
from tests import bad_inputs as bad
from tests.support.samples import PLANTED

FLAG = click.Option(["--number"])
RECORDED = read_capture(PLANTED).history
LINES = [b'{"prompt": "fine"}\n\n' + line + b"\n" for line in bad.LINES]
ROWS = [b'{"prompt": "fine"}\n\n' + line + b"\n" for line in bad.ROWS]


def refusal(read, *values, most=3000):
    """The one line with which a value is refused; None where it is taken."""
    try:
        read(*values)
    except UserError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    assert len(message) < most, message
    return message


def number(kind):
    return lambda text: kind.convert(text, FLAG, None)


def in_file(read):
    """A reader of files, given what the file holds."""

    def reads(content):
        with open("p.jsonl", "wb") as file:
            file.write(content)
        return read("p.jsonl")

    return reads


def prompts(path):
    return read_prompts(path, PromptSpec("", SamplingParams()))


def row_of(text):
    return parse_row(text, PromptSpec("", SamplingParams()))


def over(first, words=""):
    """A line of the console over a recording, behind another line."""

    def run(text):
        commands = Commands(Session(RECORDED))
        commands.run(first)
        commands.run(words + text)

    return run


TEXTS = [text for text in bad.CONDITIONS if text and "@" not in text]
READERS = {
    "whole number": (number(whole_from(1, 2**40)), bad.NO_NUMBERS + bad.NO_WHOLE + bad.HUGE, "--number must be"),
    "number": (number(real_from(1e-9, 1e9)), bad.NO_NUMBERS + bad.NO_REAL, "--number must be"),
    "tree": (parse_plan, bad.TREES, ""),
    "endpoint": (lambda text: checked_endpoint(text, "--flag"), bad.ENDPOINTS, "--flag"),
    "address": (lambda text: checked_address(text, "--flag"), bad.ADDRESSES, "--flag"),
    "drafter": (lambda text: EngineConfig(drafter=text), bad.DRAFTERS, ""),
    "layers": (lambda text: EngineConfig(draft_model=text), bad.LAYERS, "self:N"),
    "stop texts": (lambda texts: SamplingParams(stop=texts), bad.STOPS, "stop"),
    "prompts": (in_file(prompts), LINES, "p.jsonl, line 3: "),
    "file of prompts": (in_file(prompts), bad.FILES, "p.jsonl"),
    "data set": (in_file(prompts), ROWS, "p.jsonl, line 3: "),
    "data set in an array": (in_file(prompts), bad.ARRAYS, "p.jsonl"),
    "capture": (in_file(read_capture), bad.FILES, "p.jsonl"),
    "path of a capture": (read_capture, [".", "./none", "/dev/zero", "/proc/self/mem"], ""),
    **{
        f"condition on {kind.value}": (lambda text, kind=kind: Expression(text, types_of(kind)), bad.CONDITIONS, "")
        for kind in EventKind
    },
    "command": (over("break reject"), bad.COMMANDS, ""),
    "break": (over("next", "break reject if "), bad.CONDITIONS, ""),
    "until": (over("next", "until "), bad.CONDITIONS, ""),
    "print": (over("next 4", "print "), TEXTS, ""),
}


@pytest.mark.parametrize("name", READERS)
def test_every_bad_spelling_is_refused_in_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, values, says = READERS[name]
    messages = [(ascii(value)[:60], refusal(read, value, most=650)) for value in values]
    assert [value for value, message in messages if message is None] == []  # taken
    assert [(value, message) for value, message in messages if says not in message] == []


def test_good_spellings_are_taken(tmp_path, monkeypatch):
    """Else a reader that refuses everything would pass."""
    monkeypatch.chdir(tmp_path)
    good = {
        "whole number": ["1", "+12", "007"],
        "number": ["1", "1.", ".5", "+1e3", "2.5E-3"],
        "tree": ["5", "3x4", "[(0,), (1,), (0, 0)]", "dynamic:24,depth=6,top=4", "top:3x4", "sampled:5"],
        "endpoint": ["http://x:4317", "https://x", "localhost:4317"],
        "address": ["127.0.0.1:4317", "[::1]:0"],
        "drafter": ["ngram", "suffix"],
        "layers": ["self:2"],
        "stop texts": [["x"], []],
        "prompts": [b'{"prompt": "fine"}\n'],
        "data set": [b'{"turns": ["fine"]}\n'],
        "data set in an array": [b'["x"]'],
        "path of a capture": [PLANTED],
        "condition on reject": ["p < 0.5 and depth == 1"],
        "command": ["info step", "next 2"],
        "until": ["step > 2"],
        "print": ["p @ 0"],
    }
    for name, values in good.items():
        assert [value for value in values if refusal(READERS[name][0], value) is not None] == []


# Whatever the text: an answer or a UserError of one line.


odd_text = st.text(st.characters(), max_size=60)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | odd_text,
    lambda x: st.lists(x) | st.dictionaries(odd_text, x),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*sorted(PARAM_NAMES), "prompt", "messages", "label"]), json_values, max_size=4))
def test_any_json_line(values):
    line = json.dumps(values).encode()
    if refusal(row_of, line) is None:
        row = row_of(line)
        json.dumps(row.params.to_dict()).encode()
        assert SamplingParams.from_dict(row.params.to_dict()) == row.params


@given(odd_text)
def test_any_line_of_a_prompt_file(text):
    refusal(row_of, text.encode(errors="surrogatepass"))


@given(odd_text | st.text("htps:/[]0123456789.x@", max_size=30))
def test_any_address_and_endpoint(text):
    refusal(checked_address, text, "--listen")
    refusal(checked_endpoint, text, "--otlp-endpoint")


names = st.sampled_from(["break", "watch", "until", "goto", "next", "step", "print", "commands", "node", "info"])
names |= st.sampled_from(
    ["continue", "reverse-next", "reverse-continue", "finish", "request", "tree", "where", "check"]
)
rest = st.lists(
    st.sampled_from(
        ["reject", "step", "if", "p", ">", "0.5", "1", "2", "3", "r0", "99", "x", ";", "goto 0", "continue", "@", ","]
    )
    | odd_text,
    max_size=6,
).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(names, rest).map(" ".join), max_size=12))
@example(["break reject 0\n0"])
def test_any_session_over_a_recording(lines):
    commands = Commands(Session(RECORDED))
    for line in lines:
        refusal(commands.run, line)
