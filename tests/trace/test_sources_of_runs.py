"""Captures as people keep them: several runs in a file, a run in several, a request alone, texts that a store cut."""

import json
import threading
from collections import Counter
from pathlib import Path

import pytest

from specscope.errors import UserError
from specscope.trace.record.draft_vocabulary import draft_tokens
from specscope.trace.stored import as_runs, every_run
from specscope.trace.wire import reading
from specscope.trace.wire.reading import read_capture
from specscope.watch import source
from tests.support.commands import specscope
from tests.trace.damage import spans_of

TRACES = Path(__file__).parents[2] / "traces"
PLANTED = TRACES / "planted.jsonl"


def lines(path=PLANTED):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, documents):
    path.write_text("".join(json.dumps(document, separators=(",", ":")) + "\n" for document in documents))
    return str(path)


def changed(documents, name, change):
    """With the text of an attribute changed wherever it stands."""
    for document in documents:
        resources = [part["resource"] for part in document["resourceSpans"]]
        for pair in (pair for holder in (*resources, *spans_of(document)) for pair in holder["attributes"]):
            if pair["key"] == name:
                pair["value"]["stringValue"] = change(pair["value"]["stringValue"])
    return documents


@pytest.fixture
def two(tmp_path):
    """Two runs in one file, the second once more under another id."""
    other = changed(lines(), "specscope.run.id", lambda text: "f" * len(text))
    return write(tmp_path / "two.jsonl", [*lines(), *other])


def test_of_several_runs_in_a_file_one_can_be_named_and_report_takes_all(two):
    known = read_capture(PLANTED).history.steps
    assert [(each.files, read_capture(each).history.steps) for each in every_run(two)] == [((Path(two),), known)] * 2
    with pytest.raises(UserError, match=r"more than one run: add --run ID with one of [0-9a-f]{12}, f{12}$"):
        read_capture(two)
    assert specscope("verify", two).returncode == 2
    one, sent = specscope("verify", two, "--run", "ffff"), specscope("verify", PLANTED)
    assert (one.returncode, one.stdout) == (sent.returncode, sent.stdout.replace(str(PLANTED), two))
    assert "(run ffffffffffff)" in specscope("report", two, COLUMNS="200").stdout
    assert "Figures" in specscope("compare", two).stdout
    assert "has no run abc; there are: " in specscope("verify", two, "--run", "abc").stderr


def test_files_of_one_run_are_one_run_in_whatever_order(tmp_path):
    whole = lines(TRACES / "ngram.jsonl")
    parts = [write(tmp_path / "b.jsonl", whole[2:]), write(tmp_path / "a.jsonl", whole[:2])]
    [source] = as_runs(parts)
    reader = read_capture(source)
    assert reader.history.steps == read_capture(TRACES / "ngram.jsonl").history.steps
    assert (reader.warnings, reader.progress) == ([], 1.0)
    assert len(as_runs([str(PLANTED), str(TRACES / "ngram.jsonl")])) == 2


@pytest.mark.parametrize("name", ["parents", "request.params", "run.versions", "run.params"])
def test_of_a_text_that_a_store_cut_only_that_is_lost(name, tmp_path):
    cut = changed(lines(), f"specscope.{name}", lambda text: text[:30])
    reader, sent = read_capture(write(tmp_path / "cut.jsonl", cut)), read_capture(PLANTED).history
    assert reader.history.acceptance == sent.acceptance
    outputs = ([request.output() for request in each.requests.values()] for each in (reader.history, sent))
    assert next(outputs) == next(outputs)
    assert any(f"`specscope.{name}` was cut short" in warning for warning in reader.warnings)
    assert not reader.history.lost


def test_a_request_by_its_trace_alone_lacks_nothing_of_its_own(tmp_path):
    """Nor its draft vocabulary, which another trace holds: the head on this machine is the one that it names."""
    alone = lines(TRACES / "eagle.jsonl")
    every = [span for document in alone for span in spans_of(document)]
    told = {span["traceId"] for span in every if "specscope.run.draft_tokens" in json.dumps(span)}
    counts = Counter(span["traceId"] for span in every if span["traceId"] not in told)
    trace = counts.most_common(1)[0][0]
    for document in alone:
        for part in document["resourceSpans"]:
            for scope in part["scopeSpans"]:
                scope["spans"] = [span for span in scope["spans"] if span["traceId"] == trace]
    reader = read_capture(write(tmp_path / "alone.jsonl", alone))
    assert reader.warnings == []
    assert reader.history.in_part
    assert draft_tokens(reader.history.run) is not None
    steps = [span for document in alone for span in spans_of(document) if span["name"] == "decode_step"]
    for span in steps[1:3]:
        span["name"] = "lost"
    [words] = read_capture(write(tmp_path / "alone.jsonl", alone)).warnings
    assert words == "a part of its run, without 2 steps of 1 request"


@pytest.mark.parametrize("barren", ["{}", '{"resourceSpans":[]}'])
def test_lines_that_hold_no_span_are_not_read_without_end(barren, tmp_path, monkeypatch):
    """Five million of them took 40 s. What came before them is kept."""
    monkeypatch.setattr(reading, "MOST_BARREN", 50)
    sent = read_capture(PLANTED).history.steps
    head, read = PLANTED.read_text().splitlines(), []
    real = reading.read_line
    monkeypatch.setattr(reading, "read_line", lambda line: read.append(line) or real(line))
    for count in (1, len(head)):
        read.clear()
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join([*head[:count], *[barren] * 200, ""]))
        if count == 1:
            with pytest.raises(
                UserError, match=r"a.jsonl, line (50|51): the last 50 lines hold no span: it is not a c"
            ):
                read_capture(path)
        else:
            reader = read_capture(path)
            assert any(f"is read up to line {count + 50}: the last 50 lines" in line for line in reader.warnings)
            assert reader.history.steps == sent
        assert len(read) <= count + 50


def test_documents_without_figures_are_not_read_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "MOST_UNREAD", 50)
    read, real = [], source.read_json
    monkeypatch.setattr(source, "read_json", lambda *given, **how: read.append(given) or real(*given, **how))
    (tmp_path / "a.jsonl").write_text("{}\n" * 200)
    with pytest.raises(
        UserError, match=r"a.jsonl, line 50: no speculation figures up to here; left out 50×: line 1: no"
    ):
        list(source.File(str(tmp_path / "a.jsonl"), follow=False).run(threading.Event()))
    assert len(read) == 50
