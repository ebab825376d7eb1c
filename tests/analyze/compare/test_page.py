"""A comparison as text and as a page: both show it all, and text of models and users stays text."""

from __future__ import annotations

import dataclasses
import io
import re
from urllib.parse import urlsplit

from rich.console import Console

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.failif import parse
from specscope.analyze.compare.page import render_html, render_text
from specscope.analyze.compare.side import from_history
from tests.analyze.test_page import Page

from .runs import Made, make, side

SHOWN = ["Configuration", "Where outputs part", "At equal contexts", "Figures", "Calibration of q", "--fail-if"]
SHOWN += ["r3 parts at output token", "the coins differ", "24 by prompt, parameters and seed", "tau", "not hit"]


def text_of(comparison, width: int = 120) -> str:
    out = io.StringIO()
    render_text(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_text_and_page_show_all_parts_and_need_nothing_from_elsewhere():
    a = side(seed=1, evidence=True)
    at = int(a.place[a.requests[3].first + 4])
    b = side(seed=1, evidence=True, plant={("r3", at): "coin", ("r4", 0): "p"})
    found = compare(a, b, parse("tau drops > 50%"))
    text, html = text_of(found), render_html(found)
    page = Page(html)
    for part in SHOWN:
        assert part in text
        assert part in page.words
    assert page.tags["svg"] == 5
    assert found.summary in " ".join(text.split())
    assert not {"script", "link", "img", "iframe", "object", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), tag
        assert urlsplit(value).scheme not in {"http", "https"}
    assert "default-src 'none'" in html
    assert "prefers-color-scheme: dark" in html
    assert "#010203" not in html
    used = set(re.findall(r"url\(#([^)]*)\)", html))
    assert used <= {value for _, name, value in page.attributes if name == "id"}
    for width in (60, 80, 200):
        assert max(map(len, text_of(found, width).splitlines())) <= width


def test_text_of_models_and_users_is_escaped():
    bad = "<script>alert(1)</script>[bold]x[/bold] \x1b[31m https://evil.test"
    run = dataclasses.replace(side(requests=1).captures[0].run, target=bad, drafter=bad, versions={bad: bad}, tree=bad)
    history = make(Made(seed=1, requests=4, run=run))
    history.vocabulary.pieces.update({token: bad.encode() for token in range(12)})
    for request in history.requests.values():
        request.info = dataclasses.replace(request.info, prompt=bad, title=bad, labels={bad: bad})
    history.steps[:] = [
        dataclasses.replace(step, admitted=tuple(history.requests[info.id].info for info in step.admitted))
        for step in history.steps
    ]
    other = from_history(make(Made(seed=1, requests=4, plant={("r1", 0): "coin"})), bad)
    found = compare(from_history(history, bad, [bad]), other)
    page, text = Page(render_html(found)), text_of(found)
    assert not {"script", "img"} & set(page.tags)
    assert page.words.count("<script>alert(1)</script>") > 4
    assert "\x1b" not in page.words + text
    assert not [value for _, _, value in page.attributes if "evil" in value]
    assert "[bold]x[/bold]" in text.replace("\n", "")
