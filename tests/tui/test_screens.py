"""What keys do in the screens that are laid over the main one; and every screen in terminals down to one cell."""

import dataclasses
from itertools import product

import pytest
from rich.cells import cell_len

from specscope.debug.answers import BreakpointHit, Stop, StopReason
from specscope.trace.record.records import Outcome
from specscope.trace.record.vocabulary import Vocabulary
from specscope.tui.app import ScopeApp
from specscope.tui.look import Look
from specscope.tui.screens.beside import BesideScreen, PlacesPanel
from specscope.tui.screens.engine_view import EnginePanel, held, kv_map
from specscope.tui.screens.request_view import RequestScreen, TimelinePanel
from specscope.tui.screens.step_view import NodePanel, NodesPanel, StepScreen
from specscope.tui.text import line_width
from specscope.tui.widgets.lines import Lines
from specscope.tui.widgets.node_view import node_facts
from specscope.tui.widgets.prompt import hanging
from specscope.tui.widgets.requests import RequestsPanel

from .sample import answered, forked, live, notes, pressed, replay, running, text_of, told, until
from .test_compare import compare_app, sample


async def test_going_to_a_request_and_to_its_step_by_name_and_by_arrows_in_its_timeline():
    async with running(replay(30), (60, 20)) as (app, pilot):
        panel = app.screen.query_one(RequestsPanel)  # the smallest screen names the figures and cuts no state
        title, first = "".join(text for text, _ in panel.sheet.title), text_of(panel).splitlines()[0]
        tokens = app.viewer.history.requests["r0"].acceptance_at(30).emitted
        assert title.index("tokens") + len("tokens") == first.index(f" {tokens} ") + 1 + len(str(tokens))
        assert "τ" in title
        assert "…" not in first[: first.index(f" {tokens} ")]
        request = app.viewer.history.requests["r2"]
        await answered(pilot, "g", "r2@3")
        assert (app.standing.current, app.viewer.position) == ("r2", request.at(3))
        await answered(pilot, "g", "r1@999")
        assert "has no step 999" in notes(app)[-1]
        await answered(pilot, "g", "r77")
        assert "neither a step nor a request" in notes(app)[-1]
        for text in ("r1", "30"):
            await answered(pilot, "g", text)
        assert app.standing.current == "r1"
        await pilot.press("r")
        assert isinstance(app.screen, RequestScreen)
        request = app.viewer.history.requests[app.standing.current]
        before = request.count_at(app.viewer.position)
        await pilot.press("up")
        assert request.count_at(app.viewer.position) == before - 1
        assert app.viewer.position == request.engine_steps[before - 2]
        await pilot.press("n")  # the main screen's keys move here as well
        await pilot.press("down", "escape")
        assert not isinstance(app.screen, RequestScreen)


def test_the_inspector_tells_of_every_node():
    look = Look(replay(14), "r1")
    step = look.part[1]
    for at in range(len(step.tree) + 1):
        said = told(node_facts(look, step, step.verdict, at, 60, 0))
        if at == len(step.tree):
            assert f"kind     {step.verdict.kind.value}" in said
        else:
            outcome = Outcome(int(step.verdict.outcome[at]))
            assert {"untried": "not tried"}.get(outcome.name.lower(), outcome.name.lower()) in said.lower()
            assert ("residual" in said) == (outcome is Outcome.REJECTED)


@pytest.mark.parametrize("name", ["r1", "r3"])
def test_a_step_opens_at_the_node_that_ended_its_path_and_stays_where_it_was_put(name):
    viewer, nodes = replay(0), NodesPanel()
    request = viewer.history.requests[name]
    for step, position in zip(request.steps, request.engine_steps, strict=True):
        viewer.goto(position)
        nodes.draw(Look(viewer, name), 80, 20)
        if step.verdict is None:
            continue
        assert sorted(nodes.order) == list(range(len(step.tree) + 1))
        outcomes, path, parents = step.verdict.outcome, step.verdict.path, step.tree.parent
        end = int(path[-1]) if len(path) else -1
        failed = [n for n in range(len(step.tree)) if parents[n] == end and outcomes[n] == Outcome.REJECTED]
        assert nodes.node == (failed[0] if failed else len(step.tree))  # the drafter's best of those, or the bonus
        if len(step.tree) > 1:
            nodes.action_pick(1 if nodes.picked == 0 else -1)
            picked = nodes.node
            nodes.draw(Look(viewer, name), 80, 20)
            assert nodes.node == picked


def hit_of(viewer, kind):
    """A breakpoint's hit at the last step of the viewer's history."""
    record = viewer.history.steps[-1]
    part = next(part for part in reversed(record.requests) if len(part.tree) > 1)
    node = len(part.tree) - 1 if kind == "reject" else None
    return BreakpointHit(1, f"break {kind}", record.step, part.request, node)


@pytest.mark.parametrize("opened", [True, False])
async def test_the_screen_goes_to_the_request_and_the_node_that_a_breakpoint_stopped_at(opened):
    viewer, engine = live(12, "paused")
    async with running(viewer) as (app, pilot):
        hit = hit_of(viewer, "reject")
        assert app.standing.current != hit.request
        if opened:
            await pilot.press("d")
        engine.news.append(Stop(StopReason.BREAKPOINT, hit.step, (hit,)))
        await until(pilot, lambda: notes(app))
        assert notes(app)[-1].startswith("breakpoint 1")
        said = [text for _, text in app.standing.talk.said]
        assert said[0] == f"breakpoint 1 (break reject) at step {hit.step}, {hit.request}, node {hit.node}"
        assert said[1].startswith(f"step {hit.step}  {hit.request}@")
        assert app.standing.current == hit.request
        if not opened:
            await pilot.press("d")
        await pilot.pause()
        assert app.screen.query_one(NodesPanel).node == hit.node


async def test_a_breakpoint_leaves_the_step_that_is_looked_at():
    viewer, engine = live(12, "paused")
    async with running(viewer) as (app, pilot):
        hit, chosen = hit_of(viewer, "reject"), app.standing.current
        await pilot.press(",", ",")
        at = viewer.position
        engine.news.append(Stop(StopReason.BREAKPOINT, hit.step, (hit,)))
        await until(pilot, lambda: notes(app))
        assert (app.standing.current, viewer.position) == (chosen, at)


async def test_another_history_at_the_same_position_is_drawn_anew():
    viewer = replay(20)
    other = replay(20, seed=8)
    async with running(viewer) as (app, pilot):
        await pressed(pilot, "r")
        before = text_of(app.screen.query_one(TimelinePanel))
        viewer.show(other.history)
        viewer.goto(20)
        app.look()
        await pilot.pause()
        assert text_of(app.screen.query_one(TimelinePanel)) != before
        await pilot.press("r")
        assert not isinstance(app.screen, RequestScreen)
        app.overlays.action_open("request")
        app.overlays.action_open("request")
        assert len(app.screen_stack) == 2


async def test_a_fork_opens_at_its_first_difference():
    viewer, engine = live(40, "paused")
    async with running(viewer) as (app, pilot):
        await pilot.press("f")
        assert "nothing was forked yet" in notes(app)[-1]
        engine.forked = forked()
        await pilot.press("f")
        assert isinstance(app.screen, BesideScreen)
        panel = app.screen.query_one(PlacesPanel)
        assert panel.beside.part(0, panel.place) == panel.beside.part(1, panel.place) == 3
        first = panel.picked
        await pilot.press("pageup")
        assert panel.picked == 0
        await pilot.press("p")
        assert panel.picked == first
        await pilot.press("pagedown", "pagedown")
        assert panel.picked == len(panel.beside.rows) - 1
        await pilot.press("n")
        assert "no other pair" in notes(app)[-1]


def test_the_map_has_a_cell_for_every_block():
    record = replay(20).history.steps[20]
    assert dict(held(record, 16)).keys() == {part.request for part in record.requests}
    for step in replay().history.steps:
        assert not {name for name, _ in held(step, 16)} & {end.info.id for end in step.finished}
    for width in (40, 90, 300):
        *rows, legend = kv_map(record, 16, width)
        cells = sum(line_width(row) for row in rows)
        total = record.blocks_used + record.blocks_free
        per = 1 if width * 3 >= total else -(-total // (width * 3))
        assert cells >= total // per
        assert len(rows) <= 4
        assert line_width(legend) <= width


async def test_a_wide_screen_has_the_requests_steps_beside_the_tree_and_text_where_its_tokens_have_none():
    viewer = replay(14)
    words, steps = viewer.history.vocabulary, viewer.history.requests["r1"].steps
    known = {token for step in steps for token in step.output()} & {*words.pieces}
    viewer.history.vocabulary = Vocabulary({token: words.pieces[token] for token in known})
    async with running(viewer, (200, 60)) as (app, pilot):
        await pilot.press("j")
        panel = app.screen.query_one(TimelinePanel)
        assert panel.display
        panel.focus()
        before = app.viewer.position
        await pilot.press("up")
        assert app.viewer.position < before
        await pressed(pilot, "d")
        steps = app.screen.query_one(TimelinePanel)
        assert isinstance(app.screen, StepScreen)
        assert steps.display
        assert app.screen.last.request.id in text_of(steps) or steps.sheet.title[1][0] == app.screen.last.request.id
        said = text_of(app.screen.query_one(NodePanel))
        context = said[said.index("context") :]
        assert "Why is the sky blue?" in context
        assert "Sunlight is scattered" in context
        assert "#" not in context.partition("Sunlight")[0]


async def test_the_engines_passes_stand_below_the_draft_and_what_is_always_0_takes_a_line():
    viewer = replay(40)
    for at, step in enumerate(viewer.history.steps):
        made = tuple(dataclasses.replace(step.phases[1], name=f"pass {i}") for i in (1, 2)) if at > 3 else ()
        viewer.history.steps[at] = dataclasses.replace(step, passes=made)
    async with running(viewer, (120, 40)) as (app, pilot):
        assert not app.screen.query_one(TimelinePanel).display
        await pressed(pilot, "v")
        lines = text_of(app.screen.query_one(EnginePanel)).splitlines()
        names = [line[:12].strip() for line in lines]
        at = names.index("draft")
        assert names[at + 1 : at + 4] == ["pass 1", "pass 2", "forward"]
        assert not any(names[names.index("running") + 1 : names.index("waiting")])
        assert names.index("waiting") - names.index("running") < names.index("running") - names.index("step")
        assert "max 0" not in text_of(app.screen.query_one(EnginePanel))


@pytest.mark.parametrize("width", [20, 40, 54, 80])
def test_wrapped_lines_of_a_table_stay_a_table(width):
    line = "goto STEP|NAME[@N]|end    go to just after STEP, to step N of request NAME (alone selects it), or the end"
    rows = hanging(line, width)
    assert max(map(cell_len, rows)) <= width
    assert " ".join(" ".join(rows).split()) == " ".join(line.split())
    if width >= 54:
        assert all(row.startswith(" " * 26) and row[26] != " " for row in rows[1:])


@pytest.mark.parametrize(("size", "is_live"), [((60, 20), True), ((200, 60), False)], ids=str)
async def test_every_screen_fits_every_size(size, is_live):
    viewer, engine = live(40, "paused")
    engine.forked = forked()
    async with running(viewer if is_live else replay(14), size) as (app, pilot):
        await pilot.press("j")
        for key in ("", "d", "r", "b", "v", "a", "f", "question_mark", "colon"):
            await pressed(pilot, *([key] if key else []))
            for lines in app.screen.query(Lines):
                assert "cannot draw" not in text_of(lines), (key, lines)
                assert all(line_width(line) <= max(lines.area.width, 1) for line in lines.sheet.lines), (key, lines)
            if key:
                await pilot.press("escape")


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
