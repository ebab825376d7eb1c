"""The screens of a comparison: its list of pairs, and both trees where a pair parts."""

import dataclasses
from functools import cache

import numpy as np
from textual.command import CommandPalette

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.parting import PartingCause
from specscope.tui.app import ScopeApp, answer_app
from specscope.tui.screens.beside import BesideScreen, PlacesPanel, TreePanelOf
from specscope.tui.screens.compare import Compared, CompareScreen, PairsPanel, help_lines
from specscope.tui.screens.help import HelpLines, HelpScreen
from tests.analyze.compare.runs import side

from .sample import notes, opened, text_of, told


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
    await pilot.press("question_mark")
    await pilot.pause()
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
        await pilot.press("enter")
        await pilot.pause()
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
        await pilot.press("enter")
        await pilot.pause()
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
            row = beside.rows[beside.row_of(done)]
            assert (row.place, row.parts[side_at]) == (done, number)
            assert beside.part(side_at, done) == number
            assert beside.part(side_at, done + step.emitted - 1) == number
            done += step.emitted
    assert [row.place for row in beside.rows] == sorted({row.place for row in beside.rows})


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
