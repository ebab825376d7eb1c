"""All answers of real captures, of lean ones, without text, and of counts; as JSON, in a report, on a page."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
from rich.console import Console

from specscope.analyze import tables
from specscope.analyze.questions.answers import answer, tokens_table
from specscope.analyze.questions.evidence import COUNTS_ONLY
from specscope.analyze.questions.missed import LEAN
from specscope.analyze.report import build_report
from specscope.analyze.text import render_text
from specscope.analyze.why import why_run
from specscope.trace.history.history import History
from specscope.trace.record.tree import Drawn
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from tests.analyze.synthetic import Synthetic

ROOT = Path(__file__).parents[3]
CAPTURES = [ROOT / "traces" / f"{name}.jsonl" for name in ("eagle", "ngram", "sampled", "planted")]
COUNTS = ROOT / "tests" / "data" / "vllm" / "watched.jsonl"


def printed(report, width=120) -> str:
    out = io.StringIO()
    render_text(report, Console(file=out, width=width))
    return out.getvalue()


def test_lean_evidence_says_what_it_lacks():
    lean = Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT, notes=False).run(3, 20)
    full = Synthetic(1, "2x2", Drawn.WITHOUT_REPLACEMENT).run(3, 20)
    assert answer(lean).rejections == answer(full).rejections
    assert LEAN in why_run(lean).notes
    assert LEAN not in why_run(full).notes


def test_counts_only_and_nothing():
    counts = read_capture(COUNTS).history
    table = tokens_table(answer(counts), counts.vocabulary)
    assert (table.rows, table.notes) == ((), (COUNTS_ONLY,))
    assert "answers" not in build_report(counts, source="x").to_dict()
    table = tokens_table(answer(History()), Vocabulary())
    assert (table.rows, table.notes) == ((), ("nothing was drafted",))
    assert printed(build_report(History(), source="x"))


def test_the_report_prints_rows_with_their_examples_and_the_json_has_all():
    history = read_capture(CAPTURES[0]).history
    report = build_report(history, source="traces/eagle.jsonl")
    values = orjson.loads(orjson.dumps(report.to_dict()))["answers"]
    tokens = report.answers.rejections.tokens
    assert [one["token"] for one in values["rejections"]["tokens"]] == [one.token for one in tokens]
    assert values["rejections"]["tokens"][0]["examples"]["clearest"] == str(tokens[0].examples.clearest)
    text = printed(report, 160)
    assert str(tokens[0].examples.clearest) in text
    assert f"{len(tokens) - 10} more; --top {len(tokens)} or --json shows all" in " ".join(text.split())
    assert len(tables.questions(report, 3)[0].rows) == 3
    assert len(tables.questions(report, 10**6)[0].rows) == len(tokens)
