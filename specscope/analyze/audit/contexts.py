"""What a model must be fed to judge the steps of a request: its text once, and the drafted tokens as branches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specscope.analyze.findings import Reference
from specscope.trace.history.history import RequestHistory
from specscope.trace.record.params import RELAXED, SamplingParams, unknown_limits, untold_limits
from specscope.trace.record.records import RequestStep, RunInfo, Verdict
from specscope.trace.record.tree import ROOT


@dataclass(frozen=True)
class AuditedStep:
    """A decode step that is audited. A row is a model's output after a context, of the text or of a branch."""

    part: RequestStep
    where: Reference
    rows: dict[int, int]  # the row below ROOT and below each node that has children or ends the accepted path

    @property
    def verdict(self) -> Verdict:
        """What was decided."""
        assert self.part.verdict is not None
        return self.part.verdict

    @property
    def leaf(self) -> int:
        """Where the accepted path ends: the final token was drawn there."""
        return int(self.verdict.path[-1]) if len(self.verdict.path) else ROOT

    def at(self, node: int | None) -> Reference:
        """A node of the step as a reference."""
        return Reference(self.where.request, self.where.index, self.where.step, node)


@dataclass(frozen=True)
class Shaped:
    """What shaped a request's distributions. Filled by `shaped_by`."""

    drafter: SamplingParams  # as far as the drafter applies them
    limits: tuple[str, ...] = ()  # what limits its tokens in a way that the capture does not record
    raw_is_masked: bool = False  # whether raw p is recorded after the form's mask


@dataclass
class Contexts:
    """A request's contexts. Rows 0 to L - 1 are those of its text, one a token; branches follow from L on."""

    request: str
    params: SamplingParams
    text: list[int]  # prompt and output
    prompt_len: int
    steps: list[AuditedStep] = field(default_factory=list)
    token: list[int] = field(default_factory=list)  # of each branch row
    parent: list[int] = field(default_factory=list)  # the row before it
    unknown: list[tuple[Reference, str]] = field(default_factory=list)  # steps that cannot be judged, and why
    shaped: Shaped | None = None  # None: by `params` alone

    @property
    def drafter_params(self) -> SamplingParams:
        """What shaped the drafter's distributions."""
        return self.params if self.shaped is None else self.shaped.drafter

    @property
    def limits(self) -> tuple[str, ...]:
        """What limited its tokens, so that p cannot be computed again."""
        return () if self.shaped is None else self.shaped.limits

    def keep_within(self, vocab: int) -> None:
        """Move to `unknown` the steps that hold a token outside a model's vocabulary of this size."""
        end = next((index for index, token in enumerate(self.text) if not 0 <= token < vocab), len(self.text))
        steps, self.steps, self.token, self.parent = self.steps, [], [], []
        self.text = self.text[:end]
        for step in steps:
            position, tokens = step.rows[ROOT], step.part.tree.token.tolist()
            beyond = [token for token in (*tokens, step.verdict.token) if not 0 <= token < vocab]
            if beyond or position >= end:
                what = f"token {beyond[0]} is" if beyond else "a token before it is"
                self.unknown.append((step.where, f"{what} none of the {vocab:,} that the model has"))
            else:
                self.add(step.part, step.where, position)

    def context(self, row: int) -> list[int]:
        """All tokens up to and including that row."""
        path: list[int] = []
        while row >= len(self.text):
            path.append(self.token[row - len(self.text)])
            row = self.parent[row - len(self.text)]
        return [*self.text[: row + 1], *reversed(path)]

    def output(self, row: int) -> list[int]:
        """What penalties count as output there."""
        return self.context(row)[self.prompt_len :]

    def asked(self) -> list[int]:
        """The rows that any step needs, ascending."""
        return sorted({row for step in self.steps for row in step.rows.values()})

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

    def add(self, part: RequestStep, where: Reference, position: int) -> None:
        """One more step to judge; its root is the text's token at `position`."""
        branch_rows: dict[tuple[int, int], int] = {}  # (row, token) to the row after it: of this step's branches
        rows = {ROOT: position}
        inner = set(part.tree.parent.tolist())
        inner.update([] if part.verdict is None else part.verdict.path.tolist())
        for node, (token, above) in enumerate(zip(part.tree.token.tolist(), part.tree.parent.tolist(), strict=True)):
            if node in inner:
                rows[node] = self._after(rows[above], token, branch_rows)
        self.steps.append(AuditedStep(part, where, rows))

    def _after(self, row: int, token: int, branch_rows: dict[tuple[int, int], int]) -> int:
        """The row of a token after a row: the text's own row where the text continues with that token."""
        if row + 1 < len(self.text) and self.text[row + 1] == token:
            return row + 1
        if (row, token) not in branch_rows:
            branch_rows[row, token] = len(self.text) + len(self.token)
            self.token.append(token)
            self.parent.append(row)
        return branch_rows[row, token]


def shaped_by(run: RunInfo, request: RequestHistory) -> Shaped | None:
    """What shaped a request's distributions in a run; None where it is not known, and where its parameters alone do."""
    info = request.info
    if info is None or (run.is_ours and not untold_limits(info.params)):
        return None
    limits = untold_limits(info.params) if run.is_ours else unknown_limits(info.params, info.labels)
    if run.ways.relaxes_penalties and info.params.penalised:
        limits = (*limits, RELAXED)
    return Shaped(run.ways.drafter_params(info.params), limits, run.ways.raw_is_masked)


def contexts_of(
    request: RequestHistory, places: Sequence[int], steps: Sequence[int], run: RunInfo | None = None
) -> Contexts | None:
    """What is needed to judge the steps at `places` of a request; None where the text before them is not known.

    `steps`: the engine's step number of each of its steps. A step whose root is not the text's last token is unknown.
    """
    info = request.info
    earlier = request.earlier()
    if info is None or not len(info.prompt_tokens) or not request.steps or earlier is None:
        return None
    prompt: list[int] = info.prompt_tokens.tolist()
    text = [*prompt, *earlier, *(t for t, _ in request.output())]
    shaped = None if run is None else shaped_by(run, request)
    contexts = Contexts(request.id, info.params, text, len(prompt), shaped=shaped)
    wanted, length = set(places), len(prompt) + len(earlier)
    for place, part in enumerate(request.steps):
        if place in wanted and part.verdict is not None:
            where = Reference(request.id, part.index, steps[place])
            if length == part.position + 1:
                contexts.add(part, where, part.position)
            else:
                contexts.unknown.append((where, "its position is not that of the last committed token"))
        length += len(part.output())
    return contexts
