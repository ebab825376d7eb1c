"""Prompt files: text, JSON Lines, and the number of the broken line."""

import pytest

from specscope.engine.prompts import parse_line, read_prompts
from specscope.errors import UserError
from specscope.trace.params import SamplingParams

PARAMS = SamplingParams(seed=10)


def test_text_lines(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("first\n\n  second \n")
    specs = read_prompts(str(path), PARAMS, raw=True)
    assert [(s.prompt, s.params.seed, s.raw) for s in specs] == [("first", 10, True), ("  second ", 11, True)]


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "not JSON"),
        ('{"kind": "x"}', 'either "prompt" or "messages"'),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "not empty"),
        ('{"prompt": "a", "temperature": -1}', "temperature must be"),
        ('{"prompt": "a", "top_p": "x"}', "top_p must be a number"),
        ('{"messages": [{"role": "user"}]}', '"messages" must be'),
        ('{"messages": []}', '"messages" must be'),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(UserError, match=rf"p.jsonl, line 3: .*{message}"):
        read_prompts(str(path), PARAMS, raw=False)


def test_other_bad_files(tmp_path):
    with pytest.raises(UserError, match="cannot read the prompts"):
        read_prompts(str(tmp_path / "none"), PARAMS, raw=False)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(UserError, match="has no prompts"):
        read_prompts(str(tmp_path / "empty"), PARAMS, raw=False)
    (tmp_path / "latin").write_bytes(b"fine\n\xff\xfe\n")
    with pytest.raises(UserError, match="line 2: this is not UTF-8"):
        read_prompts(str(tmp_path / "latin"), PARAMS, raw=False)


def test_a_line_that_is_no_object():
    with pytest.raises(UserError, match="not a JSON object"):
        parse_line("[1]", PARAMS)
