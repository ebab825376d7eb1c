"""Data sets in the layouts that load benches use: read alike, and refused by line."""

import json
import pickle
import sys
import types

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope.engine.prompts import CHARACTERS, read_rows
from specscope.errors import UserError

ABOUT = {"question_id": "q1", "category": "coding", "sub_category": "python", "src_id": "x", "difficulty": "easy"}
LONG, ANSWER = "a question of some length", "an answer that has rather more to say"
TALK = {"id": "x_0", "conversations": [{"from": "human", "value": LONG}, {"from": "gpt", "value": ANSWER}]}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
LONGER = [*CHAT, {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def of(tmp_path, content):
    path = tmp_path / "data"
    path.write_bytes(content)
    return read_rows(str(path))


LAYOUTS = {
    "turns of SPEED-Bench": (lines(ABOUT | {"multiturn": True, "turns": ["one", "two"]}), "one"),
    "messages of SPEED-Bench": (
        lines(ABOUT | {"multiturn": True, "messages": [*CHAT, {"role": "user", "content": "two"}]}),
        CHAT,
    ),
    "Spec-Bench": (lines({"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": []}), "one"),
    "custom": (lines({"prompt": "one", "output_tokens": 12}), "one", {"max_tokens": 12}),
    "own": (
        lines({"prompt": "one", "kind": "code", "temperature": 0.5, "max_tokens": 9, "stop": ["x"]}),
        "one",
        {"temperature": 0.5, "max_tokens": 9, "stop": ["x"]},
    ),
    "MT-bench": (lines({"prompt": ["one", "two"], "category": "writing", "prompt_id": 12}), "one"),
    "own, without thinking": (
        lines({"prompt": "one", "chat_template_kwargs": {"enable_thinking": False}}),
        "one",
        {},
        {"enable_thinking": False},
    ),
    "own chat": (lines({"messages": LONGER}), LONGER),
    "text": (b"\n one \n", " one "),
    "ShareGPT": (json.dumps([TALK]).encode(), LONG),
    "ShareGPT, indented": (json.dumps([TALK], indent=2).encode(), LONG),
    "ShareGPT, with a mark": (b"\xef\xbb\xbf \n" + json.dumps([TALK]).encode(), LONG),
    "SpecForge": (
        lines({"id": "s", "conversations": LONGER, "status": "success"}),
        CHAT,
    ),
    "a table": (b'prompt,category\r\n"one, two\nor ""three""",list\n', 'one, two\nor "three"'),
    "a table, prompts last": (b"id;max_tokens;Question\n7;9;one\n", "one", {"max_tokens": 9}),
    "SGLang's log of requests": (
        lines(
            {"event": "request.finished", "obj": {"text": "one", "sampling_params": {"max_new_tokens": 9, "stop": "x"}}}
        ),
        "one",
        {"max_tokens": 9, "stop": ["x"]},
    ),
    "SGLang's key": (json.dumps([{"conversation": TALK["conversations"]}]).encode(), LONG),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_recognised(name, tmp_path):
    content, prompt, *more = LAYOUTS[name]
    given, template = [*more, {}, {}][:2]
    (row,), _ = of(tmp_path, content)
    assert (row.prompt, row.given, row.template) == (prompt, given, template)
    if "SPEED-Bench" in name:
        assert row.labels == {"category": "coding", "sub_category": "python", "difficulty": "easy"}


def test_conversations_that_vllms_bench_leaves_out_are_left_out(tmp_path):
    def talk(asked, answered, turns=2):
        values = ["q" * asked * CHARACTERS, "a" * answered * CHARACTERS, "more"]
        return {"conversations": [{"from": "human", "value": value} for value in values[:turns]]}

    kept = [(4, 4), (1024, 1024), (10, 2038)]
    gone = [(3, 9), (1025, 9), (9, 3), (10, 2039)]
    rows = [talk(*pair) for pair in [*kept, *gone]] + [talk(9, 9, turns=1), {"id": "empty"}]
    found, left_out = of(tmp_path, json.dumps(rows).encode())
    assert [len(row.prompt) // CHARACTERS for row in found] == [asked for asked, _ in kept]
    assert left_out == len(gone) + 2
    with pytest.raises(UserError, match="has no prompts \\(2 conversations are too short or too long\\)"):
        of(tmp_path, json.dumps(rows[-2:]).encode())


GOOD = lines({"prompt": "fine", "output_tokens": 3})
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECBENCH"
BAD = {
    "not JSON": (GOOD + b"\n{broken\n", "data, line 3: this is not JSON"),
    "no object": (GOOD + b"[1]\n", "data, line 2: this is not a JSON object"),
    "nothing asked": (GOOD + lines({"category": "x"}), 'data, line 2: give either "prompt" or "messages"'),
    "no turns": (lines(ABOUT | {"turns": []}), 'data, line 1: "turns" must be a list of texts'),
    "empty turn": (lines(ABOUT | {"turns": [""]}), 'data, line 1: "turns" must be'),
    "turns of numbers": (lines(ABOUT | {"turns": [3]}), 'data, line 1: "turns" must be'),
    "no messages": (lines(ABOUT | {"messages": []}), 'data, line 1: "messages" must be'),
    "no tokens": (lines({"prompt": "x", "output_tokens": 0}), 'data, line 1: "output_tokens" must be 1 or more, not 0'),
    "nothing written": (lines({"prompt": ""}), 'data, line 1: "prompt" must be text, not empty'),
    "a number": (GOOD + b"\n" + lines({"prompt": 3}), 'data, line 3: "prompt" must be text, not empty'),
    "a capture": (GOOD + lines({"other": 1, "resourceSpans": []}), "data, line 2: this is a capture, not a prompt"),
    "variables": (lines({"prompt": "a", "chat_template_kwargs": 3}), "chat_template_kwargs must be a JSON object"),
    "a turn without text": (lines({"messages": [{"role": "user"}]}), 'data, line 1: "messages" must be'),
    "no number": (lines({"prompt": "a", "top_p": "x"}), "data, line 1: top_p must be a number"),
    "a parameter": (lines({"prompt": "x", "top_p": 2}), "data, line 1: top_p must be"),
    "a placeholder": (GOOD + lines(ABOUT | {"multiturn": False, "turns": [PLACEHOLDER]}), "data, line 2: this row"),
    "a placeholder among messages": (
        lines(ABOUT | {"messages": [{"role": "user", "content": f"{PLACEHOLDER}."}]}),
        "fill the file with SPEED-Bench's prepare.py",
    ),
    "cut off": (json.dumps([TALK, TALK], indent=2).encode()[:-60], "data, line 24: this is not JSON"),
    "broken inside": (b"[\n{},\n{]\n]", "data, line 3: this is not JSON"),
    "no conversations": (b'[\n{"conversations": []},\n{"conversations": 3}]', "data, line 3: no conversation"),
    "no objects": (b"[\n\n3]", "data, line 3: this is not a JSON object"),
    "empty": (b"\n \n", "has no prompts"),
    "empty array": (b" []", "has no prompts"),
    "not UTF-8": (GOOD + b"\xff\n", "data, line 2: this is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said_in_one_line(name, tmp_path):
    content, says = BAD[name]
    with pytest.raises(UserError) as refused:
        of(tmp_path, content)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40)


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("written")
    for rows in (
        [ABOUT | {"turns": [text, "more"]} for text in texts],
        [{"prompt": text, "output_tokens": at + 1} for at, text in enumerate(texts)],
        [{"prompt": text} for text in texts],
    ):
        assert [row.prompt for row in of(folder, lines(*rows))[0]] == texts
    rows = [{"question_id": 1, "messages": [{"role": "user", "content": text}]} for text in texts]
    assert [row.prompt[0]["content"] for row in of(folder, lines(*rows))[0]] == texts


@settings(deadline=None)
@example(b"[" * 5000)
@example(b'[{"conversations": [{"value": "\\ud800"}]}]')
@example(b'{"turns": ["\\ud800"]}')
@example(b'[{"conversations": [{"value": "\xed\xa0\x80"}]}]')
@given(st.binary(max_size=60) | st.sampled_from([content for content, *_ in LAYOUTS.values()]).map(lambda c: c[:-5]))
def test_no_file_crashes_it(tmp_path_factory, content):
    try:
        found = of(tmp_path_factory.mktemp("any"), content)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        assert found[0]


class GenerateReqInput:
    __module__ = "sglang.srt.managers.io_struct"

    def __init__(self, text):
        self.text, self.input_ids, self.sampling_params = text, None, {"max_new_tokens": 9, "top_k": -1}


def test_a_dump_of_sglangs_requests_is_read_without_its_classes(tmp_path, monkeypatch):
    """As it pickles them: nothing in the file is imported or run."""
    path = GenerateReqInput.__module__.split(".")
    for depth in range(1, len(path) + 1):
        monkeypatch.setitem(sys.modules, ".".join(path[:depth]), types.ModuleType(path[depth - 1]))
    sys.modules[GenerateReqInput.__module__].GenerateReqInput = GenerateReqInput
    dump = {"server_args": None, "requests": [(GenerateReqInput("one"), {"text": "two"}, 1.0, 2.0)]}
    for content in (dump, dump["requests"]):
        (row,), _ = of(tmp_path, pickle.dumps(content))
        assert (row.prompt, row.given) == ("one", {"max_tokens": 9})
    ids, cut = pickle.dumps([(GenerateReqInput(None), {})]), pickle.dumps(dump)[:-30]
    for content, why in ((ids, "line 1: this SGLang request has token ids and no text"), (cut, "cannot be read")):
        with pytest.raises(UserError, match=why):
            of(tmp_path, content)
    marker = tmp_path / "run"
    harm = b"\x80\x02csglang.x\nY\n(Vx\ntRcos\nsystem\n(Vmkdir %s\ntR." % str(marker).encode()
    with pytest.raises(UserError):
        of(tmp_path, harm)
    assert not marker.exists()
