"""JSON documents are found however they are written, decoded at one place; and what a file is from any bytes."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope.errors import UserError
from specscope.trace import kinds
from specscope.trace.checked import decoded
from specscope.trace.kinds import (
    CAPTURE,
    OTLP_PROTOBUF,
    SHAREGPT,
    VLLM_LOG,
    documents,
    is_array,
    kind_of,
    looks_like_json,
)
from specscope.trace.record.params import SamplingParams
from specscope.whole_file import read_object

text = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(['"', "\\", "}", '{"', "[", "\\\\"])
values = text | st.integers() | st.none() | st.lists(text, max_size=2) | st.dictionaries(text, text, max_size=2)
objects = st.dictionaries(text, values, min_size=1, max_size=3)
few = settings(max_examples=40)


@few
@given(st.lists(objects, min_size=1, max_size=4), st.integers(1, 40))
def test_a_cut_leaves_the_documents_before_it(written, lost):
    content = "\n".join(json.dumps(value, indent=1) for value in written)
    found = list(documents(enumerate(content.encode()[:-lost].splitlines(keepends=True), 1), "x"))
    whole = [json.loads(document) for _, document in found if document.endswith(b"\n") and document.startswith(b"{")]
    assert whole == written[: len(whole)]
    assert len(whole) >= len(written) - 1 - content.encode()[-lost:].count(b"\n{")


betweens = st.sampled_from([",", "", " ", "\n", "\n\n"])


@few
@given(st.lists(objects, max_size=4), st.sampled_from([None, 0, 1, 4]), betweens)
def test_documents_are_found_however_they_are_written(written, indent, between):
    around = [{"x": {"d": [1]}, "a": {"c": [[]], "b": value, "e": {}}, "d": [{}, "]"]} for value in written]
    texts = [json.dumps(value, indent=indent) for value in around]
    content = (f"[{between.join(texts)}]" if between == "," else between.join(texts)).encode()
    found = documents(enumerate(content.splitlines(keepends=True), 1), "x")
    assert [json.loads(one) for _, one in found if one.strip()] == around


def test_a_document_of_many_lines_is_not_measured_anew_at_each(monkeypatch):
    measured = []
    monkeypatch.setattr(kinds, "len", lambda held: measured.append(1) or len(held), raising=False)
    content = json.dumps({"a": list(range(2000))}, indent=1).encode()
    for text in (content, content[:-2]):  # whole, and damaged
        assert len(list(documents(enumerate(text.splitlines(keepends=True), 1), "x"))) == 1
    assert 4000 <= len(measured) < 10_000


@example(b": " * 30_000)  # each is a pattern that could be tried in very many ways
@example(b": \n" * 30_000)
@example(b'{"a' * 20_000)
@example(b"data: {" * 9000)
@example(b"vllm:a{" * 9000)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_of_some_kind_or_none(start):
    kind = kind_of(start)
    assert kind is None or str(kind.refusal("x", "y")).isprintable()


@few
@given(objects, st.integers(0, 30))
def test_json_is_seen_as_such_wherever_it_is_cut(value, at):
    assert looks_like_json(json.dumps(value)[: at + 1])
    assert is_array(json.dumps([value, value])[: at + 1])
    starts = ("[INST] a", "[Gloo] b", "[0;36m(x", "[2026-01-01 10:00:00] c", "[a]", "1", "a {", "")
    assert not any(map(looks_like_json, starts))


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (b'\xef\xbb\xbf {"resourceSpans":[', CAPTURE),
        (b'{"a": {"resourceSpans": 1}}', None),  # a key of another object
        (b"\n\x50\n\x20\n\x17\n\x0cservice.name\x12\x07", OTLP_PROTOBUF),
        (b"\x00\x00\x10\x05\n\x80\x20\x12\xf0\x1f\x12\x07", OTLP_PROTOBUF),
        (b"\x00\x00\x10\x05\x28\xb5\x2f\xfd", OTLP_PROTOBUF),
        (b"\na\nb\nc\nservice.name a", None),
        (b"\n\n\n\n\n\n\n\n", None),
        (b'{"resourceSpans" ', None),
        (b'{"a": "resourceSpans:", "b": ["resourceSpans"]}', None),
        (b'[{"id": 1, "conversations": [{"from', SHAREGPT),
        (b"noise\n\x1b[0;36m(APIServer pid=1)\x1b[0;0m INFO 11-05 03:22:10 [loggers.py:208] Engine", VLLM_LOG),
    ],
)
def test_kinds_by_their_start(start, kind):
    assert kind_of(start) is kind


SOURCE = Path(__file__).parents[2] / "specscope"
DEEP = [open * 60_000 + close * 60_000 for open, close in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"))]
DEEP += [text[: len(text) // 2] for text in DEEP]
# Who decodes by itself: the place itself, OTLP with decoders made once, and what reads what this repository holds
OWN = {"whole_file.py", "trace/wire/otlp_json.py", "trace/history/wording.py", "vllm/run_info.py"}


class Row(msgspec.Struct):
    name: str = ""


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize("kind", [object, Row, SamplingParams, dict[str, float]])
def test_text_that_is_nested_without_end_is_one_line(text, kind):
    for data in (text, text.encode(), bytearray(text.encode()), f'{{"unknown": {text}}}'):
        for asked in ((data,), (data, kind)):
            with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
                decoded(*asked)


def test_a_file_of_one_object(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"limit": [0.0, Infinity], "x": NaN}')  # as transformers writes them
    assert read_object(path)["limit"] == [0.0, float("inf")]
    for text, why in ((DEEP[0], "nested too deeply"), ("[]", "not a JSON object"), ("{", "is not JSON")):
        path.write_text(text)
        with pytest.raises(UserError, match=why):
            read_object(path)
    path.write_text("{}" + " " * 100)
    with pytest.raises(UserError, match="larger than"):
        read_object(path, 50)
    with pytest.raises(UserError, match="no regular file"):
        read_object(Path("/dev/zero"))


def test_nobody_decodes_json_from_outside_by_himself():
    decodes = re.compile(r"json\.(loads?|decode|Decoder)\(")
    assert {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if decodes.search(path.read_text())} == OWN
