"""JSON from outside is decoded at one place, and no text makes that fail in another way than by one line."""

import ast
from pathlib import Path

import msgspec
import pytest

from specscope.errors import UserError
from specscope.trace.checked import decoded
from specscope.trace.record.params import SamplingParams
from specscope.whole_file import read_object

SOURCE = Path(__file__).parents[2] / "specscope"
DEEP = [open * 60_000 + close * 60_000 for open, close in (("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"))]
DEEP += [text[: len(text) // 2] for text in DEEP]
# Who decodes by itself: the place itself, OTLP with decoders made once, and what reads what this repository holds
OWN = {
    "whole_file.py",
    "trace/wire/otlp_json.py",
    "train/run.py",
    "cli/doctor.py",
    "trace/history/wording.py",
    "vllm/run_info.py",
}


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
    found = set()
    for path in SOURCE.rglob("*.py"):
        name = str(path.relative_to(SOURCE))
        if name in OWN:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if call in ("json.loads", "json.load", "orjson.loads", "msgspec.json.decode", "msgspec.json.Decoder"):
                found.add((name, call))
    assert found == set()
