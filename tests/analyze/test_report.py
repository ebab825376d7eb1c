"""The figures of a report, on histories small enough to count by hand, and the report in a terminal."""

import dataclasses
import re

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from specscope.analyze import tables
from specscope.analyze.report import build_report, by_position
from specscope.analyze.table import one_line, told
from specscope.analyze.text import render_text
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance, mean_tau
from specscope.trace.history.totals import Undrafted
from specscope.trace.record.params import NO_SEED
from specscope.trace.record.records import Absent
from specscope.trace.record.vocabulary import printable
from specscope.trace.wire.reading import read_capture
from tests.analyze.edits import sample
from tests.analyze.histories import RUN, end, history, info, record, small, step
from tests.analyze.texts import KEPT, TEXTS, page


def report_of(*records, **how):
    return build_report(history(records, **how), source="x")


def rows(report, width=80):
    """First words of each line that is printed -> the cells after them."""
    lines = page(render_text, report, width=width).splitlines()
    return {cells[0]: cells[1:] for line in lines if (cells := re.split(r"\s{2,}", line.strip()))}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_what_it_was(name):
    """Where a change is meant: `python -m tests.analyze.texts`."""
    assert TEXTS[name]() == (KEPT / f"{name}.txt").read_text()


def test_spans_of_other_services_are_counted():
    read = read_capture(KEPT.parent / "vllm" / "spans.jsonl").history
    assert "17 spans of other services skipped" in build_report(read, source="x").warnings
    assert not any("other services" in line for line in build_report(small(), source="x").warnings)


def test_why_steps_drafted_nothing():
    report = build_report(small(), source="x")
    assert report.undrafted == {Undrafted.NO_MATCH: 1}
    assert report.to_dict()["undrafted"] == [{"reason": "no match", "steps": 1, "share": 1.0}]
    run = dataclasses.replace(RUN, drafter="suffix+eagle", costs="66d9d06db774")
    pays = dataclasses.replace(step("a"), sizing="no draft pays")
    off = record(2, [step("a")], speculation=False, speculation_off="set to off")
    found = report_of(record(0, [step("a", "2")]), record(1, [pays, pays]), off, run=run)
    shown = next(table for table in tables.tables(found) if table.title == "Steps that drafted nothing")
    assert shown.rows == [("no draft would pay", "2", "66.7%"), ("drafting was off", "1", "33.3%")]
    assert shown.note == "share: of 3 steps without drafts, which are 75.0% of 4 decode steps."


def test_output_in_loops_and_the_length_without_it():
    novel = [step("a", "2", (), (50, 51), at) for at in range(6)] + [step("b", "2", (0, 1), (60, 61), 62)]
    loop = [step("a", "3", (0, 1, 2), (7, 8, 7), 8)] * 3
    report = report_of(*(record(at, [part]) for at, part in enumerate([*novel, *loop])))
    assert (report.loops.tokens, report.loops.looped) == (21, 12)
    assert (report.pooled.tau, report.loops.rest.tau) == (1 + 11 / 10, 1 + 2 / 7)
    assert report.loop_means == ((12 / 18 + 0) / 2, (1 + 3) / 2)
    assert report.to_dict()["loops"]["mean_acceptance_length_without"] == 1 + 2 / 7
    assert {one.id: one.loops.looped for one in report.requests} == {"a": 12, "b": 0}
    told_rows = tables.acceptance(report).rows
    assert told_rows[1] == ("τ without steps in loops", "1.29", "2.00")
    assert told_rows[2] == ("output tokens in loops", "57.1%", "33.3%")
    assert report.warnings[0].startswith("57.1% of 21 output tokens are in loops")
    assert report.warnings[0].endswith("without those steps τ is 1.29 over 7 drafts")
    plain = build_report(small(), source="x")
    assert not any("loops" in line for line in [*plain.warnings, *(row[0] for row in tables.acceptance(plain).rows)])


def test_preemptions_of_steps_whose_own_spans_are_missing_are_unknown():
    steps = small().steps
    for known, count in ((steps, 1), ([steps[0], dataclasses.replace(steps[1], absent=Absent(engine=True))], None)):
        report = report_of(*known)
        assert report.engine.preempted == report.requests[0].preempted == count
        assert dict(tables.engine(report).rows)["preemptions"] == told(count)
        assert "preempted" not in tables.request_facts(report.requests[0]) or count


def test_runs_with_little_in_them():
    """No drafts, requests whose admission was dropped; and nothing at all."""
    report = report_of(record(0, [step("a"), step("b")]))
    assert (report.pooled.tau, report.pooled.rate, report.means.tau, report.pooled.tokens_per_step) == (*[None] * 3, 1)
    assert by_position(report.pooled) == []
    one = report.requests[0]
    assert (one.prompt, one.params, one.queued_s, one.labels, one.prompt_token_ids) == (None, None, None, {}, [])
    report = build_report(History(), source="nothing.jsonl")
    assert report.pooled == Acceptance()
    assert (report.engine.tokens_per_s, report.means.tau, report.run) == (None, None, None)
    assert (report.phases, report.requests, report.groups) == ([], [], {})
    assert report.warnings == ["the run's header is missing: its model and settings are unknown"]
    assert orjson.loads(orjson.dumps(report.to_dict())) == report.to_dict()


def test_a_capture_that_was_cut():
    whole = small()
    whole.requests["a"].end = None
    whole.lost = 4
    report = build_report(whole, source="x", warnings=["the last line is torn"])
    assert report.warnings[0] == "the last line is torn"
    assert "4 records missing" in report.warnings[1]
    [a, _] = report.requests
    assert (a.finish, a.total_s, a.output) == (None, None, "t40 t23 t41 t43 t44 ")


def test_a_character_split_over_tokens_stands_where_it_was_completed():
    pieces = {3: b"\xe4\xbd", 4: b"\xa0", 5: b"\xe5"}
    [one] = report_of(record(0, [step("a", "2", (0, 1), (3, 4), 5)]), pieces=pieces).requests
    assert (one.pieces, one.output) == (["", "\u4f60", "\ufffd"], "\u4f60\ufffd")


def test_that_a_request_has_no_seed_is_no_group():
    """Of another engine a label says so, beside requests whose seed is a parameter."""
    infos = info("a", "", dict([NO_SEED])), info("b", "", {"kind": "x"}, seed=7)
    parts = [step("a", "1", range(1)), step("b", "1", range(0))]
    assert set(report_of(record(0, parts, admitted=infos)).groups) == {"kind"}


counts = st.integers(0, 4)
draws = st.lists(  # engine steps of (request, length of the chain, accepted)
    st.lists(st.tuples(st.sampled_from("abcd"), counts, counts), max_size=4, unique_by=lambda t: t[0]), max_size=8
)


@settings(max_examples=30)
@given(draws)
def test_the_parts_add_up(steps):
    infos = tuple(info(name, "", {"kind": "left" if name in "ab" else "right"}) for name in "abcd")
    parts = [[step(name, str(k) if k else None, range(min(k, took))) for name, k, took in each] for each in steps]
    report = report_of(*(record(n, each, admitted=() if n else infos) for n, each in enumerate(parts)))
    pooled = report.pooled
    for of_parts in ([g.figures for g in report.groups.get("kind", [])], [r.figures for r in report.requests]):
        total = Acceptance()
        for part in of_parts:
            total.merge(part)
        assert total == pooled
    assert report.means.tau == mean_tau([one.figures for one in report.requests])
    assert sum(p.accepted for p in by_position(report.pooled)) == pooled.accepted
    assert sum(len(one.token_ids) for one in report.requests) == pooled.emitted
    taus = [one.figures.tau for one in report.requests]
    known = [tau for tau in taus if tau is not None]
    assert taus == sorted(known) + [None] * (len(taus) - len(known))
    assert orjson.loads(orjson.dumps(report.to_dict())) == report.to_dict()


def test_what_a_run_does_not_have_is_not_told():
    """Parameters of a run inside another engine are nobody's: each request brings its own. Nor has it our blocks."""
    report = build_report(small(), source="run.jsonl")
    bare = rows(dataclasses.replace(report, run=report.run | {"blocks": 0, "max_context": 512}))
    assert bare["KV cache"] == ["context 512"]
    infos = (info("a", seed=5), info("b", top_k=3), info("c"))  # a seed alone makes no others
    assert report_of(record(0, [step("a")], admitted=infos)).other_params == 1
    warm = {**report.run["params"], "temperature": 0.7, "top_k": 20}
    same = dataclasses.replace(report, requests=[dataclasses.replace(each, params=warm) for each in report.requests])
    same = dataclasses.replace(same, other_params=len(same.requests))
    assert rows(same)["params"] == ["temperature 0.7, top_k 20, seed 0, max_tokens 128"]
    first = dataclasses.replace(same.requests[0], params=warm | {"top_k": 30})
    differing = dataclasses.replace(same, requests=[first, *same.requests[1:]])
    assert rows(differing)["params"] == ["differ between 2 requests"]


FORMS = ("", ",", ",.2f", ",.3f", ",.1f", ".1%")
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)*%?"


def numbers(value):
    """Every number in a JSON value, and every run of digits in its strings."""
    if isinstance(value, dict | list):
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, str):
        yield from re.findall(NUMBER, value)
    elif value is not None and not isinstance(value, bool):
        yield value


@pytest.mark.parametrize("make", [lambda: sample("eagle"), small], ids=["eagle", "small"])
@pytest.mark.parametrize("width", [80, 160])
def test_json_holds_every_number_that_the_text_shows(make, width):
    report = build_report(make(), source="run.jsonl", warnings=["113 bytes left out"])
    left = len(report.answers.rejections.tokens)
    forms = {"1", "0", f"{left}", f"{left - 10}"}  # of the note on vLLM's positions; of `64 more; --top 74`
    for one in numbers(report.to_dict()):
        forms |= {one} if isinstance(one, str) else {f"{one:{form}}" for form in FORMS}
    text = page(render_text, report, width=width)
    found = re.findall(NUMBER, text)
    assert len(found) > 60
    assert [one for one in found if one not in forms] == []
    for name in ("bonus", "forward", "output tokens/s", "corrected"):  # and the scan did see the tables
        assert name in text


def test_text_of_users_is_no_markup_and_moves_no_cursor():
    nasty = info("[red]id", "[bold]x[/bold] \x1b[2J\x07\u202e [/] [link=http://x]", {"[b]kind": "[i]v\x1b[0m"})
    bad = [record(0, [step("[red]id", "1")], admitted=(nasty,), finished=(end(nasty, []),))]
    report = build_report(history(bad), source="[x]\x1b", warnings=["[bold]warn\x1b[1m"])
    text = page(render_text, report, width=160)
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\r"}
    for part in ("[bold]x[/bold] \\x1b[2J\\x07\\u202e [/]", "[red]id", "[i]v\\x1b[0m", "! [bold]warn\\x1b[1m"):
        assert part in text


@settings(max_examples=20)
@given(
    st.sampled_from([60, 80, 100, 140, 200]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_lost(width, text, label):
    one = info("request-with-a-rather-long-name-0123456789", text, {"kind": label, label or "k": "v" * 90})
    only = record(0, [step(one.id, "3", (0,))], admitted=(one,), speculation=False, speculation_off=text)
    out = page(render_text, report_of(only), width=width)
    assert max(map(cell_len, out.split("\n"))) <= width
    assert re.search(r"\s1\s+2\.00\s+33\.3%", out)


def test_the_beginning_that_all_prompts_share_is_left_out_of_the_table():
    start = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n"
    asked = [f"{start}Add 2 and 3", f"{start}Say hello"]
    infos = tuple(info(f"r{n}", prompt) for n, prompt in enumerate(asked))
    report = report_of(record(0, [step(one.id, "1") for one in infos], admitted=infos))
    found = rows(report)
    assert (found["r0"][0], found["r1"][0]) == ("…Add 2 and 3", "…Say hello")
    assert report.requests[0].prompt == asked[0]
    same = (info("r0", start), info("r1", start))
    found = rows(report_of(record(0, [step("r0"), step("r1")], admitted=same)), 160)
    assert found["r0"][0].startswith("<|im_start|>system You are")


def test_one_line():
    assert one_line("a\n  b\tc", 9) == "a b c"
    assert one_line("x" * 10, 5) == "xxxx…"
    assert one_line("a\x00", 9) == "a\\x00"
    assert printable("a\nb\u200d\u202e", keep="\n") == "a\nb\u200d\\u202e"
