"""A comparison as text shows it all, and text of models and users stays text."""

from __future__ import annotations

import dataclasses
import io

from rich.console import Console

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.failif import parse
from specscope.analyze.compare.side import from_history
from specscope.analyze.compare.tables import render_text

from .runs import Made, make, side

SHOWN = ["Configuration", "Where outputs part", "At equal contexts", "Figures", "--fail-if"]
SHOWN += ["r3 parts at output token", "the coins differ", "24 by prompt, parameters and seed", "tau", "not hit"]


def text_of(comparison, width: int = 120) -> str:
    out = io.StringIO()
    render_text(comparison, Console(file=out, width=width))
    return out.getvalue()


def test_text_shows_all_parts_in_any_width():
    a = side(seed=1, evidence=True)
    at = int(a.place[a.requests[3].first + 4])
    b = side(seed=1, evidence=True, plant={("r3", at): "coin", ("r4", 0): "p"})
    found = compare(a, b, parse("tau drops > 50%"))
    text = text_of(found)
    for part in SHOWN:
        assert part in text
    assert found.summary in " ".join(text.split())
    for width in (60, 80, 200):
        assert max(map(len, text_of(found, width).splitlines())) <= width


def test_text_of_models_and_users_stays_text():
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
    text = text_of(found)
    assert "\x1b" not in text
    assert "[bold]x[/bold]" in text.replace("\n", "")
