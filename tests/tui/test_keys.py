"""What keys and the mouse do."""

import dataclasses
import shlex

import numpy as np
import pytest
from rich.cells import cell_len
from textual import events
from textual.widgets import Input

from specscope.debug.answers import Answer, PromptRefused
from specscope.debug.viewer import Viewer
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.record.records import FinalKind, FinishReason, RequestEnd
from specscope.trace.wire.reading import split_reference
from specscope.tui.app import chosen_theme
from specscope.tui.keys import MAIN
from specscope.tui.look import Look
from specscope.tui.screens import compare, locate
from specscope.tui.screens.beside import fork_beside
from specscope.tui.screens.dialogs import Ask
from specscope.tui.screens.help import HelpScreen, help_lines
from specscope.tui.screens.over import Hints
from specscope.tui.screens.overlays import SCREENS
from specscope.tui.screens.step_view import StepScreen
from specscope.tui.widgets.bars import Slider
from specscope.tui.widgets.requests import RequestsPanel
from specscope.tui.widgets.tree import TreePanel

from .sample import answered, forked, live, notes, pressed, replay, running, standing, text_of, told, until


def ended(viewer: Viewer, name: str) -> RequestEnd:
    info = viewer.history.requests[name].info
    return RequestEnd(info, 0, FinishReason.CANCELLED, "", np.zeros(0, np.int32))


async def test_keys_the_mouse_and_a_dialog_move_through_a_replay_and_it_plays():
    async with running(replay(5)) as (app, pilot):
        last = len(app.viewer.history.steps) - 1
        for key, position in ((".", 6), (",", 5), ("home", 0), ("pagedown", max(1, last // 20)), ("end", last)):
            await pilot.press(key)
            assert app.viewer.position == position
        await answered(pilot, "g", "17")
        assert app.viewer.history.steps[app.viewer.position].step == 17
        await answered(pilot, "g", "9999")
        assert app.viewer.position == last
        assert "no step 9999" in notes(app)[-1]
        await pilot.press("g", "escape")
        assert not isinstance(app.screen, Ask)
        slider = app.query_one(Slider)
        await pilot.click("#slider", offset=(1, 0))
        assert app.viewer.position == 0
        await pilot.click("#slider", offset=(1 + slider._track[1] // 2, 0))
        assert abs(app.viewer.position - len(app.viewer.history.steps) // 2) <= 1
        at = app.viewer.position
        await pilot.press("space")
        assert app.standing.playing
        await until(pilot, lambda: app.viewer.position > at)
        await pilot.press("space")
        assert not app.standing.playing
        await until(pilot, lambda: app._timer is None)  # nothing moves it any more
        await pilot.click("#slider", offset=(slider._track[1], 0))
        assert app.viewer.follow


def test_the_ends_of_a_replay_are_named():
    place, said = standing(replay())
    place.action_forward()
    place.action_first()
    place.action_backward()
    assert said == ["this is the last step", "this is the first step"]


async def test_the_focus_and_the_request_are_chosen_by_key_and_mouse():
    async with running(replay(5)) as (app, pilot):
        seen = []
        for _ in range(6):
            seen.append(app.focused.id if app.focused else None)
            await pilot.press("tab")
        assert seen == ["requests", "tree", "rates", "lengths", "output", "slider"]
        assert app.standing.current == "r0"
        await pilot.press("down", "j", "j", "j", "k")
        assert app.standing.current == "r2"
        await pilot.click("#requests", offset=(5, 2))  # border, head, then r0
        assert app.standing.current == "r0"


async def test_a_step_forward_at_the_end_runs_the_engine_for_one_step_and_space_resumes_it():
    viewer, engine = live(5, "paused")
    async with running(viewer) as (_, pilot):
        assert viewer.position == 4
        await pilot.press(".")
        await until(pilot, lambda: viewer.position == 5)
        assert viewer.position == 5
        await pilot.press(",")
        assert (viewer.position, viewer.follow) == (4, False)
        await pilot.press(".")
        assert len(viewer.history.steps) == 6  # that step was there already
        await pilot.press("space")
        assert engine.state == "running"
        await pilot.press("p")
        assert engine.state == "paused"


async def test_one_request_is_current_on_the_screen_and_at_the_prompt():
    async with running(replay(0)) as (app, pilot):
        app.dialogs.debug_line("request r1")
        assert app.standing.current == "r1"
        await pressed(pilot, "k")
        app.dialogs.debug_line("where")
        assert "r0@" in app.standing.talk.said[-1][1]
        assert app.standing.current == "r0"


def sent(app, key):
    """A key, as the terminal gives it, without waiting for what it does."""
    event = events.Key(key, ":" if key == "colon" else key if len(key) == 1 else None)
    event.set_sender(app)
    app._driver.send_message(event)


async def test_keys_that_are_typed_before_a_dialog_is_there_go_to_it():
    """As a slow line delivers them: all at once."""
    async with running(replay()) as (app, pilot):
        for key in ("g", "0", "enter"):
            sent(app, key)
        await until(pilot, lambda: app.viewer.position == 0)
        for key in ":where":
            sent(app, "colon" if key == ":" else key)
        await until(pilot, lambda: [box.value for box in app.screen.query(Input)] == ["where"])
        for key in ("enter", *"bogus", "enter"):
            sent(app, key)
        await until(pilot, lambda: "unknown command" in app.standing.talk.said[-1][1])
        assert [line for typed, line in app.standing.talk.said if typed] == ["where", "bogus"]
        app._driver.send_message(events.Paste("info kv\nhelp"))
        await until(pilot, lambda: [box.value for box in app.screen.query(Input)] == ["help"])
        assert app.standing.talk.typed == ["where", "bogus", "info kv"]
        sent(app, "ctrl+c")
        await until(pilot, lambda: not app.is_running)


def test_next_and_previous_rejection():
    place, said = standing(replay(0))
    viewer = place.viewer
    place.action_rejection(1)
    first = viewer.position
    assert viewer.history.part(place.current, first)[1].verdict.kind is FinalKind.RECOVERED
    place.action_rejection(1)
    assert viewer.position > first
    place.action_rejection(-1)
    assert viewer.position == first
    place.action_rejection(-1)
    assert said[-1] == "no earlier rejection: wrapped around to r3's last"
    place.action_rejection(1)
    assert (viewer.position, said[-1]) == (first, "no later rejection: wrapped around to r0's first")


async def test_in_a_replay_that_opens_at_its_end_something_is_found():
    """A text is found at the step that completes it."""
    viewer = replay()
    end = viewer.position
    async with running(viewer) as (app, pilot):
        await pilot.press("n")
        assert viewer.position < end
        assert notes(app)[-1] == "r2 has no later rejection: this is r3's first"
        app.standing.action_last()
        app.standing.pick("r1")
        await answered(pilot, "F", "Blue")
        assert viewer.position < end
        assert notes(app)[-1] == "no later 'Blue': wrapped around to the first of r1"
        _, found = viewer.history.part("r1", viewer.position)
        for count in (found.index, found.index + 1):
            out = [token for step in viewer.history.requests["r1"].steps[:count] for token in step.output()]
            assert ("Blue" in viewer.history.vocabulary.text(out)) is (count > found.index)
        for text, says in (("Blue", "this is the only 'Blue' in"), ("zzzz", "no 'zzzz' in")):
            await answered(pilot, "F", text)
            assert notes(app)[-1] == f"{says} the output of r1"


async def test_what_a_paused_engine_was_asked_for_is_shown_until_a_step_does_it():
    viewer, engine = live(5)
    async with running(viewer) as (app, pilot):
        panel = app.query_one(RequestsPanel)
        for text in ("", "hey"):  # the first: nothing typed, nothing sent
            await answered(pilot, "i", text)
        await pressed(pilot, "j", "x")
        assert (engine.submitted, engine.cancelled) == (["hey"], ["r1"])
        assert "r1 will be cancelled by the next step" in notes(app)[-1]
        assert ", 1 queued" in "".join(text for text, _ in panel.sheet.title)
        assert "hey" in text_of(panel)
        assert "cancelling" in text_of(panel)
        engine.made.add("r9", "", "hey", " you there")
        made = engine.made.step()
        viewer.history.append(dataclasses.replace(made, finished=(ended(viewer, "r1"),)))
        viewer.goto_end()
        app.look()
        assert "queued" not in text_of(panel)
        assert "cancelling" not in text_of(panel)
        assert "cancelled" in text_of(panel)
        await pilot.press("x")
        assert engine.cancelled == ["r1"]
        assert "already ended (cancelled)" in notes(app)[-1]
        await answered(pilot, "i", "hey")
        assert app.standing.pending.prompts
        engine.news.append(PromptRefused("the prompt has 9,000 tokens; the limit is 2,047"))
        await until(pilot, lambda: not app.standing.pending.prompts)  # what is refused waits no more


async def test_a_screen_that_only_listens_offers_neither_prompt_nor_cancel():
    viewer, engine = live(5, "attached")
    engine.obeys = False
    async with running(viewer, (200, 60)) as (app, pilot):
        await pilot.pause()
        hints = text_of(app.query_one(Hints))
        assert "prompt" not in hints
        assert "cancel" not in hints
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert not titles & {"New prompt…", "Cancel the request"}
        await pilot.press("x")
        assert notes(app)[-1] == "nothing to cancel: this screen only listens to the engine"
        await pilot.press("i")
        assert notes(app)[-1] == "no new prompts: this screen only listens to the engine"
        assert (engine.submitted, engine.cancelled) == ([], [])


@pytest.mark.parametrize("width", [60, 120])
def test_the_foot_of_each_screen_names_what_matters_there(width):
    viewer, engine = live(40, "paused")
    viewer.poll()
    engine.forked = forked()
    look = Look(viewer, "r1")
    fork = compare.BesideScreen(look, fork_beside(engine.forked, look.vocabulary)).at_foot

    def foot(keys):
        hints = Hints(keys)
        hints.look = look
        return told(hints.draw(look, width, 1).lines)

    shown = foot(MAIN)
    assert [word for word in ("resume", "decisions", "step", "rejection") if word not in shown] == []
    assert ("a analysis" in shown) == (width >= 80)
    if width >= 120:
        assert [word for word in ("d", "r", "a", "b", "f") if f" {word} " not in f" {shown} "] == []
    for keys, words in (
        (StepScreen.KEYS, ("node", "distributions", "close")),
        (SCREENS["request"].KEYS, ("step", "decisions", "close")),
        (SCREENS["engine"].KEYS, ("resume", "step", "close")),
        (SCREENS["breakpoints"].KEYS, ("add", "delete", "close")),
        (fork, ("place", "close")),
    ):
        assert [word for word in words if word not in foot(keys)] == []


@pytest.mark.parametrize("width", [40, 60, 110, 116, 120, 160, 200])
def test_the_pages_of_help_fit_and_their_columns_do_not_collide(width):
    for page in (compare.help_lines, locate.help_lines, help_lines):
        texts = ["".join(part for part, _ in line) for line in page(width)]
        assert max(map(cell_len, texts)) <= width
    start = max(texts[0].find("Verdicts"), 0)
    assert {text[max(start - 2, 0) : start].strip() for text in texts} == {""}
    assert (start > 0) == (width >= 100)


async def test_every_key_is_a_command_and_help_theme_scope_and_quit_are_among_them(monkeypatch):
    monkeypatch.setenv("SPECSCOPE_THEME", "pink")
    with pytest.raises(UserError, match="SPECSCOPE_THEME is 'pink': use dark or light"):
        chosen_theme()
    monkeypatch.setenv("SPECSCOPE_THEME", "light")
    async with running(replay(5), theme=chosen_theme()) as (app, pilot):
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        assert {"Pause or resume", "Step back", "Go to…", "Quit", "Theme"} <= set(commands)
        assert not app.current_theme.dark
        svg = app.export_screenshot()
        assert svg.count("<text ") == svg.count('<text xml:space="preserve" ') > 20  # every renderer keeps spaces
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        await pilot.press("t", "s")
        assert app.current_theme.dark
        assert not app.standing.pooled
        await commands["Step back"].callback()
        assert app.viewer.position == 4
        await pilot.press("q")
    assert app.return_code == 0


async def test_keys_over_nothing():
    async with running(Viewer(History())) as (app, pilot):
        await pilot.press(*"pnNgsjkzx", ".", ",", "home", "end", "pageup", "pagedown", "right", "t", "i")
        await pilot.click("#slider", offset=(10, 0))
        await pilot.click("#requests", offset=(10, 1))
        assert app.viewer.position == -1


async def test_an_engine_that_breaks_while_polled_leaves_the_records():
    viewer, engine = live(10, "running")
    async with running(viewer) as (app, pilot):

        def broken(history: History) -> bool:
            raise BrokenPipeError("the worker is gone")

        engine.poll = broken  # type: ignore[method-assign]
        await until(pilot, lambda: app.query_one("#banner").display)
        assert "the worker is gone" in app.lost
        await pilot.press(",")
        assert viewer.position >= 8


def test_an_engine_that_loads_says_what_it_does():
    viewer, engine = live(0, "loading")
    for engine.progress in ("reading weights", "capturing CUDA graphs: 4 of 8"):
        assert engine.progress in told(TreePanel().draw(Look(viewer), 80, 20).lines)


async def test_an_engine_that_waits_says_which_key_starts_it():
    viewer, engine = live(0, "paused")
    engine.asked = ("Why is the sky blue?",)  # before a step has admitted it
    async with running(viewer, (60, 20)) as (app, pilot):
        assert "queued" in text_of(app.query_one("#requests"))
        said = text_of(app.query_one("#tree"))
        assert "paused before the first step" in said
        assert "space  starts the run" in said
        assert ".      runs one step" in said
        engine.state = "idle"
        await until(pilot, lambda: "no prompt yet" in text_of(app.query_one("#tree")))
        assert "i      gives it a prompt" in text_of(app.query_one("#tree"))
        engine.state = "paused"
        await pilot.press("full_stop")
        await until(pilot, lambda: (viewer.position, app.standing.current) == (0, "r0"))
        assert "paused before" not in text_of(app.query_one("#tree"))


async def test_a_capture_that_is_read_has_a_bar_and_the_time_that_is_left():
    @dataclasses.dataclass
    class Reading:
        history: History
        done: bool = False
        warnings: list[str] = dataclasses.field(default_factory=list)
        progress: float = 0.4
        seconds_left: float = 130.0

        def read(self, seconds: float) -> bool:
            return not self.done

    reader = Reading(replay().history)
    async with running(Viewer.over(reader), (60, 20)) as (app, pilot):
        await until(pilot, lambda: "reading" in text_of(app.query_one("#status")))
        assert "━━━━━─────── 40%  2 min left" in text_of(app.query_one("#status"))
        reader.progress, reader.seconds_left = 0.97, 3.1
        await until(pilot, lambda: "97%  4 s left" in text_of(app.query_one("#status")))
        reader.done = True
        await until(pilot, lambda: "replay" in text_of(app.query_one("#status")))
        assert "left" not in text_of(app.query_one("#status"))


async def test_the_debuggers_prompt_moves_the_replay():
    viewer = replay(14)
    async with running(viewer) as (app, pilot):
        await answered(pilot, "colon", "goto 3")
        assert viewer.history.steps[viewer.position].step == 3
        app.screen.query_one("#line").value = "goto r1@5"
        await pilot.press("enter")
        assert viewer.position == viewer.history.requests["r1"].at(5)
        assert app.standing.current == "r1"  # as the key g does
        await pilot.press(*"break", "space", *"rej", "tab")
        assert app.screen.query_one("#line").value == "break reject "
        await pilot.press("enter", *"c", "enter")
        assert viewer.position > 3
        await pilot.press("up", "up")
        assert app.screen.query_one("#line").value == "break reject "
        await pilot.press("escape")
        assert any("breakpoint 1" in line for _, line in app.standing.talk.said)
        at = viewer.position
        await pilot.press("comma")
        assert viewer.position == at - 1


async def test_the_debuggers_prompt_of_a_live_engine_asks_the_engine():
    viewer, engine = live(20)
    async with running(viewer, (80, 24)) as (app, pilot):
        await pilot.press("colon", *"rn", "enter")
        await until(pilot, lambda: (False, "heard rn") in app.standing.talk.said)
        assert engine.lines == ["rn"]
        await pilot.press("escape")
        engine.news.append(Answer("print 1", "breakpoint 1 at step 7\nmore"))
        await until(pilot, lambda: (False, "more") in app.standing.talk.said)


async def test_a_reference_is_copied_as_one_word_of_a_shell_and_opens_at_its_step():
    viewer, again = replay(5), replay(0)
    async with running(viewer, reference="it's; touch X\x1b[2J.jsonl") as (app, pilot):
        await pilot.press("j", "y")
        assert app.clipboard.isprintable()
        (copied,) = shlex.split(app.clipboard)
        index = viewer.history.part(app.standing.current, viewer.position)[1].index
        assert copied == f"it's; touch X\\x1b[2J.jsonl#{app.standing.current}@{index}"
    with pytest.raises(UserError, match="write a request and its step after #"):
        split_reference("run.jsonl#nowhere")
    file, start = split_reference(copied)
    async with running(again, reference=file, start=start) as (other, pilot):
        await until(pilot, lambda: (other.standing.current, again.position) == (app.standing.current, viewer.position))
