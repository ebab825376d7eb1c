"""The screens of a location: the operations of a walk, and the rows and heads behind one of them."""

import dataclasses

import numpy as np
import pytest
from rich.cells import cell_len

from specscope.analyze.locate.located import Held, Location, Operation, Stage
from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.app import THEMES, ScopeApp, answer_app
from specscope.tui.look import Look
from specscope.tui.screens.locate import ErrorGrid, FaultsPanel, HeldScreen, LocateScreen, WalkPanel, help_lines
from tests.analyze.locate.locations import NAMES, ROWS, healthy, unplaced, walk, wrong

from .sample import notes, opened, text_of, told

VOCABULARY = Vocabulary({token: f" w{token}".encode() for token in range(300, 300 + ROWS)})


def app_of(location: Location, theme: str = "dark") -> ScopeApp:
    first = lambda look: LocateScreen(look, location)  # noqa: E731
    return answer_app("specscope diagnose", first, help_lines, VOCABULARY, THEMES[theme])


def test_operations(snap_compare):
    assert snap_compare(app_of(wrong()), terminal_size=(120, 40))


async def test_it_opens_at_the_first_difference_of_the_walk_that_has_one():
    async with opened(app_of(wrong())) as (app, _):
        panel = app.screen.query_one(WalkPanel)
        assert (panel.number, panel.item) == (1, 6)
        lines = text_of(panel).splitlines()[1:]
        assert [line[0] for line in lines] == ["✓"] * 6 + ["✗"] * 4
        assert [words in line for (_, words, _), line in zip(NAMES, lines, strict=True)] == [True] * len(NAMES)
        said = text_of(app.screen.query_one(FaultsPanel))
        assert "scores differ by a factor of 0.577 in 8 of 14 rows" in said
        assert "sampling: the rules give the recorded p at 212 nodes" in said


async def test_keys_go_to_differences_and_to_other_walks():
    async with opened(app_of(wrong())) as (app, pilot):
        panel = app.screen.query_one(WalkPanel)
        await pilot.press("n")
        assert panel.item == 7
        await pilot.press("N", "N")
        assert panel.item == 9  # it wraps around
        await pilot.press("right")
        assert panel.walk.stage is Stage.TARGET
        assert "✗" not in text_of(panel)
        await pilot.press("n")
        assert notes(app) == ["no operation differs"]
        await pilot.press("left")
        assert panel.item == 6


async def test_enter_shows_rows_and_heads_and_esc_goes_back():
    async with opened(app_of(wrong())) as (app, pilot):
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(app.screen, HeldScreen)
        grid = app.screen.query_one(ErrorGrid)
        assert grid.picked == 6  # the first row that is off
        lines = text_of(grid).splitlines()[1:]
        assert len(lines) == ROWS
        assert lines[6].split()[:2] == ["96", "␣w306"]
        assert lines[10].split()[0] == "100/0"  # a node of the tree
        name = lambda: grid.sheet.title[0][0]  # noqa: E731
        assert name().startswith("layers.0.self_attn.scores: error ")
        await pilot.press("right")
        assert name().startswith("layers.0.self_attn.attention")
        await pilot.press("left", "left")
        assert name().startswith("layers.0.self_attn.keys read")
        await pilot.press("n")
        assert notes(app) == ["no row differs"]
        await pilot.press("escape")
        assert isinstance(app.screen, LocateScreen)


@pytest.mark.parametrize("made", [healthy, unplaced])
async def test_what_has_no_fault_or_no_walk_is_shown_too(made):
    async with opened(app_of(made()), (40, 12)) as (app, pilot):
        await pilot.press("n", "enter", "escape", "right", "down")
        for panel in app.screen.query("FaultsPanel, WalkPanel"):
            assert "cannot draw" not in text_of(panel)
        said = " ".join(text_of(app.screen.query_one(FaultsPanel)).split())
        assert "Nothing differs" in said or "Not located" in said


@pytest.mark.parametrize(("heads", "width"), [(1, 200), (16, 80), (200, 40), (200, 120)])
def test_any_number_of_heads_fits(heads, width):
    errors = np.full((500, heads), 1e-6, np.float32)  # of keys that are read: more than rows were fed
    errors[400:, -1] = np.inf
    held = Held(Operation(Stage.TARGET, "layers.0.x", "layer 0: x"), 1e-5, float("inf"), 500, 100, errors)
    grid = ErrorGrid(dataclasses.replace(walk(6), operations=(held,)), 0)
    text = told(grid.draw(Look(Viewer(History(vocabulary=VOCABULARY))), width, 40).lines)
    assert grid.picked == 400
    assert max(map(cell_len, text.splitlines())) <= width
    assert "inf" in text
