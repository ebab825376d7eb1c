"""What the text went on to be behind each root: what drafts are held against that no p judges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.evidence.columns import Columns
from specscope.trace.record.privacy import told_ids
from specscope.trace.record.tree import Bools, Doubles


@dataclass(frozen=True)
class Follows:
    """The texts of R requests end to end, prompts and outputs, and where each decode step's root stands in them."""

    request: Indices  # [S] the number of its request
    text: Indices  # [T] all tokens
    begins: Indices  # [R] where each request's text begins
    ends: Indices  # [R] and where it ends
    outputs: Indices  # [R] where its output begins
    behind: Indices  # [S] the place of the token behind the root

    @staticmethod
    def of(c: Columns) -> Follows:
        """Of all requests that have a decode step."""
        numbers: dict[str, int] = {}
        texts: list[list[int]] = []
        prompts: list[int] = []
        request, made = [], []  # of each step; its output tokens before
        count: list[int] = []
        for visit in c.visits:
            name = visit.request.id
            if name not in numbers:
                numbers[name] = len(texts)
                info = visit.request.info
                prompt = [] if info is None else told_ids(info.prompt_tokens) or []
                texts.append([*prompt, *(token for token, _ in visit.request.output())])
                prompts.append(len(prompt))
                count.append(
                    sum(part.emitted for part in visit.request.steps[: visit.request.place_of(visit.part.index)])
                )
            number = numbers[name]
            request.append(number)
            made.append(count[number])
            count[number] += visit.part.emitted
        lengths = np.array([len(text) for text in texts], np.int64)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        outputs = begins + np.array(prompts, np.int64)
        numbered = np.array(request, np.int64)
        behind = outputs[numbered] + np.array(made, np.int64) if len(texts) else np.zeros(0, np.int64)
        text = np.array([token for text in texts for token in text], np.int64)
        return Follows(numbered, text, begins, ends, outputs, behind)

    def at(self, step: Indices, depth: Indices) -> Indices:
        """The text's token at a depth below the root of each step, the first at 1; -1 outside of its text."""
        place = self.behind[step] + depth - 1
        number = self.request[step]
        inside = (place >= self.begins[number]) & (place < self.ends[number])
        return np.where(inside, self.text[np.where(inside, place, 0)] if len(self.text) else -1, -1)

    def by_request(self, hits: Bools, step: Indices) -> tuple[Doubles, Doubles]:
        """[R] hits, and how many there are, of items in these steps."""
        number, requests = self.request[step], len(self.begins)
        every = np.bincount(number, minlength=requests).astype(np.float64)
        return np.bincount(number, hits, requests).astype(np.float64), every
