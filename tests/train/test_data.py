"""A user's training data: read as it stands, or refused by its line, before and after the target is there."""

import json

from hypothesis import given
from hypothesis import strategies as st

from specscope.train.data import read_data
from tests.support.commands import refused_in_one_line, run_here

GOOD = [
    {"text": "some text"},
    {"prompt": "why?", "response": "so"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
]


def test_paragraphs_and_every_shape(tmp_path):
    path = tmp_path / "data"
    path.write_text("one\ntwo\n\nthree\n")
    assert list(read_data(path)) == [(0, "one\ntwo"), (0, "three\n")]
    path.write_text("\n\n".join(map(json.dumps, GOOD)))
    assert [number for number, _ in read_data(path)] == [1, 3, 5]
    assert [value for _, value in read_data(path)] == GOOD


@given(st.binary(max_size=60) | st.sampled_from(GOOD).map(lambda row: json.dumps(row).encode()[:-3] + b"x"))
def test_any_bytes_are_read_or_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    for content in (data, b'{"text": "a"}\n' + data):
        path.write_bytes(content)
        refused_in_one_line(lambda: list(read_data(path)))


def test_too_little_is_refused_before_the_target_is_looked_for(tmp_path):
    (tmp_path / "data").write_text("a text\n\nanother\n")
    words = ["train", "eagle3", "-o", str(tmp_path / "out"), "--data", str(tmp_path / "data")]
    error = "specscope: error: training needs at least 40 sequences, and there are 2\n"
    assert run_here(words) == (2, "", error)


def test_what_only_the_target_can_refuse_leaves_no_folder(deep, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text('{"text": "a"}\n' * 40)  # of one token each
    code, _, err = run_here(["train", "eagle3", "-o", str(out), "--data", str(data), "--target", str(deep)])
    assert (code, err) == (2, f"specscope: error: {data} holds no text of at least 4 tokens\n")
    assert not out.exists()
