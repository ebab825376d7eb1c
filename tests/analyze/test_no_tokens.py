"""Captures of --no-tokens through every verb: a verdict or a clear line, and nothing said of what was not looked at."""

import dataclasses
import json
from pathlib import Path

import pytest

from specscope.analyze.questions.answers import answer
from specscope.analyze.verify.trial import BY_TOKENS, IN_PART
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.capture import CaptureWriter
from specscope.trace.wire.reading import read_capture
from tests.analyze.judges.edits import changed, with_verdict
from tests.support.commands import run_here

TRACES = Path(__file__).parents[2] / "traces"
NAMES = ("eagle", "sampled", "ngram", "evidence")
LACK = "recorded with --no-tokens: token ids are not in this file"


def recorded_again(name, folder, level):
    """A sample run as it would have been recorded at a level."""
    history = read_capture(TRACES / f"{name}.jsonl").history
    run = dataclasses.replace(history.run, privacy=level)
    return written(folder / f"{name}-{level.name}.jsonl", history, run)


def written(path, history, run):
    writer = CaptureWriter(path, run, history.vocabulary)
    for record in history.steps:
        writer(record)
    writer.close()
    return str(path)


@pytest.fixture(scope="module")
def nameless(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nameless")
    return {name: recorded_again(name, folder, Privacy.NO_TOKENS) for name in NAMES}


def said(words, code=0):
    """What a verb prints, on both streams; it ends as it should, and never in a traceback."""
    found, out, err = run_here(words)
    assert found == code, err
    assert "internal error" not in err
    assert "#-1" not in out + err
    return out, err


@pytest.mark.parametrize("name", NAMES)
def test_verify_judges_the_arithmetic_and_says_what_it_skips(name, nameless):
    out, _ = said(["verify", nameless[name], "--json"])
    (capture,) = json.loads(out)["captures"]
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
    wrong = changed(history, lambda part: with_verdict(part, **{fault: getattr(part.verdict, fault) * 0.5}))
    path = written(tmp_path / "a.jsonl", wrong, history.run)
    out, _ = said(["verify", path], code=1)
    assert "NOT CONSISTENT" in out
    said(["diagnose", "--no-audit", path], code=1)


@pytest.mark.parametrize("name", NAMES)
def test_diagnose_finds_no_fault_and_names_what_it_could_not_look_at(name, nameless):
    out, _ = said(["diagnose", nameless[name]], code=2)
    assert f"not judged: audit: {LACK}" in out
    assert f"{LACK}: drafts were not compared with the text" in out
    assert "No fault found by verify" in out


@pytest.mark.parametrize("other", ["itself", "whole"])
@pytest.mark.parametrize("name", ["eagle", "sampled"])
def test_compare_has_figures_and_never_says_the_same(name, other, nameless):
    second = nameless[name] if other == "itself" else str(TRACES / f"{name}.jsonl")
    out, _ = said(["compare", nameless[name], second, "--json"])
    found = json.loads(out)
    assert found["answer"] not in ("same", "different")
    assert found["nodes"] == found["steps"] == 0
    assert any("requests, contexts and outputs are not compared" in line for line in found["missing"])
    tau = next(figure for figure in found["figures"] if figure["name"] == "tau")
    assert tau["a"] == tau["b"] > 1
    assert not found["differences"]


def test_why_and_questions_name_no_token_and_say_why(nameless):
    for place in ("", "#r0@1", "#r0@1/1"):
        out, err = said(["why", nameless["sampled"] + place])
        assert "wanted ‘" not in out
        assert "drafted 246 times" not in out
        assert LACK in out + err
    answers = answer(read_capture(nameless["sampled"]).history)
    whole = answer(read_capture(TRACES / "sampled.jsonl").history)
    assert not answers.rejections.tokens
    assert answers.rejections.rejected == whole.rejections.rejected
    assert any(LACK in note for note in answers.rejections.notes)


def test_report_counts_and_shows_no_ids(nameless):
    out, _ = said(["report", nameless["sampled"], "--json"])
    (report,) = json.loads(out)["captures"]
    assert LACK in report["warnings"]
    for request in report["requests"]:
        assert request["prompt_token_ids"] == request["token_ids"] == request["pieces"] == []
        assert request["output"] is None
        assert len(request["origins"]) > 0
        assert request["loops"]["share"] is None
    whole = json.loads(said(["report", str(TRACES / "sampled.jsonl"), "--json"])[0])["captures"][0]
    assert report["pooled"] == whole["pooled"]
    said(["report", nameless["eagle"]])


def test_export_leaves_the_columns_empty(nameless, tmp_path):
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    said(["export", nameless["sampled"], "-o", str(tmp_path / "tables")])
    folder = tmp_path / "tables"
    tables = {name: parquet.read_table(folder / f"{name}.parquet") for name in ("nodes", "finals", "requests")}
    for table, column in (
        *(("nodes", "token"), ("nodes", "piece"), ("nodes", "parent_choice"), ("nodes", "parent_top")),
        *(("nodes", "parent_draft_top"), ("finals", "token"), ("requests", "prompt_tokens")),
        *(("requests", "output_tokens"), ("requests", "output")),
    ):
        values = tables[table][column]
        assert values.null_count == len(values) > 0, column
    assert tables["nodes"]["parent_top_p"].null_count < len(tables["nodes"])
    assert min(tables["requests"]["output_length"].to_pylist()) > 0
    (run,) = parquet.read_table(tmp_path / "tables" / "runs.parquet").to_pylist()
    assert (run["text"], run["tokens"]) == (False, False)


@pytest.mark.parametrize("words", [["tune"], ["diagnose", "--only", "audit"]])
def test_what_needs_tokens_refuses_in_a_line(words, nameless):
    out, err = said([*words, nameless["eagle"]], code=2)
    assert not out
    assert LACK in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["eagle", "sampled"])
def test_without_text_alone_all_is_judged(name, tmp_path):
    path, whole = recorded_again(name, tmp_path, Privacy.NO_TEXT), str(TRACES / f"{name}.jsonl")
    mine, theirs = (json.loads(said(["verify", one, "--json"])[0])["captures"][0]["groups"] for one in (path, whole))
    assert mine == theirs
    assert json.loads(said(["compare", whole, path, "--json"])[0])["answer"] == "same"
