"""The screens of a comparison: pairs, and both trees where one parts; of a location: operations, rows and heads."""

import dataclasses
from functools import cache

import numpy as np
import pytest
from rich.cells import cell_len
from textual.command import CommandPalette

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.parting import PartingCause
from specscope.analyze.locate.located import Held, Location, Operation, Stage
from specscope.debug.viewer import Viewer
from specscope.trace.history.history import History
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.app import THEMES, ScopeApp, answer_app
from specscope.tui.look import Look
from specscope.tui.screens.beside import BesideScreen, PlacesPanel, TreePanelOf
from specscope.tui.screens.compare import Compared, CompareScreen, PairsPanel, help_lines
from specscope.tui.screens.help import HelpLines, HelpScreen
from specscope.tui.screens.locate import ErrorGrid, HeldScreen, LocateScreen, WalkPanel
from specscope.tui.screens.locate import help_lines as locate_help
from tests.analyze.compare.runs import side
from tests.analyze.locate.locations import NAMES, ROWS, healthy, unplaced, walk, wrong

from .sample import notes, opened, pressed, text_of, told


@cache
def sample(*, seed: int = 1, planted: bool = True) -> Compared:
    """Two runs of which two pairs part; with another seed, all do."""
    a = side(seed=1, requests=8)
    places = {name: int(a.place[a.requests[at].first + 3]) for name, at in (("r3", 3), ("r5", 5))}
    plant = {("r3", places["r3"]): "coin", ("r5", places["r5"]): "verdict"} if planted else {}
    b = side(seed=seed, requests=8, plant=plant)
    return Compared(compare(a, b), a, b)


def compare_app(shown: Compared) -> ScopeApp:
    first = lambda look: CompareScreen(look, shown)  # noqa: E731
    return answer_app("specscope compare", first, help_lines, shown.a.vocabulary)


def _shown(places: PlacesPanel) -> str:
    """The pair that is shown: its name stands first in the title."""
    return places.beside.title[0][1][0][0]


def test_pairs(snap_compare):
    assert snap_compare(compare_app(sample()), terminal_size=(120, 40), press=["n"])


async def test_models_of_one_beginning_are_told_apart_and_no_pair_says_why():
    """As our capture of a chat beside another engine's of bare prompts."""
    model, asked = "SmolLM2-135M-Instruct-of-a-long-name-that-is-cut", "The capital of France is"
    a, b = side(seed=1, requests=3), side(seed=1, requests=3)
    for made, target, prompt in ((a, model, f"<user>{asked}<end>"), (b, f"{model}-0.1.2", asked)):
        made.captures[0].run = dataclasses.replace(made.captures[0].run, target=target)
        for request in made.requests:
            tokens = np.array([len(target)], np.int32)
            request.info = dataclasses.replace(request.info, prompt=prompt, prompt_tokens=tokens)
    async with opened(compare_app(Compared(compare(a, b), a, b))) as (app, _):
        (line,) = [
            line for line in text_of(app.screen.query_one("#configuration")).splitlines() if line[:6] == "model "
        ]
        assert "-cut " in line
        assert "-cut-0.1.2" in line
        assert "if a chat template was applied to one" in " ".join(text_of(app.screen.query_one(PairsPanel)).split())


async def test_the_list_says_where_pairs_part_and_why():
    async with opened(compare_app(sample()), (200, 60)) as (app, pilot):
        assert isinstance(app.screen, CompareScreen)
        lines = text_of(app.screen.query_one(PairsPanel)).splitlines()
        rows = {line.split()[0]: line for line in lines[1:]}
        assert "coin" in rows["r3"]
        assert "verdict" in rows["r5"]
        assert "same text" in rows["r1"]
        said = text_of(app.screen.query_one("#verdict"))
        assert said.startswith("B uses other coins than A")
        assert said.index("B uses other coins") < said.index("tau 3.07 → 2.97") < said.index("• coin differs")
        assert "no raw probabilities" in said
        assert "made.jsonl" in said
        assert text_of(app.screen.query_one("#configuration")).startswith("requests in a step, mean")
        await help_names_every_cause(app, pilot)
        await pilot.press("n", "enter")
        await help_names_every_cause(app, pilot)


async def help_names_every_cause(app, pilot):
    """It opens over the screen, and Esc closes it alone."""
    below = len(app.screen_stack)
    await pressed(pilot, "question_mark")
    assert isinstance(app.screen, HelpScreen)
    text = told(app.screen.query_one(HelpLines).sheet.lines)
    assert all(cause.value in text for cause in PartingCause)
    await pilot.press("escape")
    assert len(app.screen_stack) == below


async def test_n_goes_from_parting_to_parting_and_both_trees_are_those_of_the_place():
    async with opened(compare_app(sample())) as (app, pilot):
        panel = app.screen.query_one(PairsPanel)
        await pilot.press("n")
        assert panel.item.id_a == "r3"
        await pilot.press("n")
        assert panel.item.id_a == "r5"
        await pilot.press("n")  # there is none after it
        assert panel.item.id_a == "r3"
        await pilot.press("N")
        assert panel.item.id_a == "r5"
        assert notes(app)[-2:] == [
            "no later pair parts: wrapped around to the first",
            "no earlier pair parts: wrapped around to the last",
        ]
        await pilot.press("N")
        assert panel.item.id_a == "r3"
        await pressed(pilot, "enter")
        assert isinstance(app.screen, BesideScreen)
        places = app.screen.query_one(PlacesPanel)
        assert _shown(places) == "r3"
        trees = app.screen.query(TreePanelOf)
        for tree, steps, at in zip(trees, places.beside.sides, (0, 1), strict=True):
            step, said = steps[places.beside.part(at, places.beside.at)], text_of(tree)
            assert f"r3@{step.index}" in "".join(text for text, _ in tree.sheet.title)
            for token in step.tree.token:
                assert places.beside.vocabularies[at].show(int(token)) in said
        assert "»" in text_of(places)
        before = text_of(trees.first())
        await pilot.press("up")
        assert text_of(trees.first()) != before
        await pilot.press("p")
        assert text_of(trees.first()) == before
        await pilot.press("n")
        assert (_shown(places), panel.item.id_a) == ("r5", "r5")
        assert "the verdict differs" in text_of(places)
        await pilot.press("escape")
        assert isinstance(app.screen, CompareScreen)


async def test_a_pair_with_the_same_text_opens_at_its_first_step():
    async with opened(compare_app(sample(planted=False))) as (app, pilot):
        await pilot.press("n")
        assert notes(app) == ["no pair parts"]
        await pressed(pilot, "enter")
        places = app.screen.query_one(PlacesPanel)
        assert places.picked == 0
        assert "the same output" in text_of(places)
        await pilot.press("d")
        assert "no decision differs" in notes(app)[-1]


async def test_places_line_up_where_steps_do_not():
    shown = sample(seed=2)
    beside = shown.beside(shown.comparison.pairs[0])
    for side_at, steps in enumerate(beside.sides):
        done = 0
        for number, step in enumerate(steps):
            assert beside.rows[beside.row_of(done)] == done
            assert beside.part(side_at, done) == number
            assert beside.part(side_at, done + step.emitted - 1) == number
            done += step.emitted
    assert beside.rows == sorted({*beside.rows})


async def test_the_palette_has_the_keys_of_the_screen_on_top():
    async with opened(compare_app(sample())) as (app, pilot):
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        known = {"Open", "Next parting", "Sort the list", "Help", "Theme", "Quit", "Screenshot"}
        assert known <= set(commands)
        assert len(commands) == len(list(app.get_system_commands(app.screen)))  # no title stands twice
        assert not {"Keys", "Maximize", "Minimize", "Next panel"} & set(commands)
        panel = app.screen.query_one(PairsPanel)
        await commands["Next parting"].callback()
        assert panel.item.id_a == "r3"
        await commands["Open"].callback()
        await pilot.pause()
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Where they part", "First other decision", "Close"} <= titles
        await pilot.press("ctrl+p")
        assert isinstance(app.screen, CommandPalette)


VOCABULARY = Vocabulary({token: f" w{token}".encode() for token in range(300, 300 + ROWS)})


def app_of(location: Location, theme: str = "dark") -> ScopeApp:
    first = lambda look: LocateScreen(look, location)  # noqa: E731
    return answer_app("specscope diagnose", first, locate_help, VOCABULARY, THEMES[theme])


def test_operations(snap_compare):
    assert snap_compare(app_of(wrong()), terminal_size=(120, 40))


async def test_it_opens_at_the_first_difference_of_the_walk_that_has_one():
    async with opened(app_of(wrong())) as (app, _):
        panel = app.screen.query_one(WalkPanel)
        assert (panel.number, panel.item) == (1, 6)
        lines = text_of(panel).splitlines()[1:]
        assert [line[0] for line in lines] == ["✓"] * 6 + ["✗"] * 4
        assert [words in line for (_, words, _), line in zip(NAMES, lines, strict=True)] == [True] * len(NAMES)
        said = text_of(app.screen.query_one("#faults"))
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
        await pressed(pilot, "enter")
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
        for panel in app.screen.query("#faults, WalkPanel"):
            assert "cannot draw" not in text_of(panel)
        said = " ".join(text_of(app.screen.query_one("#faults")).split())
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
