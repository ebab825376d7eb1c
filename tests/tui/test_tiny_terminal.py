"""Every screen and overlay in terminals down to one row and one column, and made small while it is open."""

from itertools import product

import pytest

from specscope.tui.app import ScopeApp

from .sample import forked, live, replay
from .test_compare import compare_app, sample

SIZES = list(product((1, 2, 3, 5, 8, 13, 21, 80), (1, 2, 3, 4, 5, 6, 8, 24)))
SEEN = [(80, 4), (80, 3), (1, 24)]  # in which Page Down in the palette ended the screen
MOVES = ("pagedown", "pagedown", "pageup", "up", "down", "end", "home", "enter")
OVERLAYS = (*"rdfvwabB?:gF/", "ctrl+p", "themes")


async def moved_about(app, pilot, overlay):
    """The overlay opened, its keys pressed, and left."""
    if overlay == "themes":
        app.search_themes()
    else:
        await pilot.press(overlay)
    await pilot.pause()
    await pilot.press(*MOVES)
    while len(app.screen_stack) > app.home:
        app.pop_screen()
        await pilot.pause()
    assert app.is_running


async def shown(app, size, overlays):
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.home = len(app.screen_stack)
        for overlay in overlays:
            await moved_about(app, pilot, overlay)


def forking():
    viewer, engine = live(12)
    engine.forked = forked()
    return viewer


APPS = {
    "replay": (lambda: ScopeApp(replay(14)), OVERLAYS),
    "live": (lambda: ScopeApp(forking()), "fi"),
    "compare": (lambda: compare_app(sample()), ("n", "enter", "slash", "question_mark", "ctrl+p")),
}


async def test_the_palette():
    app = ScopeApp(replay(14))
    async with app.run_test() as pilot:
        app.home = len(app.screen_stack)
        for size in SEEN:
            await pilot.resize_terminal(*size)
            for overlay in ("ctrl+p", "themes"):
                await moved_about(app, pilot, overlay)


@pytest.mark.slow
@pytest.mark.parametrize("name", APPS)
@pytest.mark.parametrize("size", SIZES, ids=str)
async def test_every_overlay(size, name):
    make, overlays = APPS[name]
    await shown(make(), size, overlays)


@pytest.mark.every(5)
@pytest.mark.parametrize("overlay", OVERLAYS)
async def test_a_terminal_that_shrinks(overlay):
    app = ScopeApp(replay(14))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(overlay) if overlay != "themes" else app.search_themes()
        for size in ((80, 4), (1, 1), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.press("pagedown", "pageup")
            assert app.is_running
