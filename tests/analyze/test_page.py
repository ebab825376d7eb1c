"""The report as a page: it parses, needs nothing else, and shows text as text."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.analyze import tables
from specscope.analyze.page import HALF_PAGE, spans
from specscope.analyze.page import render_html as render
from specscope.analyze.plots import accepted_per_draft, plots
from specscope.analyze.report import Report, build_report, several
from specscope.trace.history.history import History
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.reading import read_capture
from tests.bad_inputs import PLANTED
from tests.support.commands import run_here

from .histories import RUN, demo, end, history, info, record, step
from .test_report import small

TRACES = Path(__file__).parents[2] / "traces"
VOID = {"meta", "br", "hr", "img", "link", "input"}


SAMPLED = str(Path(PLANTED).with_name("sampled.jsonl"))


def render_html(*reports: Report) -> str:
    return render(several(reports))


class Page(HTMLParser):
    """Tags, attributes and text of a page; a tag that is not closed, or closed twice, is an error."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[tuple[str, str]] = []  # (innermost tag, text)
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append((self.open[-1] if self.open else "", data))

    @property
    def words(self) -> str:
        return " ".join(text for tag, text in self.text if tag != "style")


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(build_report(demo(), source="run.jsonl", warnings=["torn & <cut>"]))


def test_the_page_parses_in_light_and_dark_and_needs_nothing_from_elsewhere(html: str) -> None:
    page = Page(html)
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        if name in {"src", "href", "xlink:href", "action", "srcset", "data"}:
            assert re.fullmatch(r"#\w+", value), (tag, name, value)
        assert urlsplit(value).scheme not in {"http", "https"}
        assert "http://" not in value
        assert "https://" not in value
    styles = " ".join(text for tag, text in page.text if tag == "style")
    assert "url(" not in styles
    assert "@import" not in styles
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert "currentColor" in html
    assert "#010203" not in html  # the ink that matplotlib was given
    assert not re.search(r"fill: ?#(000000|ffffff)", html)


def test_it_shows_what_the_text_shows(html: str) -> None:
    words = Page(html).words
    for part in ("mean acceptance length", "1.88", "58.2%", "recovered", "forward", "SmolLM2-135M-Instruct", "By kind"):
        assert part in words
    assert "torn & <cut>" in words
    assert Page(html).tags["svg"] == 4
    assert Page(html).tags["details"] == 12


def test_text_of_models_and_users_is_escaped() -> None:
    bad = "<script>alert(1)</script><img src=x onerror=y>\"'&amp; https://evil.test \x1b[0m"
    run = dataclasses.replace(RUN, target=bad, drafter=bad, versions={bad: bad})
    one = info(bad, bad, {bad: bad}, stop=(bad,))
    pieces = {7: bad.encode(), 8: b"\xff<b>"}
    whole = history(
        [
            record(0, [step(bad, "1", (0,), (7,), 8)], admitted=(one,), speculation=False, speculation_off=bad),
            record(1, [], finished=(end(one, [7, 8], stop=bad, error=bad),)),
        ],
        run,
        pieces,
    )
    page = Page(render_html(build_report(whole, source=bad, warnings=[bad])))
    assert not {"script", "img", "b"} & (set(page.tags) - {"b"})
    assert page.tags["b"] == 5  # of the headline
    assert page.words.count("<script>alert(1)</script>") > 8
    assert "\x1b" not in page.words
    assert not [value for _, name, value in page.attributes if "evil" in value and name != "title"]


def test_output_is_coloured_by_origin() -> None:
    report = build_report(small(), source="x")
    assert spans(report.requests[0]) == [
        ("target", "t40 "),
        ("recovered", "t23 "),
        ("accepted", "t41 t43 "),
        ("bonus", "t44 "),
    ]
    html = render_html(report)
    assert '<span class="accepted" title="accepted">t41 t43 </span>' in html


@pytest.mark.parametrize(
    "whole",
    [
        History(),
        history([]),
        history([record(0, [step("a", prefill=True)])]),
        history([record(0, [step("a")])]),
        history([record(0, [step("a", "1")], (0, 0, 0, 0, 0))]),
    ],
    ids=["nothing", "no steps", "prefill only", "no drafts", "no time"],
)
def test_runs_with_little_in_them(whole: History) -> None:
    assert "–" in Page(render_html(build_report(whole, source="x"))).words


def test_a_run_without_text() -> None:
    bare = info("a")
    whole = history(
        [record(0, [step("a", "1")], admitted=(bare,))], dataclasses.replace(RUN, privacy=Privacy.NO_TEXT), {}
    )
    words = Page(render_html(build_report(whole, source="x"))).words
    assert "The capture holds no text." in words
    assert "counts [1, 0]" in words


def test_plots_draw_the_figures() -> None:
    drawn = dict(plots(build_report(small(), source="x")))
    assert list(drawn) == [
        "Acceptance by depth",
        "Accepted tokens per draft",
        "Mean acceptance length by request, worst first",
        "Time by phase",
    ]
    assert drawn["Acceptance by depth"].count("fill: #3f7fbf") == 3 + 1  # three depths and the legend
    assert "conditional" in drawn["Acceptance by depth"]
    assert plots(build_report(History(), source="x")) == []


@given(st.lists(st.integers(0, 5), max_size=30))
def test_accepted_per_draft(accepted: list[int]) -> None:
    depth = max(accepted, default=0)
    accepted_at = [sum(1 for took in accepted if took > d) for d in range(depth)]
    counts = accepted_per_draft(accepted_at, len(accepted))
    assert counts == [accepted.count(k) for k in range(depth + 1)]


def test_without_matplotlib_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module, words in (("plots", ["report", PLANTED]), ("compare.plots", ["compare", PLANTED, SAMPLED])):
        monkeypatch.delitem(sys.modules, f"specscope.analyze.{module}", raising=False)
        code, _, err = run_here([*words, "--html", str(tmp_path / "page.html")])
        assert (code, err) == (2, "specscope: error: this needs matplotlib: pip install 'specscope[html]'\n")


def test_a_page_of_several_captures() -> None:
    """Pooled figures first, then each; requests of one name are two, and no id comes twice."""
    reports = [
        build_report(read_capture(TRACES / f"{name}.jsonl").history, source=name) for name in ("eagle", "sampled")
    ]
    html = render_html(*reports)
    page = Page(html)
    assert html.index("Over all captures") < html.index("Capture 1 of 2") < html.index("Capture 2 of 2")
    assert page.tags["details"] == sum(len(report.requests) for report in reports)
    assert page.tags["svg"] == sum(len(plots(report)) for report in reports)
    ids = Counter(value for _, name, value in page.attributes if name == "id")
    assert set(ids.values()) == {1}
    used = {value[1:] for _, name, value in page.attributes if name == "xlink:href"}
    assert used
    assert used | set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    assert html == render_html(*reports)
    assert "the captures differ in settings" in page.words
    assert "Over all captures" not in render_html(reports[0])


def test_plots_come_first_and_wide_tables_have_the_whole_width() -> None:
    report = build_report(read_capture(TRACES / "sampled.jsonl").history, source="run.jsonl")
    html = render_html(report)
    assert html.rindex("<svg") < html.index("<table")
    sections = re.findall(r'<section( class="wide")?>\s*<h2>([^<]*)</h2>', html[html.rindex("<svg") :])
    wide = {unescape(title): bool(kind) for kind, title in sections}
    assert wide["Per position"] is False
    assert wide["Drafted tokens rejected most, and what the target took"] is True
    for table in [*tables.tables(report), *tables.questions(report, 20)]:
        assert wide[table.title] is (table.width > HALF_PAGE), table.title


def test_a_legend_is_one_column_inside_the_picture() -> None:
    """Also where its labels are long: the calibration's was cut, and left the plot a quarter of the width."""
    report = build_report(read_capture(TRACES / "sampled.jsonl").history, source="run.jsonl")
    drawn = dict(plots(report))
    for title, labels in (
        ("Acceptance by depth", ("per-position", "corrected", "conditional")),
        ("The drafter's probability against acceptance", ("calibrated", "target p, by q", "accepted, by q")),
    ):
        place = re.compile(r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')
        texts = {text: (float(x), float(y)) for x, y, text in place.findall(drawn[title])}
        across, down = zip(*(texts[label] for label in labels), strict=True)
        assert len(set(across)) == 1
        assert list(down) == sorted(set(down))
        assert across[0] > 200  # of 403 points: at the right of the plot
        assert max(x for x, _ in texts.values()) < 403
