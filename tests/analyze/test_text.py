"""The report in a terminal."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from specscope.analyze.report import Report, build_report
from specscope.analyze.table import one_line
from specscope.analyze.text import render_text
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import printable
from specscope.trace.wire.reading import read_capture

from .histories import end, history, info, record, step
from .test_report import small

TRACES = Path(__file__).parents[2] / "traces"


def shown(report: Report, width: int = 80, **options: object) -> str:
    out = io.StringIO()
    render_text(report, Console(file=out, width=width, **options))
    return out.getvalue()


def rows(text: str) -> dict[str, list[str]]:
    """First words of each line -> the cells after them."""
    return {cells[0]: cells[1:] for line in text.splitlines() if (cells := re.split(r"\s{2,}", line.strip()))}


def test_what_a_run_does_not_have_is_not_told() -> None:
    """Parameters of a run inside another engine are nobody's: each request brings its own. Nor has it our blocks."""
    report = build_report(small(), source="run.jsonl")
    assert report.run is not None
    bare = rows(shown(dataclasses.replace(report, run=report.run | {"blocks": 0, "max_context": 512})))
    assert bare["KV cache"] == ["context 512"]
    infos = (info("a", seed=5), info("b", top_k=3), info("c"))  # a seed alone makes no others
    assert build_report(history([record(0, [step("a")], admitted=infos)]), source="x").other_params == 1
    warm = {**report.run["params"], "temperature": 0.7, "top_k": 20}
    same = dataclasses.replace(report, requests=[dataclasses.replace(each, params=warm) for each in report.requests])
    same = dataclasses.replace(same, other_params=len(same.requests))
    assert rows(shown(same))["params"] == ["temperature 0.7, top_k 20, seed 0, max_tokens 128"]
    first = dataclasses.replace(same.requests[0], params=warm | {"top_k": 30})
    assert rows(shown(dataclasses.replace(same, requests=[first, *same.requests[1:]])))["params"] == [
        "differ between 2 requests"
    ]


def test_the_figures_are_there_with_their_names() -> None:
    text = shown(build_report(small(), source="run.jsonl"))
    found = rows(text)
    assert found["source"] == ["run.jsonl"]
    assert found["model"] == ["SmolLM2-135M-Instruct (4b2ae1c)"]
    assert found["params"] == ["temperature 0 (greedy), seed 0, max_tokens 128; others in 1 request"]
    assert found["pooled"] == ["per-request mean"]
    assert found["mean acceptance length τ"] == ["2.50", "2.50"]
    assert found["draft acceptance rate (accepted / nodes)"] == ["54.5%", "53.3%"]
    assert found["accepted / depth"] == ["60.0%", "58.3%"]
    assert found["output tokens per step"] == ["2.00", "2.08"]
    assert found["output tokens/s, wall clock"] == ["31.2"]
    assert found["output tokens/s, inside steps"] == ["69.9"]  # 10 in 143 ms
    assert (found["wall clock, s"], found["inside steps, s"]) == (["0.32"], ["0.14"])
    assert [found[f"peak of {name}"] for name in ("running requests", "waiting requests")] == [["2"], ["1"]]
    assert (found["peak of KV blocks in use"], found["preemptions"], found["engine steps"]) == (["25.0%"], ["1"], ["4"])
    assert "11 tokens drafted, 6 accepted, 11 committed, 10 output." in " ".join(text.split())
    found |= rows(text.partition("Final tokens")[0])  # another table by depth comes later
    assert found["depth"] == ["per-position", "corrected", "conditional", "accepted"]
    assert found["1"] == ["75.0% of 4", "75.0% of 4", "75.0% of 4", "3"]
    assert found["2"] == ["50.0% of 4", "50.0% of 4", "66.7% of 3", "2"]
    assert found["3"] == ["25.0% of 4", "50.0% of 2", "100.0% of 1", "1"]
    kinds = {"bonus": ["2", "40.0%"], "recovered": ["2", "40.0%"], "target": ["1", "20.0%"]}
    assert {kind: found[kind][:2] for kind in kinds} == kinds
    assert found["forward"] == ["4", "15.00", "0.100", "69.9%"]
    assert found["chat"] == ["1", "2", "2.00", "2.00", "40.0%", "1.67"]
    assert found["code"] == ["1", "2", "3.00", "3.00", "66.7%", "2.50"]
    assert found["a"] == ["Say hello", "length limit", "5", "2", "2.00", "40.0%"]
    assert found["steps without speculation: batch above 8"] == ["1"]


def test_nothing_is_shown_as_a_dash() -> None:
    found = rows(shown(build_report(History(), source="empty.jsonl")))
    assert found["mean acceptance length τ"] == ["–", "–"]
    assert found["bonus"][:2] == ["0", "–"]
    assert found["! the run's header is missing: its model and settings are unknown"] == []


NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)*%?"


def numbers(value: object) -> Iterator[object]:
    """Every number in a JSON value, and every run of digits in its strings."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers(key)
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, str):
        yield from re.findall(NUMBER, value)
    elif value is not None and not isinstance(value, bool):
        yield value


def eagle() -> History:
    return read_capture(TRACES / "eagle.jsonl").history


@pytest.mark.parametrize("make", [eagle, small])
@pytest.mark.parametrize("width", [80, 160])
def test_json_holds_every_number_that_the_text_shows(make, width: int) -> None:
    report = build_report(make(), source="run.jsonl", warnings=["113 bytes left out"])
    left = len(report.answers.rejections.tokens)
    forms = {"1", "0", f"{left}", f"{left - 10}"}  # of the note on vLLM's positions; of `64 more; --top 74`
    for one in numbers(report.to_dict()):
        forms |= (
            {one}
            if isinstance(one, str)
            else {f"{one}", f"{one:,}", f"{one:,.2f}", f"{one:,.3f}", f"{one:,.1f}", f"{one:.1%}"}
        )
    text = shown(report, width)
    found = re.findall(NUMBER, text)
    assert len(found) > 60
    assert [one for one in found if one not in forms] == []
    for name in ("bonus", "forward", "output tokens/s", "corrected"):  # and the scan did see the tables
        assert name in text


def test_text_of_users_is_no_markup_and_moves_no_cursor() -> None:
    nasty = info("[red]id", "[bold]x[/bold] \x1b[2J\x07\u202e [/] [link=http://x]", {"[b]kind": "[i]v\x1b[0m"})
    bad = [record(0, [step("[red]id", "1")], admitted=(nasty,), finished=(end(nasty, []),))]
    text = shown(build_report(history(bad), source="[x]\x1b", warnings=["[bold]warn\x1b[1m"]), 160)
    assert not set(text) & {"\x1b", "\x07", "\u202e", "\r"}
    assert "[bold]x[/bold] \\x1b[2J\\x07\\u202e [/]" in text
    assert "[red]id" in text
    assert "[i]v\\x1b[0m" in text
    assert "! [bold]warn\\x1b[1m" in text


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from([60, 80, 100, 140, 200]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
)
def test_no_line_is_wider_than_the_terminal_and_no_figure_is_lost(width: int, text: str, label: str) -> None:
    one = info("request-with-a-rather-long-name-0123456789", text, {"kind": label, label or "k": "v" * 90})
    whole = history([record(0, [step(one.id, "3", (0,))], admitted=(one,), speculation=False, speculation_off=text)])
    out = shown(build_report(whole, source="x"), width)
    assert max(map(cell_len, out.split("\n"))) <= width
    assert re.search(r"\s1\s+2\.00\s+33\.3%", out)


def test_the_beginning_that_all_prompts_share_is_left_out_of_the_table() -> None:
    start = "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\n"
    asked = [f"{start}Add 2 and 3", f"{start}Say hello"]
    infos = tuple(info(f"r{n}", prompt) for n, prompt in enumerate(asked))
    whole = history([record(0, [step(one.id, "1") for one in infos], admitted=infos)])
    report = build_report(whole, source="x")
    found = rows(shown(report))
    assert (found["r0"][0], found["r1"][0]) == ("…Add 2 and 3", "…Say hello")
    assert report.requests[0].prompt == asked[0]
    same = (info("r0", start), info("r1", start))
    found = rows(shown(build_report(history([record(0, [step("r0"), step("r1")], admitted=same)]), source="x"), 160))
    assert found["r0"][0].startswith("<|im_start|>system You are")


def test_one_line() -> None:
    assert one_line("a\n  b\tc", 9) == "a b c"
    assert one_line("x" * 10, 5) == "xxxx…"
    assert one_line("a\x00", 9) == "a\\x00"
    assert printable("a\nb\u200d\u202e", keep="\n") == "a\nb\u200d\\u202e"
