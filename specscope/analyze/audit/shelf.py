"""Which texts of earlier requests suffix decoding could look into, step by step, as the capture tells them."""

from __future__ import annotations

from dataclasses import dataclass, field

from specscope.trace.history.history import History, RequestHistory


@dataclass
class EndedTexts:
    """Texts of requests that ended, in the order in which they did; `most` tokens at most, the oldest goes first."""

    most: int
    ended: list[tuple[int, str, list[int]]] = field(default_factory=list)  # (the step in which it ended, id, text)
    unsure: int | None = None  # from this step on it is not known what was kept

    @staticmethod
    def of(history: History, most: int) -> EndedTexts:
        """What a run kept. Requests that lost their place, were cancelled or run again leave texts of other lengths."""
        found = EndedTexts(most)
        if history.rewinds or len(history.branches) > 1 or history.lost:
            found.unsure = 0
        for record in history.steps:
            decoding = [part.request for part in record.requests if part.verdict is not None]
            ended = {end.info.id for end in record.finished}
            if found.unsure is None and (record.preempted or ended - set(decoding)):
                found.unsure = record.step
            for name in (one for one in decoding if one in ended):
                text = _text(history.requests[name])
                if text is None and found.unsure is None:
                    found.unsure = record.step
                found.ended.append((record.step, name, text or []))
        return found

    def before(self, step: int, request: str) -> list[list[int]] | None:
        """The texts of others that a request could look into in a step, the oldest first; None where not known."""
        if self.unsure is not None and step >= self.unsure:
            return None
        kept: dict[str, list[int]] = {}
        for _, name, text in (one for one in self.ended if one[0] < step):
            kept.pop(name, None)
            kept[name] = text[-self.most :]
            while sum(map(len, kept.values())) > self.most:
                del kept[next(iter(kept))]
        return [text for name, text in kept.items() if name != request]


def _text(request: RequestHistory) -> list[int] | None:
    """Prompt and output up to the last root: what the drafter saw of it. None where the prompt is not known."""
    info = request.info
    if info is None or not len(info.prompt_tokens) or not request.steps or request.steps[0].index != 0:
        return None
    last = request.steps[-1]
    return request.before(len(request.steps) - 1, last.position + 1)
