"""What an engine and its debugger tell a screen, each a type of its own: nobody guesses what a text is."""

from __future__ import annotations

from dataclasses import dataclass

from specscope.debug.stops import Stop


@dataclass(frozen=True)
class Answer:
    """What a line printed: a typed one, or a command of a breakpoint."""

    line: str
    text: str
    stop: Stop | None = None  # where it stopped the run, if it moved it


@dataclass(frozen=True)
class Stopped:
    """A running engine came to a breakpoint, whose commands answered this."""

    stop: Stop
    answers: tuple[Answer, ...] = ()

    @property
    def last(self) -> Stop:
        """Where it is now: the commands may have run on."""
        return (self.answers[-1].stop if self.answers else None) or self.stop


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


News = Stopped | Answer | LineRefused | LookRefused | PromptRefused | Notice
