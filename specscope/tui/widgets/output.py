"""The text of the current request, each token in the colour of where it came from."""

from __future__ import annotations

import codecs
from collections.abc import Hashable
from operator import attrgetter

from rich.cells import cell_len

from specscope.trace.history.history import RequestHistory
from specscope.trace.history.wording import ending, plural
from specscope.trace.record.records import FinishReason, Origin, RequestStep
from specscope.trace.record.vocabulary import Vocabulary, token_id
from specscope.tui.keys import hidden
from specscope.tui.look import Look
from specscope.tui.text import Ink, Line, clean, cut, fit, joined, show_token
from specscope.tui.widgets.lines import Panel, Sheet

PROMPT_CHARS = 4000  # of a long prompt the end is shown
INKS: dict[Origin, Ink] = {
    Origin.ACCEPTED: "accepted",
    Origin.RECOVERED: "recovered",
    Origin.BONUS: "bonus",
    Origin.TARGET: "target",
}


class OutputPanel(Panel):
    """Prompt, then output up to the position, the newest in view."""

    OF = attrgetter("look.current", "place", "end")

    BINDINGS = hidden(enter="app.open('request')", slash="app.ask_search")

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._wrapper = Wrapper(1)
        self._source: Hashable = None  # the request and width that the wrapper holds
        self._fed = self._next = 0  # steps of it that were fed, and the number that the next has where none is missing

    @property
    def place(self) -> tuple[int, bool]:
        """How many steps of the request are shown, and whether its prompt is known."""
        request = None if self.look is None else self.look.request
        if self.look is None or request is None:
            return 0, False
        return request.count_at(self.look.position), request.info is not None

    def draw(self, look: Look, width: int, height: int) -> Sheet:
        """The wrapped text; a legend in the title."""
        if look.request is None or look.current is None:
            return Sheet([[("no text yet", "faint")]], [("Output", "strong")])
        place = look.request.count_at(look.position)
        source = (look.current, width, look.request.info is not None, id(look.request))
        if source != self._source or place < self._fed:
            self._wrapper, self._source, self._fed, self._next = Wrapper(width), source, 0, 0
            feed_prompt(self._wrapper, look.request, look.vocabulary)
        for step in look.request.steps[self._fed : place]:
            if step.index > self._next:
                self._wrapper.note("…", "faint")
            self._next = step.index + 1
            feed_step(self._wrapper, step, look.vocabulary)
        self._fed = place
        lines = self._wrapper.lines()
        run = look.history.run
        lack = "" if run is None else run.privacy.lack
        lines += [[(f"— {remark}", "dim")] for remark in (self._missing, self.end, lack) if remark]
        return Sheet(lines, _title(look, place, width), keep=len(lines) - 1)

    @property
    def _missing(self) -> str:
        """How many tokens of an output that has ended lie in steps that are not here."""
        request = None if self.look is None or not self.end else self.look.request
        output = () if request is None or request.end is None else request.end.output
        missing = 0 if request is None else len(output) - request.totals.emitted(self.place[0])
        return f"{plural(missing, 'token')} in missing steps" if missing > 0 else ""

    @property
    def end(self) -> str:
        """Why the request ended, where it had by the position."""
        request = None if self.look is None else self.look.request
        end, ended = (None, None) if request is None else (request.end, request.ended)
        if self.look is None or end is None or ended is None or ended > self.look.position:
            return ""
        if end.reason is FinishReason.STOP and end.stop:
            return f"stopped at {clean(end.stop)!r}"
        return f"error: {clean(end.error)}" if end.reason is FinishReason.ERROR else f"ended: {ending(end.reason)}"


def feed_prompt(wrapper: Wrapper, request: RequestHistory, vocabulary: Vocabulary) -> None:
    """Add the prompt, its end where it is long, and a mark where the output begins on the same line."""
    if request.info is None:
        return
    info = request.info
    prompt = info.prompt or vocabulary.text(info.prompt_tokens[-PROMPT_CHARS:].tolist())
    wrapper.note(prompt if len(prompt) <= PROMPT_CHARS else "…" + prompt[-PROMPT_CHARS:], "prompt")
    if prompt and not prompt[-1].isspace():
        wrapper.note("▏", "faint")


def feed_step(wrapper: Wrapper, step: RequestStep, vocabulary: Vocabulary) -> None:
    """Add the output of a step, each token in the ink of its origin."""
    if step.verdict is None:
        return
    for token, origin in list(zip(step.tokens(), step.verdict.origins(), strict=True))[: step.emitted]:
        feed(wrapper, vocabulary, token, INKS[origin], "dim")


def output_line(step: RequestStep, vocabulary: Vocabulary, room: int) -> tuple[list[tuple[str, Ink]], int]:
    """The output of a step in at most `room` cells, each token in the ink of its origin; and the cells left over."""
    line: list[tuple[str, Ink]] = []
    for token, origin in zip(step.output(), () if step.verdict is None else step.verdict.origins(), strict=False):
        text = cut(show_token(vocabulary, token), max(room, 0))
        line.append((text, INKS[origin]))
        room -= cell_len(text)
    return line, max(room, 0)


def feed(wrapper: Wrapper, vocabulary: Vocabulary, token: int, ink: Ink, special: Ink) -> None:
    """Add a token: its bytes, or its id where they are unknown; special tokens stand apart."""
    piece = vocabulary.pieces.get(token)
    if piece is None:
        wrapper.note(f"{token_id(token)} ", ink)
    elif token in vocabulary.special:
        wrapper.note(clean(piece.decode("utf-8", "replace")), special)
    else:
        wrapper.feed(piece, ink)


def _title(look: Look, place: int, width: int) -> Line:
    """The request, its tokens, and the legend where there is room."""
    tokens = 0 if look.request is None else look.request.totals.emitted(place)
    legend: list[tuple[str, Ink]] = []
    for origin, ink in INKS.items():
        legend += [("■ ", ink), (f"{origin.value}  ", "dim")]
    legend[-1] = (legend[-1][0].rstrip(), "dim")
    name = clean(look.current or "")
    parts: list[tuple[int, Line]] = [
        (0, [("Output", "strong"), (f"  {name}", "dim")]),
        (2, [(plural(tokens, "token"), "dim")]),
        (1, legend),
    ]
    return fit(parts, width - 2)


class Wrapper:
    """Takes bytes and inks; gives lines of at most `width` cells, broken at spaces where there are any.

    A character whose bytes come with several tokens takes the ink of the one that completes it.
    """

    def __init__(self, width: int) -> None:
        self.width = max(1, width)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._done: list[Line] = []
        self._row: list[tuple[str, Ink]] = []  # the line that is being filled, a character each
        self._cells = 0
        self._space = -1  # index after the last space in the row

    def feed(self, piece: bytes, ink: Ink) -> None:
        """Add the text of a token."""
        for char in self._decoder.decode(piece):
            self._put(char, ink)

    def note(self, text: str, ink: Ink) -> None:
        """Add text that is not the model's; incomplete bytes are discarded."""
        for char in self._decoder.decode(b"", True) + text:
            self._put(char, ink)
        self._decoder.reset()

    def _put(self, char: str, ink: Ink) -> None:
        if char == "\n":
            self._break(len(self._row))
            return
        if char == "\t":
            char = " "
        elif not char.isprintable():
            for part in repr(char)[1:-1]:
                self._put(part, "dim")  # escaped
            return
        cells = cell_len(char)
        if self._cells + cells > self.width:
            if char == " ":
                self._break(len(self._row))
                return
            self._break(self._space if self._space > 0 else len(self._row))
        self._row.append((char, ink))
        self._cells += cells
        if char == " ":
            self._space = len(self._row)

    def _break(self, end: int) -> None:
        self._done.append(joined(self._row[:end]))
        self._row = self._row[end:]
        self._cells = sum(cell_len(char) for char, _ in self._row)
        self._space = -1

    def lines(self) -> list[Line]:
        """All lines, the unfinished one last."""
        return [*self._done, joined(self._row)] if self._row or not self._done else list(self._done)
