"""Captures that hold less, through every verb, say what is missing; what verbs say of the samples is what it was."""

import dataclasses
import json
import sys
from pathlib import Path

import orjson
import pyarrow.parquet as parquet
import pytest

from benchmarks.freeze.results import differences, results_of
from benchmarks.freeze.run import read_frozen
from benchmarks.replay import lengthen
from specscope.analyze import tables
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.side import from_history
from specscope.analyze.export.exporting import export
from specscope.analyze.questions.answers import answer
from specscope.analyze.report import build_report
from specscope.analyze.verify.trial import BY_TOKENS, IN_PART, judge
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder, SpanLevel, brief, resource_attributes
from specscope.trace.words import request_row
from tests.analyze.edits import TRACES, changed, replaced, sample
from tests.analyze.histories import write
from tests.support.commands import run_here

NAMES = ("eagle", "sampled", "ngram", "evidence")
LACK = "recorded with --no-tokens: token ids are not in this file"


def recorded_again(name, folder, level):
    """A sample run as it would have been recorded at a level."""
    history = sample(name)
    about = dataclasses.replace(history.run, privacy=level)
    return str(write(history, folder / f"{name}-{level.name}.jsonl", about))


@pytest.fixture(scope="module")
def nameless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nameless")
    return {name: recorded_again(name, folder, Privacy.NO_TOKENS) for name in NAMES}


def said(*words, code=0):
    """What a verb prints, on both streams; it ends as it should, and never in a traceback."""
    found, out, err = run_here(list(map(str, words)))
    assert found == code, err
    assert "internal error" not in err
    assert "#-1" not in out + err
    return out, err


def told(*words):
    """Its JSON."""
    return json.loads(said(*words, "--json")[0])


@pytest.mark.parametrize("name", NAMES)
def test_verify_judges_the_arithmetic_and_says_what_it_skips(name, nameless):
    (capture,) = told("verify", nameless[name])["captures"]
    assert LACK in capture["warnings"]
    checks = {check["name"]: check for group in capture["groups"] for check in group["checks"]}
    assert {name for name in BY_TOKENS if checks[name]["note"] != LACK or checks[name]["result"] != "skipped"} == set()
    for part, note in IN_PART.items():
        assert checks[part]["result"] == "skipped" or checks[part]["note"] == note
    for arithmetic in ("accept probability", "outcomes", "p at later trials", "residual mass", "coins", "positions"):
        assert checks[arithmetic]["result"] == "passed", arithmetic


@pytest.mark.parametrize("fault", ["coin", "accept_prob", "p_trial"])
def test_verify_still_convicts(fault, nameless, tmp_path):
    history = read_capture(nameless["sampled"]).history
    wrong = changed(history, lambda part: replaced(part, **{f"verdict__{fault}": getattr(part.verdict, fault) * 0.5}))
    path = write(wrong, tmp_path / "a.jsonl")
    assert "NOT CONSISTENT" in said("verify", path, code=1)[0]
    said("diagnose", "--no-audit", path, code=1)


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_finds_no_fault_and_names_what_it_could_not_look_at(name, nameless):
    out, _ = said("diagnose", nameless[name], code=2)
    assert f"not judged: audit: {LACK}" in out
    assert f"{LACK}: drafts were not compared with the text" in out
    assert "No fault found by verify" in out


@pytest.mark.parametrize("other", ["itself", "whole"])
@pytest.mark.parametrize("name", ["eagle", "sampled"])
def test_compare_has_figures_and_never_says_the_same(name, other, nameless):
    found = told("compare", nameless[name], nameless[name] if other == "itself" else TRACES / f"{name}.jsonl")
    assert found["answer"] not in ("same", "different")
    assert found["nodes"] == found["steps"] == 0
    assert any("requests, contexts and outputs are not compared" in line for line in found["missing"])
    (tau,) = (figure for figure in found["figures"] if figure["name"] == "tau")
    assert tau["a"] == tau["b"] > 1
    assert not found["differences"]


def test_why_and_questions_name_no_token_and_say_why(nameless):
    for place in ("", "#r0@1", "#r0@1/1"):
        out, err = said("why", nameless["sampled"] + place)
        assert "wanted ‘" not in out
        assert "drafted 246 times" not in out
        assert LACK in out + err
    answers, whole = (answer(history) for history in (read_capture(nameless["sampled"]).history, sample("sampled")))
    assert not answers.rejections.tokens
    assert answers.rejections.rejected == whole.rejections.rejected
    assert any(LACK in note for note in answers.rejections.notes)


def test_report_counts_and_shows_no_ids(nameless):
    (report,) = told("report", nameless["sampled"])["captures"]
    assert LACK in report["warnings"]
    for request in report["requests"]:
        assert request["prompt_token_ids"] == request["token_ids"] == request["pieces"] == []
        assert request["output"] is request["loops"]["share"] is None
        assert len(request["origins"]) > 0
    assert report["pooled"] == told("report", TRACES / "sampled.jsonl")["captures"][0]["pooled"]
    said("report", nameless["eagle"])


EMPTY = {
    "nodes": ["token", "piece", "parent_choice", "parent_top", "parent_draft_top"],
    "finals": ["token"],
    "requests": ["prompt_tokens", "output_tokens", "output"],
}


def test_export_leaves_the_columns_empty(nameless, tmp_path):
    said("export", nameless["sampled"], "-o", tmp_path)
    tables = {name: parquet.read_table(tmp_path / f"{name}.parquet") for name in (*EMPTY, "runs")}
    for table, columns in EMPTY.items():
        for values in map(tables[table].column, columns):
            assert values.null_count == len(values) > 0
    assert tables["nodes"]["parent_top_p"].null_count < len(tables["nodes"])
    assert min(tables["requests"]["output_length"].to_pylist()) > 0
    (run,) = tables["runs"].to_pylist()
    assert (run["text"], run["tokens"]) == (False, False)


@pytest.mark.parametrize("words", [["tune"], ["diagnose", "--only", "audit"]])
def test_what_needs_tokens_refuses_in_a_line(words, nameless):
    out, err = said(*words, nameless["eagle"], code=2)
    assert (out, LACK in err, len(err.splitlines())) == ("", True, 1)


@pytest.mark.parametrize("name", ["eagle", "sampled"])
def test_without_text_alone_all_is_judged(name, tmp_path):
    path, whole = recorded_again(name, tmp_path, Privacy.NO_TEXT), TRACES / f"{name}.jsonl"
    mine, theirs = (told("verify", one)["captures"][0]["groups"] for one in (path, whole))
    assert mine == theirs
    assert told("compare", whole, path)["answer"] == "same"


LACKS = "figures of requests, from their request spans only: no steps, so no trees, phases, text or questions"


def written(path, source, level=SpanLevel.REQUESTS):
    """What an endpoint gets of a run at a level, as lines."""
    encoder, resource = Encoder(source.run, source.vocabulary, level), brief(resource_attributes(source.run))
    lines = [line_json(resource, spans) for record in source.steps if (spans := encoder.encode(record))]
    path.write_bytes(b"".join(lines))
    return path


@pytest.mark.parametrize("name", ["eagle", "ngram", "sampled"])
def test_a_report_has_the_figures_of_the_whole_capture(tmp_path, name):
    histories = read_capture(written(tmp_path / "alone.jsonl", sample(name))).history, sample(name)
    alone, told = (build_report(history, source="x") for history in histories)
    assert LACKS in alone.warnings
    assert alone.pooled.to_dict() == told.pooled.to_dict()
    assert (alone.means.tau, alone.undrafted) == (told.means.tau, told.undrafted)
    for mine, its in zip(alone.requests, told.requests, strict=True):
        assert mine.figures.to_dict() == its.figures.to_dict()
        assert (mine.id, mine.labels, mine.finish, mine.total_s) == (its.id, its.labels, its.finish, its.total_s)
        assert mine.queued_s == pytest.approx(its.queued_s)
        assert (mine.missing_tokens, mine.output) == (0, None)
    of_groups = [
        {label: [one.requests for one in each.groups[label]] for label in each.groups} for each in (alone, told)
    ]
    assert of_groups[0] == of_groups[1]
    rows = [[(row[0], *row[2:]) for row in tables.requests(each, 10).rows] for each in (alone, told)]
    assert rows[0] == rows[1]  # but for the prompt
    assert not [row for table in tables.tables(alone) for row in table.rows if "unknown" in row]
    assert orjson.dumps(alone.to_dict())


def test_a_request_with_steps_beside_one_without(tmp_path):
    """Of one request the steps were lost: its figures are told, and those of the other are of its steps."""
    source = sample("eagle")
    first = next(iter(source.requests))
    path = written(tmp_path / "mixed.jsonl", source, SpanLevel.TREES)
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


def is_step_of(span, name):
    values = {each["key"]: each["value"].get("stringValue") for each in span["attributes"]}
    return span["name"] in ("decode_step", "prefill") and values["specscope.request.id"] == name


def test_going_back_takes_figures_back(tmp_path):
    source = sample("eagle")
    history = read_capture(written(tmp_path / "alone.jsonl", source)).history
    last, before = history.last_step, history.acceptance.to_dict()
    history.truncate(len(history.steps) - 1)
    assert history.acceptance.steps < before["steps"]
    history.move(last)
    assert history.acceptance.to_dict() == before
    for request in history.requests.values():
        row = request_row(request, len(history.steps) - 1, history.vocabulary)
        its = source.requests[row.name].acceptance
        assert (row.tokens, row.steps, row.tau) == (its.emitted, its.steps, its.tau)
    assert history.mean_tau_at(len(history.steps) - 1) == source.mean_tau_at(len(source.steps) - 1)


DATA = Path(__file__).parents[1] / "data"
KEPT = read_frozen(DATA / "kept.tar.xz")


@pytest.mark.parametrize("path", KEPT)
def test_a_sample_gives_what_it_gave(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of report and why; of export each column's type and a digest of its values."""
    (tmp_path / "traces").symlink_to(DATA / "samples")
    monkeypatch.chdir(tmp_path)
    found = results_of(path, names=KEPT[path])
    assert list(differences(KEPT[path], found)) == []


SHORT, LONG = 4, 12  # laps of a sample of a few requests
VERBS = {
    "report": lambda history: build_report(history, source="a").to_dict(),
    "verify": lambda history: judge(history, source="a"),
    "compare": lambda history: compare(from_history(history, "a"), from_history(history, "b")),
}


def calls(work, *arguments):
    """How many functions and steps of generators it runs."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("long"), {}
    steps = len(read_capture("traces/ngram.jsonl").history.steps)
    for laps in (1, SHORT, LONG):
        made[laps] = folder / f"{laps}.jsonl"
        lengthen("traces/ngram.jsonl", made[laps], laps * steps)
    return made


def grows_by(work, *sizes):
    """How much more work the long one is than the short one; what is done once, whatever the length, is left out."""
    once, short, long = (calls(work, *size) for size in sizes)
    return (long - once) / (short - once)


@pytest.mark.parametrize("verb", VERBS)
def test_judging(verb, captures):
    histories = [(read_capture(path).history,) for path in captures.values()]
    VERBS[verb](*histories[0])  # what is imported and cached
    assert grows_by(VERBS[verb], *histories) < 1.3 * (LONG - 1) / (SHORT - 1)


def test_reading(captures):
    assert grows_by(read_capture, *((path,) for path in captures.values())) < 1.3 * (LONG - 1) / (SHORT - 1)


def test_export(captures, tmp_path):
    """Columns go by the chunk, and the short one fills none: so twice as much; a square is four times."""
    folders = [([str(path)], str(tmp_path / str(laps))) for laps, path in captures.items()]
    assert grows_by(export, *folders) < 2 * (LONG - 1) / (SHORT - 1)
