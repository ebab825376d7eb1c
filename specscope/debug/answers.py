"""What an engine and its debugger tell a screen, each a type of its own: nobody guesses what a text is."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.debug.stops import Stop


@dataclass(frozen=True)
class Answer:
    """What a typed line printed, or a command of a breakpoint."""

    line: str
    text: str
    stop: Stop | None = None  # where it stopped the run, if it moved it


@dataclass(frozen=True)
class LineRefused:
    """A typed line that could not be run."""

    line: str
    why: str


@dataclass(frozen=True)
class LookRefused:
    """A node's distributions that cannot be shown; `node`: None for the final token."""

    step: int
    request: str
    node: int | None
    why: str


@dataclass(frozen=True)
class PromptRefused:
    """A new prompt that the engine did not take."""

    why: str


@dataclass(frozen=True)
class Notice:
    """Something that was not asked for."""

    text: str


News = Stop | Answer | LineRefused | LookRefused | PromptRefused | Notice  # a Stop by itself: a breakpoint's
