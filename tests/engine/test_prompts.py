"""Prompts of a command line and of files, read alike and refused by line; chat templates and their variables."""

import gzip
import json
import pickle
import sys
import types
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from specscope.engine import chat_template
from specscope.engine.prompts import PLACEHOLDER, PromptSpec, prompt_specs, read_prompts, read_template
from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams
from tests.engines import tiny_engine

PARAMS = SamplingParams(seed=10)
GIVEN = PromptSpec("", PARAMS)

ABOUT = {"question_id": "q1", "category": "coding", "sub_category": "python", "src_id": "x", "difficulty": "easy"}
LONG, ANSWER = "a question of some length", "an answer that has rather more to say"
TALK = {"id": "x_0", "conversations": [{"from": "human", "value": LONG}, {"from": "gpt", "value": ANSWER}]}
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}]
ASKED = {"temperature": 0.5, "stop": ["x"]}
LONGER = [*CHAT, {"role": "assistant", "content": "1"}, {"role": "user", "content": "two"}]


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def of(tmp_path, content):
    path = tmp_path / "data"
    path.write_bytes(content)
    return read_prompts(str(path), GIVEN)


LAYOUTS = {
    "turns of SPEED-Bench": (lines(ABOUT | {"multiturn": True, "turns": ["one", "two"]}), "one"),
    "messages of SPEED-Bench": (lines(ABOUT | {"multiturn": True, "messages": LONGER}), CHAT),
    "Spec-Bench": (lines({"question_id": 81, "category": "writing", "turns": ["one", "two"], "reference": []}), "one"),
    "own": (lines({"prompt": "one", "kind": "code", "output_tokens": 9} | ASKED), "one", {"max_tokens": 9} | ASKED),
    "MT-bench": (lines({"prompt": ["one", "two"], "category": "writing", "prompt_id": 12}), "one"),
    "own chat": (lines({"messages": LONGER}), LONGER),
    "text": (b"\n one \n", " one "),
    "ShareGPT": (json.dumps([TALK]).encode(), LONG),
    "ShareGPT, with a mark": (b"\xef\xbb\xbf \n" + json.dumps([TALK]).encode(), LONG),
    "SpecForge": (lines({"id": "s", "conversations": LONGER, "status": "success"}), CHAT),
    "a table": (b'prompt,category\r\n"one, two\nor ""three""",list\n', 'one, two\nor "three"'),
    "a table, prompts last": (b"id;max_tokens;Question\n7;9;one\n", "one", {"max_tokens": 9}),
    "SGLang's log of requests": (
        lines({"event": "request.finished", "obj": {"text": "one", "sampling_params": {"max_new_tokens": 9} | ASKED}}),
        "one",
        {"max_tokens": 9} | ASKED,
    ),
    "SGLang's key": (json.dumps([{"conversation": TALK["conversations"]}]).encode(), LONG),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_recognised(name, tmp_path):
    content, prompt, *more = LAYOUTS[name]
    given, template = [*more, {}, {}][:2]
    (row,) = of(tmp_path, content)
    asked = SamplingParams.from_dict(PARAMS.to_dict() | given)
    assert (row.prompt, row.params, row.template) == (prompt, asked, template)
    if "SPEED-Bench" in name:
        assert row.labels == {"category": "coding", "sub_category": "python", "difficulty": "easy"}


def test_conversations_without_text_are_left_out_and_counted(tmp_path):
    path, said = tmp_path / "data", []
    rows = [TALK, {"conversations": []}, {"conversations": [{"from": "human", "value": ""}]}]
    path.write_text(json.dumps(rows))
    (row,) = read_prompts(str(path), GIVEN, said.append)
    assert row.prompt == LONG
    assert said == [f"{path}: 2 conversations without text left out"]
    with pytest.raises(UserError, match=r"has no prompts \(2 conversations without text\)"):
        of(tmp_path, json.dumps(rows[1:]).encode())


GOOD = lines({"prompt": "fine", "output_tokens": 3})
BAD = {  # tests/test_fuzzing.py has every other spelling
    "nothing asked": (GOOD + lines({"category": "x"}), 'data, line 2: give either "prompt" or "messages"'),
    "no turns": (lines(ABOUT | {"turns": []}), 'data, line 1: "turns" must be a list of texts'),
    "a number": (GOOD + b"\n" + lines({"prompt": 3}), 'data, line 3: "prompt" must be text, not empty'),
    "a capture": (GOOD + lines({"other": 1, "resourceSpans": []}), "data, line 2: this is a capture, not a prompt"),
    "variables": (lines({"prompt": "a", "chat_template_kwargs": 3}), "chat_template_kwargs must be a JSON object"),
    "a placeholder": (
        GOOD + lines(ABOUT | {"turns": [f"{PLACEHOLDER} FROM THE SOURCE"]}),
        "data, line 2: this row of SPEED-Bench is a",
    ),
    "cut off": (json.dumps([TALK, TALK], indent=2).encode()[:-60], "data is not JSON: "),
    "no conversations": (b'[\n{"conversations": []},\n{"conversations": 3}]', "data, item 2: give either"),
    "empty": (b"\n \n", "has no prompts"),
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
    for key, made in (("turns", lambda text: [text, "more"]), ("prompt", lambda text: text)):
        rows = lines(*({key: made(text)} for text in texts))
        assert [row.prompt for row in of(tmp_path_factory.mktemp("written"), rows)] == texts


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
        assert found


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
        (row,) = of(tmp_path, pickle.dumps(content))
        assert (row.prompt, row.params.max_tokens, row.params.top_k) == ("one", 9, PARAMS.top_k)
    ids, cut = pickle.dumps([(GenerateReqInput(None), {})]), pickle.dumps(dump)[:-30]
    nothing = pickle.dumps([(object.__new__(GenerateReqInput), {})])
    without = "request 1: this SGLang request has token ids and no text"
    for content, why in ((ids, without), (nothing, without), (cut, "cannot be read")):
        with pytest.raises(UserError, match=why):
            of(tmp_path, content)
    marker = tmp_path / "run"
    harm = b"\x80\x02csglang.x\nY\n(Vx\ntRcos\nsystem\n(Vmkdir %s\ntR." % str(marker).encode()
    with pytest.raises(UserError):
        of(tmp_path, harm)
    assert not marker.exists()


CAPTURE = Path(__file__).parents[2] / "traces" / "planted.jsonl"


def test_an_argument_that_names_a_file_stands_for_its_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("one\ntwo\n")
    Path("word").write_text("three\n")
    said = []
    specs = prompt_specs(["a prompt", "some.txt", "word", "hello"], None, GIVEN, said.append)
    assert [spec.prompt for spec in specs] == ["a prompt", "one", "two", "three", "hello"]
    assert [spec.params.seed for spec in specs] == [10, 10, 11, 10, 10]
    assert said == [
        "some.txt is a file: decoding the 2 prompts in it",
        "word is a file: decoding the 1 prompt in it",
    ]
    assert [s.prompt for s in prompt_specs(["no file.txt"], "word", GIVEN, print)] == ["no file.txt", "three"]
    for missing in ("none.txt", "no/where.jsonl", "p.json"):
        with pytest.raises(UserError, match=f"cannot read the prompts {missing}"):
            prompt_specs([missing], None, GIVEN, print)
    how = {"words_are_files": True}  # where a prompt has a space
    specs = prompt_specs(["Why is the sky blue?", "word"], None, GIVEN, print, **how)
    assert [spec.prompt for spec in specs] == ["Why is the sky blue?", "three"]
    with pytest.raises(UserError, match=r"hello: there is no such file \(for a prompt of one word: echo"):
        prompt_specs(["hello"], None, GIVEN, print, **how)


@pytest.mark.parametrize("place", ["", "#r0@2"])
def test_a_capture_is_no_file_of_prompts(monkeypatch, place):
    monkeypatch.chdir(CAPTURE.parent)
    given = CAPTURE.name + place
    word = f"'{given}'" if place else given  # as a shell takes it
    how = f"specscope open {word} shows it, specscope debug {word} debugs it"
    for words_are_files in (False, True):
        with pytest.raises(UserError, match=f"planted.jsonl is a capture, not a file of prompts: {how}"):
            prompt_specs([given], None, GIVEN, print, words_are_files=words_are_files)


@pytest.mark.parametrize("written", ["lines", "indented", "array", "compressed"])
def test_rows_are_read_however_they_are_written(tmp_path, written):
    """Each line has a seed, and other keys of a row of ours are labels."""
    rows, path = [{"prompt": "one", "kind": "code", "n": 3}, {"prompt": "one", "seed": 1}], tmp_path / "data"
    text = {
        "indented": "\n".join(json.dumps(row, indent=1) for row in rows),
        "array": json.dumps(rows, indent=1),
    }.get(written, "\n\n".join(map(json.dumps, rows)))
    path.write_bytes(gzip.compress(text.encode()) if written == "compressed" else text.encode())
    specs = read_prompts(str(path), GIVEN)
    assert [(spec.prompt, spec.labels, spec.params.seed) for spec in specs] == [
        ("one", {"kind": "code", "n": "3"}, 10),
        ("one", {}, 1),
    ]


def test_a_line_has_template_variables_of_its_own(tmp_path):
    (tmp_path / "p").write_text('{"prompt": "a"}\n{"prompt": "b", "chat_template_kwargs": {"x": 2}}\n')
    specs = read_prompts(str(tmp_path / "p"), PromptSpec("", PARAMS, template={"x": 1, "y": 1}))
    assert [spec.template for spec in specs] == [{"x": 1, "y": 1}, {"x": 2, "y": 1}]
    assert specs[1].labels == {}  # the engine makes the label, of what it used


HELLO = [{"role": "user", "content": "Hello"}]


def plain(template, **tokens):
    """A tokenizer as far as transformers' own templates go."""
    methods = {"apply_chat_template": PreTrainedTokenizerBase.apply_chat_template}
    return type("Plain", (), methods | {"chat_template": template, "special_tokens_map": tokens})()


DOUBLED = (
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 1 }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", ["{{ 'x' * 10**10 }}", "{{ '%9999999999d' % 1 }}", DOUBLED, LOOPS])
def test_a_template_without_end_is_refused(template):
    with pytest.raises(UserError, match=r"^the chat template takes more than 5 s or 1 GiB$"):
        chat_template.render(plain(template), HELLO, {}, 1000)
    good = plain("{{ bos_token }}{{ messages[0].content }}{{ x }}", bos_token="<s>")
    assert chat_template.render(good, HELLO, {"x": 3}, 1000) == "<s>Hello3"


def test_what_it_makes_is_bounded_and_what_it_refuses_is_said():
    with pytest.raises(UserError, match="makes 5000 characters of the messages; the limit is 1000"):
        chat_template.render(plain("{{ messages[0].content * 1000 }}"), HELLO, {}, 1000)
    with pytest.raises(UserError, match=r"^the chat template rejects these messages: no user$"):
        chat_template.render(plain("{{ raise_exception('no user') }}"), HELLO, {}, 1000)


TWO = SamplingParams(max_tokens=2)
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def engine(tiny):
    return tiny_engine(tiny, drafter="none", threads=1)


def test_they_change_the_prompt_and_are_a_label(engine):
    for template in (OFF, {"enable_thinking": True}, {}):
        engine.add_spec(PromptSpec("a", TWO, {"kind": "x"}, template=template))
    infos = []
    while engine.busy:
        infos += engine.step().admitted
    assert [info.prompt for info in infos] == ["<|user|>a<|a|><|-|>", "<|user|>a<|a|>", "<|user|>a<|a|>"]
    told = [{"chat_template_kwargs": json.dumps(OFF)}, {"chat_template_kwargs": '{"enable_thinking": true}'}, {}]
    assert [info.labels for info in infos] == [{"kind": "x"} | label for label in told]


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (PromptSpec("a", TWO, raw=True, template=OFF), "apply to chats: the prompt is plain"),
        (PromptSpec("a", TWO, template={"tokenize": True}), "'tokenize' is not a variable of a chat template"),
        (PromptSpec("a", TWO, template={"chat_template": "{{ x }}"}), "'chat_template' is not a variable"),
        (PromptSpec("a", TWO, template={"x": "y" * 20_000}), "at most 10000 characters"),
    ],
)
def test_what_cannot_be_a_variable_is_refused(engine, spec, why):
    with pytest.raises(UserError, match=f"chat_template_kwargs.*{why}"):
        engine.add_spec(spec)
    assert not engine.busy


def test_a_flag_that_is_no_object_is_refused():
    for text in ("", "[]", '{"a": NaN}', "{" * 9000, json.dumps({"a": "x" * 20_000})):
        with pytest.raises(UserError, match=r"^(--chat-template-kwargs|chat_template_kwargs) [^\n]*$"):
            read_template(text)
