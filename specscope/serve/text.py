"""TextStream: an output's text as it may be sent, which never holds a part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from specscope.trace.record.vocabulary import Detokenizer, Vocabulary, stop_begins


class TextStream:
    """Text of a growing output. What may be the beginning of a stop string waits until it is known not to be one."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        """`keep_stop`: whether the stop string that ends the output belongs to it."""
        self.vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary)
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
    """How many characters at the end of `text` begin `stop`, and are not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
