"""Every key of the main screen, once: bindings, help screen and command palette are made from this list."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Key:
    """A key, what it does, and how it is described."""

    name: str
    keys: str  # as Textual names them, comma separated
    label: str  # as people know them
    action: str
    command: str  # in the command palette
    help: str


KEYS: tuple[Key, ...] = (
    Key("pause", "space,p", "space", "pause", "Pause or resume", "pause or resume the engine; play or stop a replay"),
    Key("forward", "full_stop", ".", "forward", "Step forward", "next step; at the end, a paused engine runs one"),
    Key("back", "comma", ",", "backward", "Step back", "previous step"),
    Key("jump_forward", "pagedown", "PgDn", "jump(1)", "Jump forward", "forward by a twentieth of the run"),
    Key("jump_back", "pageup", "PgUp", "jump(-1)", "Jump back", "back by a twentieth of the run"),
    Key("first", "home", "Home", "first", "First step", "the first step"),
    Key("last", "end", "End", "last", "Last step", "the newest step; follow the run from there"),
    Key("go_to_step", "g", "g", "ask_step", "Go to…", "go to a step or a request: 17, r3, r3@17"),
    Key(
        "next_rejection",
        "n",
        "n",
        "rejection(1)",
        "Next rejection",
        "next step that ended in a rejection; wraps around",
    ),
    Key(
        "previous_rejection",
        "N,upper_n",
        "N",
        "rejection(-1)",
        "Previous rejection",
        "previous step that ended in a rejection; wraps around",
    ),
    Key("filter", "slash", "/", "filter", "Filter the list…", "filter the list: requests, steps, breakpoints"),
    Key("sort", "o", "o", "sort(1)", "Sort the list", "sort the list by the next column"),
    Key("sort_reverse", "O,upper_o", "O", "sort(-1)", "Reverse the sorting", "reverse the sorting"),
    Key(
        "search",
        "F,upper_f,ctrl+f",
        "F",
        "ask_search",
        "Search the output…",
        "find text in the output, after this step first",
    ),
    Key("copy", "y", "y", "copy_reference", "Copy a reference", "copy this step's reference: run.jsonl#r3@17"),
    Key("next_request", "j", "j ↓", "choose(1)", "Next request", "go to the request below"),
    Key("previous_request", "k", "k ↑", "choose(-1)", "Previous request", "go to the request above"),
    Key("debugger", "colon", ":", "console", "Debugger…", "the debugger's prompt; type help there"),
    Key(
        "breakpoints",
        "b",
        "b",
        "breakpoints",
        "Breakpoints",
        "breakpoints: where the run stops",
    ),
    Key(
        "request",
        "r",
        "r",
        "request",
        "The request over time",
        "the current request: its steps, trees and text",
    ),
    Key("step", "d", "d", "step", "The step's decisions", "the step's decisions: nodes and their evidence"),
    Key(
        "fork",
        "f",
        "f",
        "fork",
        "The last fork beside its original",
        "the last fork beside its original",
    ),
    Key("engine", "v", "v", "engine", "The engine over time", "the engine: phases, batch, queue, KV over time"),
    Key(
        "analysis", "a", "a", "analysis", "Analysis over many steps", "over many steps: what is rejected, when, and why"
    ),
    Key(
        "scope",
        "s",
        "s",
        "scope",
        "Figures: all requests or the current one",
        "figures of all requests or of the current one",
    ),
    Key("prompt", "i", "i", "ask_prompt", "New prompt…", "give the live engine a new prompt"),
    Key("cancel", "x", "x", "cancel", "Cancel the request", "cancel the current request"),
    Key("next_engine", "e", "e", "next_engine", "Next engine", "next engine, if the screen listens to several"),
    Key("theme", "t", "t", "next_theme", "Theme: light or dark", "theme: light or dark"),
    Key("help", "question_mark", "?", "help", "Help", "keys, marks and figures"),
    Key("quit", "q", "q", "quit", "Quit", "quit"),
)

ASKING = ("prompt", "cancel")  # what only an engine that takes commands can do


def bindings() -> list[Binding]:
    """The keys as Textual bindings."""
    made = [Binding(key.keys, key.action, key.command, show=False) for key in KEYS]
    return [*made, Binding("ctrl+c", "quit", "Quit", show=False)]
