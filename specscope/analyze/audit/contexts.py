"""What a model must be fed to judge the steps of a request: its text once, and the drafted tokens as branches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from specscope.analyze.findings import Reference
from specscope.trace.history.history import History
from specscope.trace.record.params import RELAXED, SamplingParams, unknown_limits, untold_limits
from specscope.trace.record.records import RequestStep, Verdict
from specscope.trace.record.tree import ROOT


@dataclass(frozen=True)
class AuditedStep:
    """A decode step that is audited. A row is a model's output after a context, of the text or of a branch."""

    part: RequestStep
    where: Reference
    rows: dict[int, int]  # the row below ROOT and below each node that has children or ends the accepted path

    @property
    def verdict(self) -> Verdict:
        assert self.part.verdict is not None
        return self.part.verdict

    @property
    def leaf(self) -> int:
        """Where the accepted path ends: the final token was drawn there."""
        return int(self.verdict.path[-1]) if len(self.verdict.path) else ROOT

    def at(self, node: int | None) -> Reference:
        return replace(self.where, node=node)


Ask = tuple[AuditedStep, int]  # a step, and the parent whose children's probabilities are asked for


@dataclass
class Contexts:
    """A request's contexts. Rows 0 to L - 1 are those of its text, one a token; branches follow from L on."""

    request: str
    params: SamplingParams
    text: list[int]  # prompt and output
    prompt_len: int
    drafter_params: SamplingParams  # as far as the drafter applies them
    limits: tuple[str, ...]  # what limits its tokens in a way that the capture does not record: p is not computed again
    raw_is_masked: bool  # whether raw p is recorded after the form's mask
    steps: list[AuditedStep] = field(default_factory=list)
    token: list[int] = field(default_factory=list)  # of each branch row
    parent: list[int] = field(default_factory=list)  # the row before it
    unknown: list[tuple[Reference, str]] = field(default_factory=list)  # steps that cannot be judged, and why

    def of(self, steps: Iterable[AuditedStep], end: int) -> Contexts:
        """Some steps alone, over the first `end` tokens of the text."""
        made = replace(self, text=self.text[:end], prompt_len=min(self.prompt_len, end))
        made.steps, made.token, made.parent, made.unknown = [], [], [], []
        for step in steps:
            made.add(step.part, step.where)
        return made

    def within(self, vocab: int) -> Contexts:
        """Without the steps that hold a token outside a model's vocabulary of this size: these are `unknown`."""
        end = next((index for index, token in enumerate(self.text) if not 0 <= token < vocab), len(self.text))
        kept, unknown = list[AuditedStep](), list(self.unknown)
        for step in self.steps:
            beyond = [t for t in (*step.part.tree.token.tolist(), step.verdict.token) if not 0 <= t < vocab]
            what = f"token {beyond[0]} is" if beyond else "an earlier token is" if step.part.position >= end else ""
            kept += [] if what else [step]
            unknown += [(step.where, f"{what} outside the model's vocabulary of {vocab:,}")] if what else []
        return replace(self.of(kept, end), unknown=unknown)

    def context(self, row: int) -> list[int]:
        """All tokens up to and including that row."""
        path = list[int]()
        while (branch := row - len(self.text)) >= 0:
            path, row = [self.token[branch], *path], self.parent[branch]
        return [*self.text[: row + 1], *path]

    def output(self, row: int) -> list[int]:
        """What penalties count as output there."""
        return self.context(row)[self.prompt_len :]

    def asks(self) -> dict[int, list[Ask]]:
        """By row, ascending, what the steps need there."""
        asks: dict[int, list[Ask]] = defaultdict(list)
        for step in self.steps:
            for parent, row in step.rows.items():
                asks[row].append((step, parent))
        return dict(sorted(asks.items()))

    def branches(self, limit: int) -> Iterator[range]:
        """Branch rows in pieces of up to `limit`, more where one step has more; a step's rows are never split."""
        start, length = len(self.text), len(self.text)
        for step in self.steps:
            end = max(step.rows.values(), default=0) + 1
            if end - start > limit and length > start:
                yield range(start, length)
                start = length
            length = max(length, end)
        if length > start:
            yield range(start, length)

    def add(self, part: RequestStep, where: Reference) -> None:
        """One more step to judge; its root is the text's token at its position."""
        branch_rows: dict[tuple[int, int], int] = {}  # (row, token) to the row after it: of this step's branches
        rows = {ROOT: part.position}
        inner = {*part.tree.parent.tolist(), *([] if part.verdict is None else part.verdict.path.tolist())}
        for node, (token, above) in enumerate(zip(part.tree.token.tolist(), part.tree.parent.tolist(), strict=True)):
            if node not in inner:
                continue
            row = rows[above]
            if self.text[row + 1 : row + 2] == [token]:  # the text continues with it
                rows[node] = row + 1
                continue
            if (row, token) not in branch_rows:
                branch_rows[row, token] = len(self.text) + len(self.token)
                self.token.append(token)
                self.parent.append(row)
            rows[node] = branch_rows[row, token]
        self.steps.append(AuditedStep(part, where, rows))


def contexts_of(history: History, name: str, places: Collection[int]) -> Contexts | None:
    """What is needed to judge the steps at `places` of a request; None where the text before them is not known. A step
    whose root is not the text's last token is unknown.
    """
    request, run = history.requests[name], history.run
    info, earlier = request.info, request.earlier()
    if info is None or not len(info.prompt_tokens) or not request.steps or earlier is None or run is None:
        return None
    limits = untold_limits(info.params) if run.is_ours else unknown_limits(info.params, info.labels)
    if run.ways.relaxes_penalties and info.params.penalised:
        limits = (*limits, RELAXED)
    prompt: list[int] = info.prompt_tokens.tolist()
    text, drafter = [*prompt, *earlier, *(t for t, _ in request.output())], run.ways.drafter_params(info.params)
    contexts = Contexts(name, info.params, text, len(prompt), drafter, limits, run.ways.raw_is_masked)
    wanted, length = set(places), len(prompt) + len(earlier)
    for place, part in enumerate(request.steps):
        if place in wanted and part.verdict is not None:
            where = Reference(name, part.index, history.steps[request.engine_steps[place]].step)
            if length == part.position + 1:
                contexts.add(part, where)
            else:
                contexts.unknown.append((where, "its position is not the last committed token's"))
        length += len(part.output())
    return contexts
