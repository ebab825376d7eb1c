"""Calls in progress: the Router passes each step's records to the HTTP requests that wait for them.

Everything here runs on the event loop, and knows about the engine only what its records say.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specscope.engine.prompts import Encoded
from specscope.serve.errors import ApiError
from specscope.serve.logprobs import TokenLogprobs, emitted_logprobs
from specscope.trace.record.records import FinishReason, RequestEnd, RequestStep, StepRecord
from specscope.trace.record.vocabulary import Detokenizer, Vocabulary, stop_begins


class TextStream:
    """Text of a growing output. What may be the beginning of a stop string is held back until it is known not to be."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        """`keep_stop`: whether the stop string that ends the output belongs to it."""
        self._detokenizer, self.places = Detokenizer(vocabulary), Detokenizer(vocabulary)  # `places`: of logprobs
        self._stops, self._keep_stop = stops, keep_stop
        self._held = ""

    def feed(self, tokens: Sequence[int]) -> str:
        """The characters that these tokens complete and that may be sent."""
        self._held += self._detokenizer.feed(tokens)
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        sent, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sent

    def end(self, tokens: Sequence[int], stop: str) -> str:
        """The last characters. `stop`: the stop string that ended the output, "" where none did."""
        text = self._held + self._detokenizer.feed(tokens[:-1])
        before, self._held = len(text), ""
        text += self._detokenizer.feed(tokens[-1:]) + self._detokenizer.flush()
        if not stop:
            return text
        return text[: stop_begins(text, before, stop) + (len(stop) if self._keep_stop else 0)]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are a proper beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


Finish = Literal["stop", "length"]
# Finish reasons that are answers; the others become errors
ANSWERS: Mapping[FinishReason, Finish] = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass
class ChoicePiece:
    """What a step adds to a choice."""

    choice: OutputChoice
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish: Finish | None  # on the last one


@dataclass
class OutputChoice:
    name: str  # the engine's request
    index: int
    prompt: Encoded
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of each token, where they were requested
    finish: Finish | None = None
    stop: str | int | None = None  # the stop string or token that ended it

    def take(self, part: RequestStep, end: RequestEnd | None) -> ChoicePiece | None:
        """What a step adds; None where it adds nothing. A step that a debugger reran adds nothing the second time.

        The first output token of a step has the position after the root's.
        """
        begins = part.position + 1 - len(self.prompt.tokens)
        new = part.output()[max(len(self.tokens) - begins, 0) :] if part.verdict is not None else []
        self.tokens += new
        self.logprobs += emitted_logprobs(part, len(new), self.stream.places)
        return self.end(end, new) if end is not None else self._add(self.stream.feed(new), new)

    def end(self, end: RequestEnd, new: Sequence[int] = ()) -> ChoicePiece | None:
        """The last piece. Raises ApiError where the request failed or was cancelled."""
        if end.reason not in ANSWERS:
            error = end.reason is FinishReason.ERROR
            raise ApiError(500, end.error) if error else ApiError(503, "the request was cancelled")
        self.finish, self.stop = ANSWERS[end.reason], end.stop or None
        if end.reason is FinishReason.STOP and not end.stop and self.tokens:
            self.stop = self.tokens[-1]  # one of stop_token_ids
        return self._add(self.stream.end(new, end.stop), new)

    def _add(self, text: str, new: Sequence[int]) -> ChoicePiece | None:
        self.text += text
        if not (new or text or self.finish):
            return None
        logprobs = self.logprobs[len(self.logprobs) - len(new) :] if self.logprobs else []
        return ChoicePiece(self, text, list(new), logprobs, self.finish)


class Call:
    """One HTTP request: its choices, and the pieces that have not been sent yet."""

    def __init__(self, name: str, choices: Sequence[OutputChoice], cancel: Callable[[str], None]) -> None:
        self.name, self.choices, self._cancel = name, choices, cancel
        self._left = {choice.name for choice in choices}
        self._pieces: deque[ChoicePiece] = deque()
        self._news = asyncio.Event()
        self._failure: ApiError | None = None
        self._closed = False

    def put(self, piece: ChoicePiece) -> None:
        if not self._closed:
            self._pieces.append(piece)
            self._news.set()

    def done(self, name: str) -> None:
        self._left.discard(name)
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """End the call with an error: nothing more will come."""
        self._failure = self._failure or error
        self.close()

    def close(self) -> None:
        """The client no longer waits: cancel what still runs."""
        self._closed = True
        for name in self._left:
            self._cancel(name)
        self._news.set()

    async def pieces(self) -> AsyncIterator[ChoicePiece]:
        """The pieces as they come, until all choices have ended. Raises ApiError."""
        while True:
            self._news.clear()
            while self._pieces:
                yield self._pieces.popleft()
            if self._failure is not None:
                raise self._failure
            if not self._left or self._closed:
                return
            await self._news.wait()


class Router:
    """Which call each of the engine's requests belongs to."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[Call, OutputChoice]] = {}
        self.empty = asyncio.Event()
        self.empty.set()

    def __len__(self) -> int:
        """Requests that have not ended, including cancelled ones until the engine has released them."""
        return len(self._places)

    def add(self, call: Call) -> None:
        """Pass records to this call from now on."""
        self._places |= {choice.name: (call, choice) for choice in call.choices}
        self.empty.clear()

    def drop(self, names: Sequence[str]) -> None:
        """Forget requests that have ended, or were refused."""
        for name in names:
            self._places.pop(name, None)
        if not self._places:
            self.empty.set()

    def take(self, record: StepRecord) -> None:
        """Pass one step's parts to their calls."""
        ends = {end.info.id: end for end in record.finished}
        for part in record.requests:
            self._tell(part.request, part, ends.get(part.request))
        for name, end in ends.items():
            self._tell(name, None, end)
        self.drop(list(ends))

    def _tell(self, name: str, part: RequestStep | None, end: RequestEnd | None) -> None:
        if name not in self._places:
            return
        call, choice = self._places[name]
        try:
            piece = choice.take(part, end) if part is not None else choice.end(end) if end is not None else None
        except ApiError as error:
            self.drop([name])
            call.done(name)
            call.fail(error)
            return
        if piece is not None:
            call.put(piece)
        if end is not None:
            self.drop([name])
            call.done(name)

    def fail_all(self, error: ApiError) -> None:
        """End every call in progress with an error."""
        for call, _ in list(self._places.values()):
            call.fail(error)
