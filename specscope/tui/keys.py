"""Every key, once: bindings, the words at a screen's foot, help, the command palette and the page are made of these.

And what marks, colours and figures mean.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from textual.binding import BindingType

    from specscope.tui.text import Ink


When = Literal["always", "asks", "forked", "trees", "counts", "several"]


@dataclass(frozen=True)
class Key:
    """A key of a screen, or of all (`app.`); at the foot of a screen it stands where it has a rank there."""

    keys: str  # as Textual names them, comma separated; "" for one that its panel binds
    action: str
    command: str = ""  # in the command palette
    label: str = ""  # as people know it
    word: str = ""  # at the foot
    rank: int = -1  # how soon it leaves the foot where that is narrow: the highest first; -1 never stands there
    # An engine takes commands; something was forked; requests with trees, or counts only; there may be several engines
    when: When = "always"
    help: str = ""  # on the page of the main screen


KEYS: tuple[Key, ...] = (
    Key("space,p", "pause", "Pause or resume", "space", help="pause or resume the engine; play or stop a capture"),
    Key("full_stop", "forward", "Step forward", ".", help="next step; at the end, a paused engine runs one"),
    Key("comma", "backward", "Step back", ",", help="previous step"),
    Key("pagedown", "jump(1)", "Jump forward", "PgDn", help="forward by a twentieth of the run"),
    Key("pageup", "jump(-1)", "Jump back", "PgUp", help="back by a twentieth of the run"),
    Key("home", "first", "First step", "Home", help="the first step"),
    Key("end", "last", "Last step", "End", help="the newest step; follow the run from there"),
    Key("g", "ask_step", "Go to…", "g", help="go to a step or a request: 17, r3, r3@17"),
    Key("n", "rejection(1)", "Next rejection", "n", help="next step that ended in a rejection; wraps around"),
    Key(
        *("N,upper_n", "rejection(-1)", "Previous rejection", "N"),
        help="previous step that ended in a rejection; wraps around",
    ),
    Key("slash", "filter", "Filter the list…", "/", help="filter the list: requests, steps, breakpoints"),
    Key("o", "sort(1)", "Sort the list", "o", help="sort the list by the next column"),
    Key("O,upper_o", "sort(-1)", "Reverse the sorting", "O", help="reverse the sorting"),
    Key(
        "F,upper_f,ctrl+f",
        "ask_search",
        "Search the output…",
        "F",
        help="find text in the output, after this step first",
    ),
    Key("y", "copy_reference", "Copy a reference", "y", help="copy this step's reference: run.jsonl#r3@17"),
    Key("j", "choose(1)", "Next request", "j ↓", help="go to the request below"),
    Key("k", "choose(-1)", "Previous request", "k ↑", help="go to the request above"),
    Key("colon", "console", "Debugger…", ":", help="the debugger's prompt; type help there"),
    Key("b", "open('breakpoints')", "Breakpoints", "b", help="breakpoints: where the run stops"),
    Key("r", "open('request')", "The request over time", "r", help="the current request: its steps, trees and text"),
    Key("d", "step", "The step's decisions", "d", help="the step's decisions: nodes and their evidence"),
    Key("f", "fork", "The last fork beside its original", "f", help="the last fork beside its original"),
    Key("v", "open('engine')", "The engine over time", "v", help="the engine: phases, batch, queue, KV over time"),
    Key("a", "open('analysis')", "Analysis over many steps", "a", help="over many steps: what is rejected, when, why"),
    Key(
        *("s", "scope", "Figures: all requests or the current one", "s"),
        help="figures of all requests or of the current one",
    ),
    Key("i", "ask_prompt", "New prompt…", "i", help="give the live engine a new prompt"),
    Key("x", "cancel", "Cancel the request", "x", help="cancel the current request"),
    Key("e", "next_engine", "Next engine", "e", help="next engine, if there are several"),
    Key("t", "next_theme", "Theme: light or dark", "t", help="theme: light or dark"),
    Key("question_mark", "help", "Help", "?", help="keys, marks and figures"),
    Key("q", "quit", "Quit", "q", help="quit"),
)
# What stands at the foot for keys of the app: the action, the label, the word, and when
FOOT: dict[str, tuple[str, str, str, When]] = {
    "pause": ("pause", "space", "", "always"),
    "move": ("forward", ", .", "step", "always"),
    "jump": ("jump(1)", "PgUp PgDn", "jump", "always"),
    "go_to": ("ask_step", "g", "go to", "always"),
    "rejection": ("rejection(1)", "n", "rejection", "trees"),
    "decisions": ("step", "d", "decisions", "trees"),
    "request": ("open('request')", "r", "request", "trees"),
    "requests": ("choose(1)", "j k", "request", "always"),
    "analysis": ("open('analysis')", "a", "analysis", "trees"),
    "counted": ("scope", "s", "scope", "counts"),
    "scope": ("scope", "s", "scope", "trees"),
    "next_engine": ("next_engine", "e", "next engine", "several"),
    "debug": ("console", ":", "debug", "always"),
    "breakpoints": ("open('breakpoints')", "b", "breakpoints", "trees"),
    "engine": ("open('engine')", "v", "engine", "always"),
    "fork": ("fork", "f", "fork", "forked"),
    "filter": ("filter", "/", "filter", "trees"),
    "sort": ("sort(1)", "o", "sort", "trees"),
    "reverse": ("sort(-1)", "O", "reverse", "trees"),
    "copy": ("copy_reference", "y", "copy", "always"),
    "prompt": ("ask_prompt", "i", "prompt", "asks"),
    "cancel": ("cancel", "x", "cancel", "asks"),
    "theme": ("next_theme", "t", "theme", "always"),
    "help": ("help", "?", "help", "always"),
    "quit": ("quit", "q", "quit", "always"),
}
MARKS: tuple[tuple[str, Ink, str], ...] = (
    ("✓", "accepted-strong", "accepted: its coin was below a"),
    ("✗", "rejected", "rejected: its coin was a or more"),
    ("·", "faint", "not tried: the path ended or took another branch"),
    ("≈", "warn", "near tie: rounding could flip it"),
    ("»", "strong", "the final token; in a fork, the first difference"),
    ("▮▯", "accepted-strong", "accepted depth / depth of the tree"),
)
COLOURS: tuple[tuple[str, Ink, str], ...] = (
    ("accepted", "accepted", "drafted and accepted"),
    ("recovered", "recovered", "after a rejection: from the residual; greedy: the target's top token"),
    ("bonus", "bonus", "drawn after a fully accepted path"),
    ("target", "target", "drawn when nothing was drafted"),
)
FIGURES = ("raw_p", "p", "q", "draft_p", "p_tried", "q_tried", "u", "a", "residual")  # of a node, on the screens
RATES: tuple[tuple[str, str], ...] = (
    ("τ", "mean acceptance length: 1 + accepted / drafts"),
    ("nodes", "draft acceptance rate: accepted / drafted nodes"),
    ("depth", "accepted depth / depth of the tree"),
    ("corrected", "accepted at the depth / drafts that proposed it"),
    ("cond", "conditional rate: accepted / tried this deep"),
    ("tokens", "output tokens so far"),
)
ASKING = ("ask_prompt", "cancel")  # what only an engine that takes commands can do


def foot(*, main: bool = False, **ranks: int) -> tuple[Key, ...]:
    """Keys of the app that stand at a screen's foot, with their ranks there; on the main one when they do something."""
    by_action, made = {key.action: key for key in KEYS}, []
    for name, rank in ranks.items():
        action, label, word, when = FOOT[name]
        when = when if main else "always"
        key = by_action[action]
        made.append(replace(key, action=f"app.{action}", label=label, word=word, rank=rank, when=when))
    return tuple(made)


def of_app(*actions: str) -> tuple[Key, ...]:
    """Keys of the app that work over another screen, and do not stand at its foot."""
    return tuple(Key(key.keys, f"app.{key.action}", key.command) for key in KEYS if key.action in actions)


def bound(keys: Iterable[Key]) -> list[BindingType]:
    from textual.binding import Binding

    return [Binding(key.keys, key.action, key.command, show=False) for key in keys if key.keys]


def hidden(**actions: str) -> list[BindingType]:
    """The keys of a panel, which stand nowhere."""
    from textual.binding import Binding

    return [Binding(key, action, show=False) for key, action in actions.items()]


MOVING = of_app(  # over the main screen they show what they moved to
    *("pause", "forward", "backward", "jump(1)", "jump(-1)", "first", "last", "ask_step", "rejection(1)"),
    *("rejection(-1)", "choose(1)", "choose(-1)", "ask_search", "copy_reference", "console", "help"),
    *("filter", "sort(1)", "sort(-1)"),
)
ALONE = (  # of screens over no other: the app's own do not reach a modal one
    Key("ctrl+c", "app.quit", "Quit"),
    Key("tab", "app.focus_next", "Next panel", "Tab", help="next panel; the arrow keys scroll it"),
    Key("shift+tab", "app.focus_previous", "Previous panel"),
)
MAIN = foot(
    main=True,
    **{"pause": 0, "move": 1, "rejection": 4, "decisions": 3, "request": 6, "analysis": 5, "counted": 3},
    **{"next_engine": 4, "debug": 8, "breakpoints": 8, "engine": 10, "fork": 8, "filter": 10, "sort": 11},
    **{"prompt": 11, "cancel": 12, "go_to": 13, "scope": 14, "theme": 16, "help": 2, "quit": 9},
)
