"""Files that hold one span a request: what works from them, and what they are said to lack."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from specscope.analyze import tables
from specscope.analyze.report import Report, build_report
from specscope.trace.history.history import History
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder, SpanLevel, brief, resource_attributes
from specscope.trace.words import request_row

TRACES = Path(__file__).parents[2] / "traces"
SOURCES = ("eagle", "ngram", "sampled")
LACKS = "figures of requests, from their request spans only: no steps, so no trees, phases, text or questions"


def write(path: Path, source: History, level: SpanLevel = SpanLevel.REQUESTS) -> Path:
    """What an endpoint gets of a run at a level, as lines."""
    assert source.run is not None
    encoder, resource = Encoder(source.run, source.vocabulary, level), brief(resource_attributes(source.run))
    lines = [line_json(resource, spans) for record in source.steps if (spans := encoder.encode(record))]
    path.write_bytes(b"".join(lines))
    return path


def whole(name: str) -> History:
    return read_capture(TRACES / f"{name}.jsonl").history


def report_of(history: History) -> Report:
    return build_report(history, source="x")


@pytest.mark.parametrize("name", SOURCES)
def test_a_report_has_the_figures_of_the_whole_capture(tmp_path, name):
    reader = read_capture(write(tmp_path / "alone.jsonl", whole(name)))
    alone, told = report_of(reader.history), report_of(whole(name))
    assert LACKS in alone.warnings
    assert alone.pooled.to_dict() == told.pooled.to_dict()
    assert alone.means.tau == told.means.tau
    assert alone.undrafted == told.undrafted
    for mine, its in zip(alone.requests, told.requests, strict=True):
        assert mine.figures.to_dict() == its.figures.to_dict()
        assert (mine.id, mine.labels, mine.finish, mine.total_s) == (its.id, its.labels, its.finish, its.total_s)
        assert mine.queued_s == pytest.approx(its.queued_s)
        assert (mine.missing_tokens, mine.output) == (0, None)
    assert {label: [group.requests for group in groups] for label, groups in alone.groups.items()} == {
        label: [group.requests for group in groups] for label, groups in told.groups.items()
    }
    rows = [[(row[0], *row[2:]) for row in tables.requests(each, 10).rows] for each in (alone, told)]
    assert rows[0] == rows[1]  # but for the prompt
    assert not [row for table in tables.tables(alone) for row in table.rows if "unknown" in row]
    assert orjson.dumps(alone.to_dict())


def test_a_request_with_steps_beside_one_without(tmp_path):
    """Of one request the steps were lost: its figures are told, and those of the other are of its steps."""
    source = whole("eagle")
    first = next(iter(source.requests))
    path = write(tmp_path / "mixed.jsonl", source, SpanLevel.TREES)
    kept = []
    for line in path.read_bytes().splitlines():
        data = orjson.loads(line)
        for part in data["resourceSpans"]:
            spans = part["scopeSpans"][0]["spans"]
            spans[:] = [span for span in spans if not is_step_of(span, first)]
        kept.append(orjson.dumps(data) + b"\n")
    path.write_bytes(b"".join(kept))
    history = read_capture(path).history
    assert (history.without_steps, history.figures_only) == (1, False)
    assert history.acceptance.to_dict() == source.acceptance.to_dict()
    assert "figures of 1 of 3 requests" in history.figures_note
    history.truncate(0)
    assert history.acceptance.steps == 0


def is_step_of(span: dict, name: str) -> bool:
    values = {each["key"]: each["value"].get("stringValue") for each in span["attributes"]}
    return span["name"] in ("decode_step", "prefill") and values["specscope.request.id"] == name


def test_going_back_takes_figures_back(tmp_path):
    history = read_capture(write(tmp_path / "alone.jsonl", whole("eagle"))).history
    last, before = history.last_step, history.acceptance.to_dict()
    history.truncate(len(history.steps) - 1)
    assert history.acceptance.steps < before["steps"]
    history.move(last)
    assert history.acceptance.to_dict() == before
    rows = [request_row(request, len(history.steps) - 1, history.vocabulary) for request in history.requests.values()]
    source = whole("eagle")
    for row in rows:
        request = source.requests[row.name]
        assert (row.tokens, row.steps) == (request.acceptance.emitted, request.acceptance.steps)
        assert row.tau == request.acceptance.tau
    assert history.mean_tau_at(len(history.steps) - 1) == source.mean_tau_at(len(source.steps) - 1)
