"""Prompt files: text, JSON Lines, and the number of the broken line."""

import gzip
import json
from pathlib import Path

import pytest

from specscope.engine.prompts import prompt_specs, read_prompts
from specscope.errors import UserError
from specscope.trace.record.params import SamplingParams

PARAMS = SamplingParams(seed=10)


def test_json_lines_with_parameters_messages_and_labels(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a", "temperature": 0.5, "stop": "x", "kind": "chat", "n": 3}\n'
        '{"messages": [{"role": "user", "content": "b"}], "seed": 1}\n'
    )
    one, two = read_prompts(str(path), PARAMS, raw=False)
    assert (one.params.temperature, one.params.stop, one.params.seed) == (0.5, ("x",), 10)
    assert one.labels == {"kind": "chat", "n": "3"}
    assert two.prompt == [{"role": "user", "content": "b"}]
    assert two.params.seed == 1


CAPTURE = Path(__file__).parents[2] / "traces" / "planted.jsonl"


def test_an_argument_that_names_a_file_stands_for_its_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("one\ntwo\n")
    Path("word").write_text("three\n")
    said = []
    specs = prompt_specs(["a prompt", "some.txt", "word", "hello"], None, PARAMS, tell=said.append)
    assert [spec.prompt for spec in specs] == ["a prompt", "one", "two", "three", "hello"]
    assert [spec.params.seed for spec in specs] == [10, 10, 11, 10, 10]
    assert said == [
        "some.txt is a file: decoding the 2 prompts in it",
        "word is a file: decoding the 1 prompt in it",
    ]
    assert [s.prompt for s in prompt_specs(["no file.txt"], "word", PARAMS)] == ["no file.txt", "three"]
    for missing in ("none.txt", "no/where.jsonl", "p.json"):
        with pytest.raises(UserError, match=f"cannot read the prompts {missing}"):
            prompt_specs([missing], None, PARAMS)


def test_where_words_are_files_a_prompt_has_a_space(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("word").write_text("three\n")
    Path("two words").write_text("four\n")
    specs = prompt_specs(["Why is the sky blue?", "word", "two words"], None, PARAMS, words_are_files=True)
    assert [spec.prompt for spec in specs] == ["Why is the sky blue?", "three", "four"]
    with pytest.raises(UserError, match=r"hello: there is no such file \(for a prompt of one word: echo"):
        prompt_specs(["hello"], None, PARAMS, words_are_files=True)


@pytest.mark.parametrize("words_are_files", [False, True])
@pytest.mark.parametrize("place", ["", "#r0@2"])
def test_a_capture_is_no_file_of_prompts(tmp_path, monkeypatch, words_are_files, place):
    monkeypatch.chdir(CAPTURE.parent)
    given = CAPTURE.name + place
    word = f"'{given}'" if place else given  # as a shell takes it
    how = f"specscope open {word} shows it, specscope debug {word} debugs it"
    with pytest.raises(UserError, match=f"planted.jsonl is a capture, not a file of prompts: {how}"):
        prompt_specs([given], None, PARAMS, words_are_files=words_are_files)
    with pytest.raises(UserError, match="is a capture, not a file of prompts"):
        read_prompts(CAPTURE.name, PARAMS, raw=False)


@pytest.mark.parametrize("written", ["lines", "indented", "array", "compressed"])
def test_rows_are_read_however_they_are_written(tmp_path, written):
    """Each line has a seed of its own, and other keys of a row of ours are labels."""
    rows, path = [{"prompt": "one", "kind": "code"}] * 2, tmp_path / "data"
    text = {
        "indented": "\n".join(json.dumps(row, indent=1) for row in rows),
        "array": json.dumps(rows, indent=1),
    }.get(written, "\n\n".join(map(json.dumps, rows)))
    path.write_bytes(gzip.compress(text.encode()) if written == "compressed" else text.encode())
    specs = read_prompts(str(path), PARAMS, raw=False)
    assert [(spec.prompt, spec.labels) for spec in specs] == [("one", {"kind": "code"})] * 2
    assert [spec.params.seed for spec in specs] == [10, 11]


def test_a_line_has_template_variables_of_its_own(tmp_path):
    (tmp_path / "p").write_text('{"prompt": "a"}\n{"prompt": "b", "chat_template_kwargs": {"x": 2}}\n')
    specs = read_prompts(str(tmp_path / "p"), PARAMS, raw=False, template={"x": 1, "y": 1})
    assert [spec.template for spec in specs] == [{"x": 1, "y": 1}, {"x": 2, "y": 1}]
    assert specs[1].labels == {}  # the engine makes the label, of what it used
