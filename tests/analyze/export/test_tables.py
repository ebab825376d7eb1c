"""The tables: of random records and of real captures, and what is null in them; each block of EXAMPLES.md runs."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from weakref import WeakValueDictionary

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from benchmarks.replay import lengthen
from specscope.analyze.export import exporting, rows
from specscope.analyze.export.exporting import export
from specscope.analyze.export.schema import SCHEMAS
from specscope.trace.record.declared import same
from specscope.trace.wire.reading import read_capture
from tests.analyze.export.examples import BLOCK, PAGE, shown
from tests.trace import samples
from tests.trace.strategies import RUN, runs, vocabularies

TRACES = Path(__file__).parents[3] / "traces"


def read(folder, name):
    """A table's rows."""
    return pq.read_table(folder / f"{name}.parquet").to_pylist()


@settings(max_examples=6)
@given(records=runs(), vocabulary=vocabularies)
def test_whatever_a_capture_may_hold(records, vocabulary, tmp_path_factory):
    """A row for each step, node and end; the same where rows are written after almost every step, in small groups."""
    folder = tmp_path_factory.mktemp("random")
    path = samples.written(folder / "run.jsonl", records, vocabulary=vocabulary)
    export([str(path)], str(folder / "tables"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "MOST_STEPS", 2)
        patch.setattr(exporting, "GROUP", 3)
        export([str(path)], str(folder / "small"))
    for name, schema in SCHEMAS.items():
        found = read(folder / "tables", name)
        assert alike(found, read(folder / "small", name))
        assert all(row[field.name] is not None for row in found for field in schema if not field.nullable), name
    parts = [part for record in records for part in record.requests]
    judged = [part for part in parts if part.verdict is not None]
    counts = {"steps": len(parts), "finals": len(judged), "nodes": sum(len(part.tree) for part in judged)}
    assert {name: len(read(folder / "tables", name)) for name in counts} == counts
    ends = [end.info.id for record in records for end in record.finished]
    assert [row["request"] for row in read(folder / "tables", "requests") if row["reason"] is not None] == ends
    (run,) = read(folder / "tables", "runs")
    assert (run["target"], run["engine_steps"], run["lost"]) == (RUN.target, len(records), 0)
    for row in read(folder / "tables", "tokens"):
        assert row["piece"] == vocabulary.pieces[row["token"]].decode("utf-8", "backslashreplace")


def test_steps_are_let_go(tmp_path, monkeypatch):
    """Of eight hundred no more are held than are written together and read meanwhile; and of their columns one set."""
    held, columns, most = WeakValueDictionary(), WeakValueDictionary(), [0, 0]

    def counted(*given):
        for record in read_records(*given):
            held[record.step] = record
            most[0] = max(most[0], len(held))
            yield record

    def made(parts):
        columns[id(parts)] = made = make_columns(parts)
        most[1] = max(most[1], len(columns))
        return made

    read_records, make_columns = exporting._records, rows.Columns
    monkeypatch.setattr(exporting, "_records", counted)
    monkeypatch.setattr(exporting, "SLICE", 0.0)
    monkeypatch.setattr(rows, "Columns", made)
    monkeypatch.setattr(rows, "MOST_STEPS", 100)
    lengthen(str(TRACES / "planted.jsonl"), tmp_path / "long.jsonl", 800)
    assert export([str(tmp_path / "long.jsonl")], str(tmp_path / "tables")).rows["steps"] == 800
    assert 100 <= most[0] < 400
    assert most[1] <= 2


def alike(value, wanted):
    """Numbers that are none are equal here, in lists and rows too."""
    if isinstance(value, list):
        return len(value) == len(wanted) and all(map(alike, value, wanted))
    return all(alike(value[key], wanted[key]) for key in value) if isinstance(value, dict) else same(value, wanted)


def test_captures_together(tmp_path):
    """Each one's rows behind the other's, told apart by run and capture."""
    captures = [str(path) for path in sorted(TRACES.glob("*.jsonl"))]
    written = export(captures, str(tmp_path))
    assert written.warnings == []
    assert [row["capture"] for row in read(tmp_path, "runs")] == captures
    for name, count in written.rows.items():
        assert len(read(tmp_path, name)) == count
    assert [*dict.fromkeys(row["capture"] for row in read(tmp_path, "nodes"))] == captures
    outputs = {(row["capture"], row["request"]): row["output"] for row in read(tmp_path, "requests")}
    history = read_capture(captures[0]).history
    for name, request in history.requests.items():
        text = history.vocabulary.text(request.end.output.tolist())
        assert outputs[captures[0], name] == text != ""


def test_output_position_is_the_output_before_the_step(tmp_path):
    """It is worked out from the KV cache; here it is counted."""
    paths = [str(TRACES / f"{name}.jsonl") for name in ("eagle", "ngram", "sampled")]
    export(paths, str(tmp_path))
    before = {}
    for row in read(tmp_path, "steps"):
        key = (row["capture"], row["request"])
        if row["kind"] is not None:
            assert row["output_position"] == before.get(key, 0)
        before[key] = before.get(key, 0) + row["emitted"]
    assert len(before) == 9


def exported(folder, records):
    """The rows of each table."""
    vocabulary = read_capture(TRACES / "planted.jsonl").history.vocabulary
    path = samples.written(folder / "run.jsonl", records, vocabulary=vocabulary)
    export([str(path)], str(folder / "tables"))
    return {name: read(folder / "tables", name) for name in ("steps", "requests", "nodes", "finals")}


def test_steps_that_were_taken_back_are_marked(tmp_path):
    """Four steps; then the engine goes back behind the second, and two more come, in which the request does not end."""
    records = samples.records()
    for step, after in ((4, 1), (5, None)):
        records.append(dataclasses.replace(records[2], step=step, branch=1, after=after, rewound=after is not None))
    tables = exported(tmp_path, records)
    assert [(row["step"], row["branch"], row["current"]) for row in tables["steps"]] == [
        *[(0, 0, True), (1, 0, True), (2, 0, False), (3, 0, False), (4, 1, True), (5, 1, True)]
    ]
    requests = tables["requests"]
    assert [(row["branch"], row["current"], row["reason"]) for row in requests] == [
        *[(0, False, "length"), (1, True, None)]
    ]
    assert requests[1]["prompt_tokens"] == [11, 12, 13]


def test_the_page_names_every_column(tmp_path):
    page = (TRACES.parent / "docs" / "export.md").read_text().split("## `")[1:]
    told = {table: set(re.findall(r"`(\w+)`", text)) for table, _, text in (each.partition("`\n") for each in page)}
    export([str(TRACES / "planted.jsonl")], str(tmp_path))
    for name, schema in SCHEMAS.items():
        kept = pq.read_schema(tmp_path / f"{name}.parquet")
        assert (kept.metadata[b"specscope.table"], kept.names) == (name.encode(), schema.names)
        shared = {"run", "capture"} if name in ("runs", "requests", "tokens", "intervals") else told["Every row"]
        assert set(kept.names) - shared <= told[name], name


TEXT = PAGE.read_text()


@pytest.fixture(scope="module")
def run():
    words = [sys.executable, "-m", "tests.analyze.export.examples", "--print"]
    done = subprocess.run(words, capture_output=True, cwd=PAGE.parents[3], check=True)
    return [tuple(pair) for pair in json.loads(done.stdout)]


@pytest.mark.parametrize("at", range(sum(language != "text" for language, _ in BLOCK.findall(TEXT))))
def test_an_example_prints_what_it_says(run, at):
    block, wanted = list(shown(TEXT))[at]
    assert run[at] == (block, wanted)


def test_the_page_answers_in_both_languages():
    languages = [language for language, _ in BLOCK.findall(TEXT)]
    assert languages.count("sql") >= 8
    assert languages.count("python") >= 4
    assert all(out for block, out in shown(TEXT) if not block.startswith("specscope"))


def test_the_page_is_linked():
    page = (PAGE.parents[3] / "docs" / "export.md").read_text()
    assert f"(../{PAGE.relative_to(PAGE.parents[3])})" in page
