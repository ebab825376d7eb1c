"""The screens of a comparison: its list of pairs, and both trees where a pair parts."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cache

import pytest
from rich.cells import cell_len

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.result import Cause
from specscope.cli.compare import compared
from specscope.tui.ask import Ask
from specscope.tui.compare import CompareApp
from specscope.tui.compared import Beside, Compared
from specscope.tui.screens.compare_help import compare_help_lines
from specscope.tui.screens.compare_view import CompareScreen, PairsPanel
from specscope.tui.screens.help import HelpLines, HelpScreen
from specscope.tui.screens.parting_view import PartingScreen, PlacesPanel, TreePanelOf
from specscope.tui.settings import Settings
from tests.analyze.compare.runs import side

SIZES = [(80, 24), (120, 40), (200, 60)]


def names(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


@cache
def sample(*, seed: int = 1, planted: bool = True) -> Compared:
    """Two runs of which two pairs part; with another seed, all do."""
    a = side(seed=1, requests=8)
    places = {name: int(a.place[a.requests[at].first + 3]) for name, at in (("r3", 3), ("r5", 5))}
    plant = {("r3", places["r3"]): "coin", ("r5", places["r5"]): "verdict"} if planted else {}
    b = side(seed=seed, requests=8, plant=plant)
    return compared(a, b, compare(a, b))


@asynccontextmanager
async def running(shown: Compared, size: tuple[int, int] = (120, 40)):
    app = CompareApp(shown)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        yield app, pilot


def text_of(panel) -> str:
    return "\n".join("".join(text for text, _ in line) for line in panel.sheet.lines)


@pytest.mark.parametrize("size", SIZES, ids=names)
def test_pairs(snap_compare, size):
    assert snap_compare(CompareApp(sample()), terminal_size=size, press=["n"])


@pytest.mark.parametrize("size", SIZES, ids=names)
def test_parting(snap_compare, size):
    assert snap_compare(CompareApp(sample()), terminal_size=size, press=["n", "enter"])


def test_light(snap_compare):
    app = CompareApp(sample(), Settings(theme="light"))
    assert snap_compare(app, terminal_size=(120, 40), press=["n", "enter"])


async def test_the_list_says_where_pairs_part_and_why():
    async with running(sample()) as (app, _):
        assert isinstance(app.screen, CompareScreen)
        lines = text_of(app.screen.query_one(PairsPanel)).splitlines()
        rows = {line.split()[0]: line for line in lines[1:]}
        assert "coin" in rows["r3"]
        assert "verdict" in rows["r5"]
        assert "same text" in rows["r1"]
        said = text_of(app.screen.query_one("#verdict"))
        assert said.startswith("different")
        assert "made.jsonl" in said
        assert text_of(app.screen.query_one("#configuration")).startswith("requests in a step, mean")


async def test_n_goes_from_parting_to_parting():
    async with running(sample()) as (app, pilot):
        panel = app.screen.query_one(PairsPanel)
        await pilot.press("n")
        assert panel.item.a == "r3"
        await pilot.press("n", "n")
        assert panel.item.a == "r5"  # there is none after it
        await pilot.press("N")
        assert panel.item.a == "r3"
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, PartingScreen)
        places = app.screen.query_one(PlacesPanel)
        assert places.pair.a == "r3"
        await pilot.press("n")
        assert (places.pair.a, panel.item.a) == ("r5", "r5")
        assert "the verdict is another" in text_of(places)
        await pilot.press("escape")
        assert isinstance(app.screen, CompareScreen)


async def test_both_trees_are_those_of_the_place_where_they_part():
    shown = sample()
    async with running(shown) as (app, pilot):
        await pilot.press("n", "enter")
        await pilot.pause()
        places = app.screen.query_one(PlacesPanel)
        trees = app.screen.query(TreePanelOf)
        for panel, steps, at in zip(trees, shown.steps(places.pair), (0, 1), strict=True):
            begins = places.beside.part(at, places.pair.at)
            step = steps[begins]
            said = text_of(panel)
            assert f"r3@{step.index}" in "".join(text for text, _ in panel.sheet.title)
            for token in step.tree.token:
                assert shown.vocabularies[at].show(int(token)) in said
        assert "»" in text_of(places)
        before = text_of(trees.first())
        await pilot.press("up")
        assert text_of(trees.first()) != before
        await pilot.press("p")
        assert text_of(trees.first()) == before


async def test_it_is_sorted_and_filtered_as_other_lists_are():
    async with running(sample()) as (app, pilot):
        panel = app.screen.query_one(PairsPanel)
        await pilot.press("o", "O")
        assert [pair.a for pair in panel.shown] == sorted((pair.a for pair in panel.shown), reverse=True)
        await pilot.press("slash")
        assert isinstance(app.screen, Ask)
        await pilot.press(*"coin", "enter")
        assert [pair.a for pair in panel.shown] == ["r3"]


async def test_a_pair_with_the_same_text_opens_at_its_first_step():
    async with running(sample(planted=False)) as (app, pilot):
        await pilot.press("n")
        assert [note.message for note in app._notifications] == ["no later pair parts"]
        await pilot.press("enter")
        await pilot.pause()
        places = app.screen.query_one(PlacesPanel)
        assert places.picked == 0
        assert "the same output" in text_of(places)
        await pilot.press("d")
        assert "no decision differs" in [note.message for note in app._notifications][-1]


async def test_places_line_up_where_steps_do_not():
    shown = sample(seed=2)
    pair = shown.pairs[0]
    beside = Beside(*shown.steps(pair))
    for side_at, steps in enumerate((beside.a, beside.b)):
        done = 0
        for number, step in enumerate(steps):
            row = beside.rows[beside.row_of(done)]
            assert (row.place, row.parts[side_at]) == (done, number)
            assert beside.part(side_at, done) == number
            assert beside.part(side_at, done + step.emitted - 1) == number
            done += step.emitted
    assert [row.place for row in beside.rows] == sorted({row.place for row in beside.rows})


@pytest.mark.parametrize("width", [40, 60, 76, 116, 196])
def test_the_help_page_fits(width):
    texts = ["".join(part for part, _ in line) for line in compare_help_lines(width, sample().causes)]
    assert max(map(cell_len, texts)) <= width


@pytest.mark.parametrize("keys", [["question_mark"], ["n", "enter", "question_mark"]], ids=["pairs", "parting"])
async def test_the_help_page_opens_over_both_screens_and_names_every_cause(keys):
    async with running(sample(), (200, 60)) as (app, pilot):
        await pilot.press(*keys)
        await pilot.pause()
        assert isinstance(app.screen, HelpScreen)
        text = "\n".join("".join(part for part, _ in line) for line in app.screen.query_one(HelpLines).sheet.lines)
        assert all(cause.value in text for cause in Cause)
        below = len(app.screen_stack) - 1
        await pilot.press("escape")
        assert len(app.screen_stack) == below


async def test_q_quits_from_the_list():
    async with running(sample()) as (app, pilot):
        await pilot.press("t")
        assert not app.current_theme.dark
        await pilot.press("enter", "q")
        assert not app._exit  # it closed what lay over the list
        await pilot.press("q")
        assert app._exit
