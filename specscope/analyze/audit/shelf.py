"""Which texts of earlier requests suffix decoding could search, step by step, as the capture records them."""

from __future__ import annotations

from dataclasses import dataclass, field

from specscope.trace.history.history import History, RequestHistory


@dataclass
class EndedTexts:
    """Texts of requests that ended, in that order; at most `limit` tokens, the oldest text is dropped first."""

    limit: int
    ended: list[tuple[int, str, list[int]]] = field(default_factory=list)  # (the step in which it ended, id, text)
    unsure: int | None = None  # from this step on it is not known what was kept

    @staticmethod
    def of(history: History, limit: int) -> EndedTexts:
        """What a run kept. Requests that were preempted, cancelled or rerun leave texts of other lengths."""
        texts = EndedTexts(limit)
        if history.rewinds or len(history.branches) > 1 or history.lost:
            texts.unsure = 0
        for record in history.steps:
            decoding = [part.request for part in record.requests if part.verdict is not None]
            ended = {end.info.id for end in record.finished}
            if texts.unsure is None and (record.preempted or ended - set(decoding)):
                texts.unsure = record.step
            for name in (request for request in decoding if request in ended):
                text = _text(history.requests[name])
                if text is None and texts.unsure is None:
                    texts.unsure = record.step
                texts.ended.append((record.step, name, text or []))
        return texts

    def before(self, step: int, request: str) -> list[list[int]] | None:
        """The texts of others that a request could search in a step, the oldest first; None where not known."""
        if self.unsure is not None and step >= self.unsure:
            return None
        texts: dict[str, list[int]] = {}
        for _, name, text in (entry for entry in self.ended if entry[0] < step):
            texts.pop(name, None)
            texts[name] = text[-self.limit :]
            while sum(map(len, texts.values())) > self.limit:
                del texts[next(iter(texts))]
        return [text for name, text in texts.items() if name != request]


def _text(request: RequestHistory) -> list[int] | None:
    """Prompt and output up to the last root, as the drafter saw them. None where the prompt is not known."""
    info = request.info
    if info is None or not len(info.prompt_tokens) or not request.steps or request.steps[0].index != 0:
        return None
    last = request.steps[-1]
    return request.before(len(request.steps) - 1, last.position + 1)
