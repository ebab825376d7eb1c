"""Every key of the main screen, once: bindings, help screen and command palette are made from this list."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Key:
    """A key, what it does, and how people are told."""

    keys: str  # as Textual names them, comma separated
    label: str  # as people know them
    action: str
    command: str  # in the command palette
    help: str


KEYS: tuple[Key, ...] = (
    Key("space,p", "space", "pause", "Pause or resume", "pause or resume the engine; play or stop a replay"),
    Key("full_stop", ".", "forward", "Step forward", "next step; a paused engine makes one at the end"),
    Key("comma", ",", "backward", "Step back", "the step before"),
    Key("pagedown", "PgDn", "jump(1)", "Jump forward", "a twentieth of the run forward"),
    Key("pageup", "PgUp", "jump(-1)", "Jump back", "a twentieth of the run back"),
    Key("home", "Home", "first", "First step", "the first step"),
    Key("end", "End", "last", "Last step", "the newest step, and follow it"),
    Key("g", "g", "ask_step", "Go to step…", "go to a step by its number"),
    Key("n", "n", "rejection(1)", "Next rejection", "next step whose path ended in a rejection"),
    Key("N,upper_n", "N", "rejection(-1)", "Previous rejection", "the one before"),
    Key("j", "j ↓", "choose(1)", "Next request", "choose the request below"),
    Key("k", "k ↑", "choose(-1)", "Previous request", "choose the request above"),
    Key("colon", ":", "console", "Debugger…", "the debugger: breakpoints, back, what if; type help there"),
    Key("s", "s", "scope", "Figures: all requests or the chosen one", "figures of all requests or of the chosen one"),
    Key("z", "z", "zoom", "Zoom the focused panel", "zoom the focused panel; again to go back"),
    Key("i", "i", "ask_prompt", "New prompt…", "give the live engine a new prompt"),
    Key("x", "x", "cancel", "Cancel the request", "cancel the chosen request"),
    Key("e", "e", "next_engine", "Next engine", "show the next of several engines that are listened to"),
    Key("t", "t", "next_theme", "Theme: light or dark", "light or dark"),
    Key("question_mark", "?", "help", "Help", "this page"),
    Key("q", "q", "quit", "Quit", "leave"),
)


def bindings() -> list[Binding]:
    """The keys as Textual wants them."""
    made = [Binding(key.keys, key.action, key.command, show=False) for key in KEYS]
    return [*made, Binding("ctrl+c", "quit", "Quit", show=False)]
