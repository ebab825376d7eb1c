"""An audit's passes. A capture may hold anything: a request on which a judge fails is left out and named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.block import BlockHead
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.model.judge import (
    AskedRows,
    DrafterJudge,
    TargetJudge,
    allowed_error,
    by_ask,
    drafter_asks,
    judge_fed,
)
from specscope.analyze.audit.model.mtp import Modules
from specscope.analyze.audit.model.rules import RequestForms
from specscope.analyze.audit.options import ModelSource, Options, Progress
from specscope.analyze.audit.tally import EMBEDDING, FED, TARGET, Tallies
from specscope.analyze.findings import CheckResult, Finding
from specscope.errors import UserError, first_line
from specscope.plans.kinds import model_part, runs_head, text_part
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import ROUNDING

REQUESTS, TOKENS, STEPS = 4, 96, 16  # that rounding is measured on: requests, and of each the tokens and steps
BRANCHES = 4  # rows beside the text of each that are measured
WIDEST = 8  # tokens of a row that are compared
SAFETY = 2.5  # the largest deviation seen among about a thousand, times this, is still rounding
HEAD_SAFETY = 4.0  # of a head: each level is fed what the last one rounded, and 3.1 times was seen among 5,000
HEAD_LEAST = 16.0  # in float32, of the least that rounding may do: a level doubles it. 9 times was seen at depth 5
ABSURD = 10.0  # times the usual rounding: more cannot be rounding
ALIKE = 0.3  # cosine: rows of two unrelated embeddings lie within a few hundredths of 0, copies at 1
LEAST_KNOWN = "bfloat16"  # where a capture does not say its dtype
# How a judge fails on unexpected input: shapes, places, numbers
FAULTS = (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError)
Judge = TargetJudge | DrafterJudge
RowsOf = Callable[[Contexts], Iterator[AskedRows]]
Scores = Iterator[tuple[Any, Tensor]]  # by any key, a row of log probabilities
HEADS: Mapping[str, Callable[[ModelSource, Any], Head]] = {"eagle": Head, "dflash": BlockHead, "mtp": Modules}


def head_of(source: ModelSource, target: Any) -> Head:  # noqa: ANN401
    """The reference of a head over the transformers model that it continues. Raises UserError."""
    return HEADS[source.kind](source, target)


def failure(error: BaseException) -> str:
    """Why a judge did not run, in a line."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


@dataclass
class Passes:
    """The models of one audit: each judges what it can; what none can judge is told."""

    run: RunInfo
    options: Options
    plans: list[Contexts]
    tallies: Tallies
    top: int  # beside text lookup, how many of the likeliest tokens the drafter's model drafts at a node
    progress: Progress
    unjudged: list[str]  # what could not be judged: a sentence each, with the reason
    slack: float = 0.0  # how far rounding may move the target's log odds
    draft_slack: float = 0.0  # the drafter's
    embedding: Finding | None = None  # on a head's own, where it has one
    head: Head | None = None  # over the target's features, once they are known
    why_no_head: str = "the target's features are not known"
    features: dict[str, Tensor] = field(default_factory=dict)  # of each request, along its text
    forms: RequestForms | None = None
    rounded: list[tuple[Contexts, Tensor | None]] = field(default_factory=list)  # some texts', in the capture's dtype

    @property
    def steps(self) -> int:
        return sum(len(contexts.steps) for contexts in self.plans)

    def judge(self) -> None:
        """Judge target and drafter. Raises UserError where the target cannot judge at all."""
        self.progress("target", 0, self.steps)
        try:
            all_judged = self._target()
            limits = dict.fromkeys(name for contexts in self.plans if contexts.steps for name in contexts.limits)
            if all_judged and limits and not any(self.tallies[name].items for name in TARGET):
                why = f"{', '.join(limits)} limit every request in a way that is not in the capture"
                self.unjudged.append(f"The target was not judged: {why}.")
        except FAULTS as error:
            self.unjudged.append(f"The target was not judged: {failure(error)}.")
        self.progress("drafter", 0, self.steps)
        try:
            why = self._drafter()
        except (UserError, *FAULTS) as error:
            why = failure(error)
        if why:
            of_model = "'s model" if text_part(self.run.drafter) else ""  # beside text lookup, only that is not judged
            self.unjudged.append(f"The drafter{of_model} was not judged: {why}.")

    def _each(
        self, kind: type[Judge], plans: Sequence[Contexts], forms: RequestForms | None, slack: float, rows: RowsOf
    ) -> bool:
        """Judge the rows of each request; one on which that fails is left out. Whether none was."""
        lost, done = list[tuple[str, str]](), 0
        for contexts in plans:
            try:
                of_request = kind(contexts, slack, self.tallies, forms, self.top)
                for asked, logits in rows(contexts):
                    of_request.take(asked, logits)
            except (UserError, *FAULTS) as error:
                lost.append((contexts.request, failure(error)))
            done += len(contexts.steps)
            self.progress(kind.who, done, self.steps)
        for first, why in lost[:1]:
            where = f"{plural(len(lost), 'request')}, the first {first}"
            self.unjudged.append(f"The {kind.who} was not judged at {where}: {why}.")
        return not lost

    def _target(self) -> bool:
        """Judge the target at every plan's rows; whether all requests were. Raises UserError."""
        source, draft, head, why = self.options.target, self.options.draft, None, ""
        causal = Causal(source, self.run.dtype)
        self.forms = RequestForms(source, causal.vocab, self.run.eos_tokens)
        self.plans[:] = [contexts.within(causal.vocab) for contexts in self.plans]
        if draft is not None and runs_head(self.run.drafter):
            try:
                head = head_of(draft, causal.model)
            except UserError as error:
                why = str(error)
        layers = () if head is None else head.layers
        short = _short(self.plans)
        rounded = [(contexts, causal.alone(contexts.text, layers)[1]) for contexts in short if layers]
        self.slack = calibrate(causal, self.run.dtype, short)
        pieces: dict[str, list[Tensor]] = {contexts.request: [torch.zeros(0)] for contexts in self.plans}

        def rows(contexts: Contexts) -> Iterator[AskedRows]:
            asks = contexts.asks()
            for some, piece in causal.rows(contexts, layers):
                if piece is not None:
                    pieces[contexts.request].append(piece)
                yield from by_ask([some], asks)

        all_judged = self._each(TargetJudge, self.plans, self.forms, self.slack, rows)
        self.features = {request: torch.cat(parts) for request, parts in pieces.items()}
        if head is not None:
            pairs = [(low, self.features[contexts.request]) for contexts, low in rounded if low is not None]
            judge_fed(causal, layers, self.plans, self.features, allowed_error(pairs, len(layers)), self.tallies[FED])
        self.head, self.why_no_head, self.rounded = head, why, rounded
        return all_judged

    def _drafter(self) -> str:
        """Judge the drafter's model; returns why that was not possible, or "". Raises UserError."""
        part, source = model_part(self.run.drafter), self.options.draft
        if not part or source is None:
            return self.options.why_no_draft
        if runs_head(part):
            if self.head is not None:
                self._head(self.head)
            return "" if self.head is not None else self.why_no_head
        causal = Causal(source, self.run.dtype)
        forms = RequestForms(source, causal.vocab, self.run.eos_tokens)
        plans = [contexts.within(causal.vocab) for contexts in self.plans]
        self.draft_slack = calibrate(causal, self.run.dtype, _short(plans))
        by_asks = lambda each: by_ask((rows for rows, _ in causal.rows(each)), drafter_asks(each))  # noqa: E731
        self._each(DrafterJudge, plans, forms, self.draft_slack, by_asks)
        return ""

    def _head(self, head: Head) -> None:
        """Judge a head over the target's true features."""
        self._embedding(head)
        # How far rounding goes: in the capture's dtype (of float32, in double precision: else all was the same) over
        # features of that dtype, in float32 over the judge's
        head.to(torch.float64 if self.run.dtype == "float32" else getattr(torch, self.run.dtype))
        known = _likeliest(pair for each in self.rounded for pair in _of_head(head, *each))
        head.to(torch.float32)
        scores = (pair for each, _ in self.rounded for pair in _of_head(head, each, self.features[each.request]))
        levels = self.run.dtype == "float32" and head.mask_token is None  # each is fed what the one above it gave
        self.draft_slack = _slack(self.run.dtype, known, scores, HEAD_SAFETY, HEAD_LEAST if levels else 1)
        rows = lambda each: _drafted(head, each, self.features[each.request])  # noqa: E731
        self._each(DrafterJudge, self.plans, self.forms, self.draft_slack, rows)

    def _embedding(self, head: Head) -> None:
        """Check that a head's own embedding, where it has one, agrees with the target's."""
        likeness = head.likeness(sorted({token for contexts in self.plans for token in contexts.text}))
        if likeness is None or not len(likeness):
            return
        strange = int((likeness < ALIKE).sum())
        result = CheckResult.FAILED if strange > len(likeness) / 2 else CheckResult.PASSED
        detail = f"mean cosine {float(likeness.mean()):.2f} over {plural(len(likeness), 'token')} of the texts"
        self.embedding = Finding(EMBEDDING[0], result, EMBEDDING[1], len(likeness), strange, None, detail, "", "token")


def calibrate(causal: Causal, dtype: str, short: Sequence[Contexts]) -> float:
    """How far rounding moves a token's log probability. Afterwards the model runs in float32.

    Some contexts are run twice: each by itself in the capture's dtype, and packed in float32 as the audit runs them.
    """
    known = _likeliest(pair for contexts in short for pair in _alone(causal, contexts))
    causal.exact()
    packed = (
        ((contexts.request, row), scores)
        for contexts in short
        for (rows, logits), _ in causal.rows(contexts)
        for row, scores in zip(rows, logits.log_softmax(-1), strict=True)
    )
    return _slack(dtype, known, packed, SAFETY)


def _likeliest(scores: Scores) -> dict[Any, tuple[Tensor, Tensor]]:
    """The log probabilities of each row's likeliest tokens, and these."""
    best = ((key, row.topk(min(WIDEST, int((row > -torch.inf).sum())))) for key, row in scores)
    return {key: (top.values, top.indices) for key, top in best}


def _slack(
    dtype: str, known: Mapping[Any, tuple[Tensor, Tensor]], scores: Scores, safety: float, times: float = 1
) -> float:
    """What rounding explains, from the largest deviation of these scores from those known in the capture's dtype, at
    least so many `times` what that rounds by.

    Raises UserError where they differ by more than rounding: such a judge would pass all.
    """
    off = [float((row[known[key][1]] - known[key][0]).abs().max()) for key, row in scores if key in known]
    largest, least = max([0.0, *off]), 4 * times * ROUNDING.get(dtype, ROUNDING[LEAST_KNOWN])
    if largest > ABSURD * times * least:
        why = f"log probabilities computed in two ways differ by {largest:.2g}, far more than {dtype} rounding"
        raise UserError(f"the judge disagrees with itself: {why}; this model cannot be audited")
    return max(least, safety * largest)


def _short(plans: Iterable[Contexts]) -> list[Contexts]:
    """What rounding is measured on: the first steps of some requests, and as much of the text as they attend to."""
    judged = [contexts for contexts in plans if contexts.steps]
    short = []
    for contexts in judged[:: max(1, len(judged) // REQUESTS)][:REQUESTS]:
        steps = ([step for step in contexts.steps if step.part.position + 1 < TOKENS] or contexts.steps)[:STEPS]
        short.append(contexts.of(steps, max(step.part.position + 1 for step in steps)))
    return short


def _alone(causal: Causal, contexts: Contexts) -> Scores:
    """The scores at each row that is needed, each context run by itself; of those beside the text at some."""
    asked, length = list(contexts.asks()), len(contexts.text)
    text, branches = causal.alone(contexts.text)[0].log_softmax(-1), [row for row in asked if row >= length]
    for row in (*(row for row in asked if row < length), *branches[:: max(1, len(branches) // BRANCHES)][:BRANCHES]):
        alone = text[row] if row < length else causal.alone(contexts.context(row))[0][-1].log_softmax(-1)
        yield (contexts.request, row), alone


def _drafted(head: Head, contexts: Contexts, features: Tensor) -> Iterator[AskedRows]:
    asked = [ask for asks in drafter_asks(contexts).values() for ask in asks]
    return head.rows(contexts, features[: len(contexts.text)], asked)


def _of_head(head: Head, contexts: Contexts, features: Tensor | None) -> Scores:
    assert features is not None
    for asked, logits in _drafted(head, contexts, features):
        for (step, node), row in zip(asked, logits.log_softmax(-1), strict=True):
            yield (contexts.request, step.part.index, node), row
