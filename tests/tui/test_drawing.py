"""The pure parts: lines, columns, wrapping, and records that are odd; a node's view, and how one is asked for."""

import dataclasses
import math
import re
from typing import get_args

import numpy as np
import pytest
from rich.cells import cell_len

from specscope.debug.answers import Answer, LookRefused
from specscope.debug.viewer import Viewer
from specscope.debug.views import DistributionView, TopToken
from specscope.trace.history import place
from specscope.trace.record.records import RequestStep
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from specscope.tui.palette import DARK, LIGHT, style
from specscope.tui.screens.step_view import NodesPanel, PlacePanel, StepScreen
from specscope.tui.text import Ink, bar, cut, fit, left, line_width, probability, right, spread
from specscope.tui.widgets.node_view import node_view_lines
from specscope.tui.widgets.output import OutputPanel, Wrapper
from specscope.tui.widgets.rates import columns
from specscope.tui.widgets.tree_lines import tree_lines
from tests.support.commands import said
from tests.support.samples import EAGLE

from .sample import live, node_view, notes, replay, running, text_of, told, until


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1, "1"), (0.5, "0.500"), (2e-5, "2e-05"), (0.99999, ">.999"), (1e-45, "1e-45"), (float("nan"), "nan")],
)
def test_probabilities_take_five_cells_and_do_not_lie(value, text):
    assert probability(value) == text
    assert len(text) <= 5


async def test_what_is_missing_of_an_output_is_marked(tmp_path):
    part = str(tmp_path / "part.jsonl")
    said(["export", f"{EAGLE}#r2@2:4", "-o", part])
    async with running(Viewer(history=read_capture(part).history)) as (app, pilot):
        await pilot.press("end")
        shown = text_of(app.screen.query_one(OutputPanel))
        assert "… colors of autumn are a natural" in " ".join(shown.split())
        assert "42 tokens in missing steps" in shown


def test_cells_are_counted_not_characters():
    assert right("日本", 5) == " 日本"
    assert left("日本語", 5) == "日本…"
    assert cut("abcdef", 4) == "abc…"
    assert cut("abc", 0) == ""
    assert bar(0.5, 4) == "██"
    assert bar(7, 2) == "██"


def test_fit_keeps_what_matters_most_in_order():
    parts = [(2, [("aaaa", "text")]), (0, [("bb", "text")]), (1, [("cc", "text")])]
    assert "".join(text for text, _ in fit(parts, 20)) == "aaaa  bb  cc"
    assert "".join(text for text, _ in fit(parts, 8)) == "bb  cc"
    assert "".join(text for text, _ in fit(parts, 1)) == "…"


def steps() -> list[RequestStep]:
    return [part for record in replay().history.steps for part in record.requests if part.verdict is not None]


def test_what_is_known_of_all_nodes_is_read_once_for_a_tree(monkeypatch):
    """It was read for each node anew: of 256 nodes that took 13 ms of every frame."""
    largest = max(steps(), key=lambda step: len(step.tree))
    read = []
    real = place.draft_ps
    monkeypatch.setattr(place, "draft_ps", lambda step: read.append(step) or real(step))
    assert len(largest.tree) > 3
    tree_lines(largest, largest.verdict, replay().history.vocabulary, 160)
    assert read == [largest]


def test_the_numbers_of_a_node_are_those_of_the_verdict():
    step = next(step for step in steps() if len(step.tree) == 5 and step.verdict and 0 < step.verdict.accepted < 5)
    head, lines, _ = tree_lines(step, step.verdict, replay().history.vocabulary, 72)
    assert head[0][0].split() == ["p", "q", "coin", "a", "residual"]
    v = step.verdict
    want = [v.p[0], step.tree.q[0], v.coin[0]]
    assert lines[0][-1][0].split()[:3] == [probability(float(value)) for value in want]
    assert "<" in lines[0][-1][0]
    refused = told(lines[v.accepted : v.accepted + 1])
    assert "✗" in refused
    assert "≥" in refused


def test_plot_columns():
    assert columns([1, 2, None, 3], 2, 3, 4) == ["   █", "▁█ █"]
    assert columns([1, 2, None, 3], 2, 3, 9) == ["      ███", "▁▁██  ███"]
    assert columns([], 2, 3, 0) == ["", ""]


@pytest.mark.parametrize(("count", "span"), [(1, 1), (3, 7), (26, 38), (5, 60), (17, 17)])
def test_columns_fill_their_span(count, span):
    wide = spread(count, span)
    assert sum(wide) == span
    assert max(wide) - min(wide) <= 1


@pytest.mark.parametrize("width", [20, 40, 70, 110, 160])
def test_a_tree_has_a_line_for_each_node_no_word_is_cut_and_decimal_points_stand_in_line(width):
    vocabulary = replay().history.vocabulary
    for step in steps():
        head, lines, order = tree_lines(step, step.verdict, vocabulary, width)
        final = order.index(len(step.tree))
        assert sorted(order) == list(range(len(step.tree) + 1))
        assert {line_width(line) for line in [head, *lines]} == {line_width(head)}
        assert line_width(head) <= width
        assert "»" in "".join(text for text, _ in lines[final])
        kind = step.verdict.kind.value
        said = "".join(text for text, _ in lines[final])
        assert kind in said or not re.search(rf"\b{kind[0]}[{kind[1:]}]*…", said)
        start = "".join(text for text, _ in head).find(" q ") + 1
        numbers = ["".join(text for text, _ in line)[start : start + 5] for line in lines] if start else []
        assert {text[1] for text in numbers if text.strip()} <= set(" .")  # `1    ` stands below `0.500`
        assert not any(text.startswith(" ") for text in numbers if text.strip())


def wrapped(wrapper: Wrapper) -> list[str]:
    return told(wrapper.lines()).splitlines()


def test_wrapping_breaks_at_spaces_and_within_long_words():
    wrapper = Wrapper(10)
    for piece in (b"one two", b" three", b" fourteencharacters", b"\n\nend"):
        wrapper.feed(piece, "accepted")
    assert [line.rstrip() for line in wrapped(wrapper)] == ["one two", "three", "fourteench", "aracters", "", "end"]
    wide = Wrapper(5)
    wide.feed("日本語".encode(), "bonus")
    assert wrapped(wide) == ["日本", "語"]
    words = b"the quick brown fox jumps over the lazy dog again and again"
    grown, whole = Wrapper(13), Wrapper(13)
    for at in range(len(words)):
        grown.feed(words[at : at + 1], "accepted")
        grown.lines()
    whole.feed(words, "accepted")
    assert grown.lines() == whole.lines()  # as it grows, or at once
    assert all(cell_len(line) <= 13 for line in wrapped(whole))


def test_half_characters_are_joined_and_control_characters_do_not_reach_the_terminal():
    """A character has the ink of its last token."""
    wrapper = Wrapper(20)
    wrapper.feed("é".encode()[:1], "accepted")
    wrapper.feed("é".encode()[1:], "recovered")
    wrapper.feed(b"\xff", "bonus")
    assert wrapper.lines() == [[("é", "recovered"), ("\ufffd", "bonus")]]
    wrapper = Wrapper(40)
    wrapper.feed(b"a\x1b[31mb\x07\x9b", "accepted")
    wrapper.note("\u202e", "prompt")
    assert all(char.isprintable() for line in wrapped(wrapper) for char in line)


async def test_a_panel_that_fails_says_so_and_recovers():
    viewer = replay(5)
    broken = viewer.history.requests["r0"].steps[5]
    bad = dataclasses.replace(broken.verdict, outcome=np.zeros(0, np.uint8)) if broken.verdict else None
    step = viewer.history.steps[viewer.history.requests["r0"].at(broken.index)]
    others = [part for part in step.requests if part.request != "r0"]
    viewer.history.truncate(viewer.history.position_of(step.step) + 1)
    viewer.history.replace_last(dataclasses.replace(step, requests=[dataclasses.replace(broken, verdict=bad), *others]))
    async with running(viewer) as (app, pilot):
        assert "cannot draw this" in text_of(app.query_one("#tree"))
        await pilot.press(",")
        assert "cannot draw this" not in text_of(app.query_one("#tree"))


async def test_only_lines_that_changed_are_redrawn(monkeypatch):
    async with running(replay(5)) as (app, _):
        drawn: list[str] = []
        for panel in app._panels:
            real = panel.draw
            monkeypatch.setattr(panel, "draw", lambda *a, real=real, id=panel.id: drawn.append(id) or real(*a))
        app.look()
        assert drawn == []  # nothing moved
        app.standing.pooled = False
        app.look()
        assert drawn == ["rates", "lengths"]


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [DARK, LIGHT], ids=lambda theme: theme.name)
def test_text_can_be_read_on_every_background(theme):
    """WCAG AA, 4.5, for all inks but those of lines and bars."""
    for ink in get_args(Ink):
        if ink in ("rail", "bar"):
            continue
        colour = style(ink, theme.dark).color
        for ground in (theme.background, theme.panel, theme.variables["row"]):
            bright, dark = sorted((luminance(colour.name), luminance(ground)), reverse=True)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5, (ink, colour.name, ground)


NAMES = ("target, raw", "target, as sampled", "drafter, raw", "drafter, as sampled")


def vocabulary() -> Vocabulary:
    return replay().history.vocabulary


@pytest.mark.parametrize("width", [24, 55, 97, 200])
@pytest.mark.parametrize("height", [8, 20, 58])
def test_all_four_are_there_at_any_size(width, height):
    view = node_view(notes=("the judged p was 0.4, this one says 0.47",))
    lines = node_view_lines(view, vocabulary(), width, height)
    assert max(map(line_width, lines)) <= width
    said = told(lines)
    for name in NAMES:
        assert said.count(name) == 1
    assert "KL(target‖drafter)" in said
    assert "! the judged p was" in said


def test_tokens_are_whole_numbers_are_the_views_and_bars_as_long_as_the_probability():
    words = Vocabulary({at: f" extraordinary{at}".encode() for at in range(100)})
    view = node_view()
    said = told(node_view_lines(view, words, 97, 58))
    for column in (view.raw, view.p, view.draft, view.q):
        assert f"{probability(column.prob)}, rank {column.rank}" in said
        for top in column.top[:8]:
            assert f"␣extraordinary{top.token} " in said
            assert probability(top.prob) in said
    lines = node_view_lines(view, vocabulary(), 50, 60)
    line = next(line for line in lines if "0.800" in told([line]) and "rank" not in told([line]))
    full = next(text for text, ink in line if ink == "bonus")
    track = len(full) + len(line[line.index((full, "bonus")) + 1][0])
    assert full.count("█") == pytest.approx(0.8 * track, abs=1)


def test_what_is_not_there_says_why():
    bare = node_view(draft=None, q=None, kl=None, tv=None, choice_rank=None)
    said = told(node_view_lines(bare, vocabulary(), 60, 40))
    assert "deterministic" in said
    assert "no draft model" in said
    assert "KL" not in said
    outside = DistributionView((TopToken(1, 1.0),), 0.0, 0.0, None, outside=True)
    none = DistributionView((TopToken(1, 1.0),), 0.0, 0.0, None)
    said = told(node_view_lines(node_view(draft=outside, p=none, kl=math.inf), vocabulary(), 60, 40))
    assert "outside the draft" in said
    assert "▸ 0: excluded" in said
    assert "∞" in said


@pytest.mark.parametrize("computed", [False, True])
def test_rules_say_what_they_removed_and_whether_the_numbers_are_the_steps_own(computed):
    said = told(node_view_lines(node_view(computed=computed), vocabulary(), 60, 40))
    assert ("recomputed in" in said) == computed
    assert ("the tensors that the step used" in said) == (not computed)
    assert "top-k 20 removes 49,132 tokens, 0.081 of the mass" in said
    assert "top-p 0.95 removes 1 token, 4e-05 of the mass" in said


@pytest.mark.parametrize("status", ["paused", "running"])
async def test_enter_shows_the_distributions_wherever_the_engine_is(status):
    viewer, engine = live(12, status)
    async with running(viewer) as (app, pilot):
        await pilot.press(",", ",", ",", "j", "d", "up", "enter")
        place, step = app.screen.query_one(PlacePanel), app.screen.last.history.steps[app.screen.last.at].step
        assert engine.looked == [(step, "r1", app.screen.query_one(NodesPanel).node)]
        await shown(pilot, place)
        assert engine.lines == []


async def shown(pilot, place: PlacePanel) -> None:
    await until(pilot, lambda: NAMES[0] in text_of(place))
    assert all(name in text_of(place) for name in NAMES)


async def test_an_answer_is_shown_for_the_node_that_was_asked_about_and_no_other():
    viewer, engine = live(12, "paused")
    engine.answers = False
    async with running(viewer) as (app, pilot):
        await pilot.press("j", "d", "enter")
        place = app.screen.query_one(PlacePanel)
        await pilot.pause()
        assert "asking the engine" in text_of(place)
        step, name, node = engine.looked[-1]
        engine.node_view = node_view(name, step + 1, node)  # of another step
        app.look()
        assert NAMES[0] not in text_of(place)
        engine.node_view = node_view(name, step, node)
        await shown(pilot, place)
        await pilot.press("down")
        assert NAMES[0] not in text_of(place)
        viewer.history.rewinds += 1  # the step was taken back: what was answered is not of the one that came instead
        await pilot.press("up")
        assert NAMES[0] not in text_of(place)


async def test_a_refusal_stands_where_the_answer_would():
    viewer, engine = live(12, "paused")
    engine.answers = False
    async with running(viewer) as (app, pilot):
        await pilot.press("j", "d", "enter")
        place = app.screen.query_one(PlacePanel)
        step, name, node = engine.looked[-1]
        engine.news.append(Answer("where", "step 3  r1@2"))  # nothing that only comes meanwhile is a refusal
        engine.news.append(LookRefused(step - 1, name, node, "another step is gone"))
        await until(pilot, lambda: not engine.news)  # they were heard
        assert "asking" in text_of(place)
        engine.news.append(LookRefused(step, name, node, "r1 is gone: its step cannot be computed again"))
        await until(pilot, lambda: "is gone" in text_of(place))
        assert "r1 is gone" in text_of(place)
        assert "asking" not in text_of(place)


async def test_over_a_capture_the_screen_says_so_and_shows_what_the_record_has():
    async with running(replay(14)) as (app, pilot):
        await pilot.press("j", "d", "enter")
        assert isinstance(app.screen, StepScreen)
        place = app.screen.query_one(PlacePanel)
        said = " ".join(text_of(place).split())
        assert "distributions need a live engine" in said
        assert "rejected" in said or "accepted" in said
        assert not notes(app)


@pytest.mark.parametrize("size", [(60, 20), (80, 24)])
async def test_where_there_is_no_room_beside_the_node_it_stands_below(size):
    viewer, _ = live(12, "paused")
    async with running(viewer, size) as (app, pilot):
        await pilot.press("j", "d", "enter")
        panel = app.screen.query_one("#node")
        await until(pilot, lambda: NAMES[0] in text_of(panel))
        assert all(name in text_of(panel) for name in NAMES)
        top = "".join(text for text, _ in panel.sheet.lines[panel.scroll_offset.y])
        assert "KL(target" in top
