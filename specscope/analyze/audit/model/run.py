"""An audit's passes: load, measure how far rounding goes, then judge request by request.

A capture may hold anything. A request on which a judge fails is left out and named; the others are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.fed import allowed_error, judge_fed
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.model.judge import DrafterJudge, TargetJudge
from specscope.analyze.audit.options import ModelSource, Options
from specscope.analyze.audit.tally import EMBEDDING, Tally
from specscope.analyze.findings import CheckResult, Finding
from specscope.errors import UserError, first_line
from specscope.plans.heads import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part, text_part
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import ROUNDING

REQUESTS, TOKENS, STEPS = 4, 96, 16  # that rounding is measured on: requests, and of each the tokens and steps
BRANCHES = 4  # rows beside the text of each that are measured
WIDEST = 8  # tokens of a row that are compared
SAFETY = 2.5  # the largest deviation seen among about a thousand, times this, is still rounding
HEAD_SAFETY = 4.0  # of a head: each level is fed what the last one rounded, and 3.1 times was seen among 5,000
ABSURD = 10.0  # times the usual rounding: more cannot be rounding
ALIKE = 0.3  # cosine: rows of two unrelated embeddings lie within a few hundredths of 0, copies at 1
LEAST_KNOWN = "bfloat16"  # where a capture does not say its dtype
# How a judge fails on unexpected input: shapes, places, numbers
FAULTS = (UserError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError)


@dataclass
class Lost:
    """What could not be judged, and why: by request."""

    why: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def spared(self, request: str) -> Iterator[None]:
        """Record the failure of a request's judge, so that the others are still judged."""
        try:
            yield
        except FAULTS as error:
            self.why[request] = failure(error)

    def sentence(self, who: str) -> str:
        """What was lost in a sentence; "" where nothing was."""
        if not self.why:
            return ""
        first, why = next(iter(self.why.items()))
        return f"The {who} was not judged at {plural(len(self.why), 'request')}, the first {first}: {why}."


def failure(error: BaseException) -> str:
    """Why a judge did not run, in a line."""
    return first_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"


@dataclass
class Models:
    """The models of one audit: each judges what it can; what none can judge is reported."""

    run: RunInfo
    options: Options
    plans: list[Contexts]
    target: dict[str, Tally]
    drafter: dict[str, Tally]
    fed: Tally  # gets the rows that fed a head
    top: int  # beside text lookup, how many of the likeliest tokens the drafter's model drafts at a node
    begin: Callable[[str], None]  # is told what begins
    done: Callable[[int], None]  # is told how many more steps are judged
    unjudged: list[str] = field(default_factory=list)  # what could not be judged: a sentence each, with the reason
    slack: float = 0.0  # how far rounding may move the target's log odds
    draft_slack: float = 0.0  # the drafter's
    embedding: Finding | None = None  # on a head's own, where it has one
    head: Head | None = None  # over the target's features, once they are known
    why_no_head: str = "the target's features are not known"

    def judge(self) -> None:
        """Judge target and drafter. Raises UserError where the target cannot judge at all."""
        lost, ended = Lost(), False
        self.begin("target")
        try:
            self._target(lost)
            ended = True
        except UserError:
            raise
        except FAULTS as error:
            self.say(f"The target was not judged: {failure(error)}.")
        self.say(lost.sentence("target"))
        if ended and not lost.why and not any(tally.items for tally in self.target.values()):
            self.say(_nothing_of_target(self.plans))
        self.begin("drafter")
        try:
            why = self._drafter()
        except FAULTS as error:
            why = failure(error)
        of_model = "'s model" if text_part(self.run.drafter) else ""  # beside text lookup, only that is not judged
        self.say(why and f"The drafter{of_model} was not judged: {why}.")

    def say(self, sentence: str) -> None:
        """Note what could not be judged; "" for nothing."""
        if sentence:
            self.unjudged.append(sentence)

    def _target(self, lost: Lost) -> None:
        """Judge the target at every plan's rows. Steps with tokens that it does not have go to the plans' `unknown`."""
        causal = Causal(self.options.target, self.run.dtype, self.options.device)
        self.forms = RequestForms(self.options.target, causal.vocab, self.run.eos_tokens)
        for contexts in self.plans:
            contexts.keep_within(causal.vocab)
        head, why = None, ""
        if self.options.draft is not None and runs_head(model_part(self.run.drafter)):
            try:
                head = Head(self.options.draft, causal.model)
            except UserError as error:
                why = str(error)
        layers = () if head is None else head.layers
        self.short = _short([contexts for contexts in self.plans if contexts.steps])
        self.rounded = [causal.alone(contexts.text, layers)[1] for contexts in self.short] if layers else []
        self.slack = calibrate(causal, self.run.dtype, self.short)
        self.features: dict[str, Tensor] = {}  # of each request, along its text
        for contexts in self.plans:
            pieces: list[Tensor] = []
            with lost.spared(contexts.request):
                judge = TargetJudge(contexts, self.slack, self.target, self.forms)
                for (rows, logits), piece in causal.rows(contexts, layers):
                    if piece is not None:
                        pieces.append(piece.cpu())
                    if rows:
                        judge.take(rows, logits.cpu())
            self.features[contexts.request] = torch.cat(pieces) if pieces else torch.zeros(0)
            self.done(len(contexts.steps))
        if layers:
            pairs = zip(self.short, self.rounded, strict=True)
            both = [(low, self.features[contexts.request]) for contexts, low in pairs if low is not None]
            states = list(self.features.values())
            judge_fed(causal, layers, self.plans, states, allowed_error(both, len(layers)), self.fed)
        self.head, self.why_no_head = head, why

    def _drafter(self) -> str:
        """Judge the drafter's model; returns why that was not possible, or ""."""
        part, lost = model_part(self.run.drafter), Lost()
        if not part or self.options.draft is None:
            return self.options.why_no_draft
        if not runs_head(part):
            self._draft_model(self.options.draft, lost)
        elif self.head is None:
            return self.why_no_head
        else:
            self._head(self.head, lost)
        self.say(lost.sentence("drafter"))
        return ""

    def _draft_model(self, source: ModelSource, lost: Lost) -> None:
        """Judge a drafter that is a causal LM. Raises UserError."""
        causal = Causal(source, self.run.dtype, self.options.device)
        forms = RequestForms(source, causal.vocab, self.run.eos_tokens)
        plans = [replace(contexts, steps=list(contexts.steps), unknown=[]) for contexts in self.plans]
        for contexts in plans:
            contexts.keep_within(causal.vocab)
        self.draft_slack = calibrate(causal, self.run.dtype, _short([each for each in plans if each.steps]))
        for contexts in plans:
            with lost.spared(contexts.request):
                judge = DrafterJudge(contexts, self.draft_slack, self.drafter, self.top, forms)
                asks = judge.asks()
                for (rows, logits), _ in causal.rows(contexts):
                    asked = [(index, ask) for index, row in enumerate(rows) for ask in asks.get(row, ())]
                    if asked:
                        judge.take([ask for _, ask in asked], logits[[index for index, _ in asked]].cpu())
            self.done(len(contexts.steps))

    def _head(self, head: Head, lost: Lost) -> None:
        """Judge an EAGLE head over the target's true features."""
        self._embedding(head)
        self.draft_slack = self._calibrate_head(head)
        for contexts in self.plans:
            with lost.spared(contexts.request):
                judge = DrafterJudge(contexts, self.draft_slack, self.drafter, self.top, self.forms)
                asked = [ask for asks in judge.asks().values() for ask in asks]
                for some, logits in head.rows(contexts, self.features[contexts.request], asked):
                    judge.take(some, logits)
            self.done(len(contexts.steps))

    def _embedding(self, head: Head) -> None:
        """Check that a head's own embedding, where it has one, agrees with the target's."""
        likeness = head.likeness(sorted({token for contexts in self.plans for token in contexts.text}))
        if likeness is None or not len(likeness):
            return
        strange = int((likeness < ALIKE).sum())
        result = CheckResult.FAILED if strange > len(likeness) / 2 else CheckResult.PASSED
        detail = f"mean cosine {float(likeness.mean()):.2f} over {plural(len(likeness), 'token')} of the texts"
        self.embedding = Finding(EMBEDDING[0], result, EMBEDDING[1], len(likeness), strange, None, detail, "", "token")

    def _calibrate_head(self, head: Head) -> float:
        """How far rounding goes: in the capture's dtype over features of that dtype, in float32 over the judge's."""
        low = head.to(getattr(torch, self.run.dtype))
        known = [_head_rows(low, *each) for each in zip(self.short, self.rounded, strict=True)]
        exact = head.to(torch.float32)
        largest = 0.0
        for contexts, rows in zip(self.short, known, strict=True):
            rows_found = _head_rows(exact, contexts, self.features[contexts.request])
            for key, logits in rows.items():
                if key not in rows_found:  # its features were not made
                    continue
                best = logits.topk(min(WIDEST, int((logits > -torch.inf).sum())))
                largest = max(largest, float((rows_found[key][best.indices] - best.values).abs().max()))
        return _slack(self.run.dtype, largest, HEAD_SAFETY)


def _nothing_of_target(plans: Sequence[Contexts]) -> str:
    """Why no figure of the target was judged, although there were steps to judge."""
    limits = ", ".join(dict.fromkeys(name for contexts in plans if contexts.steps for name in contexts.limits))
    why = f"{limits} limit every request in a way that the capture does not tell"
    return f"The target was not judged: {why}." if limits else ""


def _short(plans: Sequence[Contexts]) -> list[Contexts]:
    """What rounding is measured on."""
    return [_beginning(contexts) for contexts in plans[:: max(1, len(plans) // REQUESTS)][:REQUESTS]]


def calibrate(causal: Causal, dtype: str, short: Sequence[Contexts]) -> float:
    """How far rounding moves a token's log probability. Afterwards the model runs in float32.

    Some contexts are run twice: each by itself in the capture's dtype, and packed in float32 as the audit runs them.
    """
    alone = [_alone(causal, contexts) for contexts in short]
    causal.exact()
    largest = 0.0
    for contexts, known in zip(short, alone, strict=True):
        for (rows, logits), _ in causal.rows(contexts):
            for row, scores in zip(rows, logits.log_softmax(-1), strict=True):
                if row not in known:
                    continue
                tokens, values = known[row]
                largest = max(largest, float((scores[tokens] - values).abs().max()))
    return _slack(dtype, largest)


def _head_rows(head: Head, contexts: Contexts, features: Tensor | None) -> dict[tuple[int, int], Tensor]:
    assert features is not None
    asked = [ask for asks in DrafterJudge(contexts, 0.0, {}).asks().values() for ask in asks]
    return {
        (step.part.index, node): row
        for some, logits in head.rows(contexts, features[: len(contexts.text)], asked)
        for (step, node), row in zip(some, logits.log_softmax(-1), strict=True)
    }


def _slack(dtype: str, largest: float, safety: float = SAFETY) -> float:
    """Raises UserError where the model, run both ways, differs by more than rounding: such a judge would pass all."""
    least = 4 * ROUNDING.get(dtype, ROUNDING[LEAST_KNOWN])
    if largest > ABSURD * least:
        raise UserError(
            f"the judge disagrees with itself: log probabilities differ by {largest:.2g} when contexts share a pass, "
            f"far more than {dtype} rounds; this model cannot be audited so"
        )
    return max(least, safety * largest)


def _beginning(contexts: Contexts) -> Contexts:
    """The first steps of a request, and as much of its text as they attend to."""
    steps = [step for step in contexts.steps if step.part.position + 1 < TOKENS][:STEPS] or contexts.steps[:1]
    last = max((step.part.position + 1 for step in steps), default=0)
    text, prompt_len = contexts.text[:last], min(contexts.prompt_len, last)
    short = Contexts(contexts.request, contexts.params, text, prompt_len, shaped=contexts.shaped)
    for step in steps:
        short.add(step.part, step.where, step.part.position)
    return short


def _alone(causal: Causal, contexts: Contexts) -> dict[int, tuple[Tensor, Tensor]]:
    """The likeliest tokens and their log probabilities at each row that is needed, each context run by itself."""
    best_by_row: dict[int, tuple[Tensor, Tensor]] = {}
    if not contexts.text:
        return best_by_row
    text = causal.alone(contexts.text)[0].log_softmax(-1)
    asked = contexts.asked()
    branches = [row for row in asked if row >= len(contexts.text)]
    some = branches[:: max(1, len(branches) // BRANCHES)][:BRANCHES]  # each is a pass of its own
    for row in (*(row for row in asked if row < len(contexts.text)), *some):
        logits = text[row] if row < len(contexts.text) else causal.alone(contexts.context(row))[0][-1].log_softmax(-1)
        best = logits.topk(min(WIDEST, len(logits)))
        best_by_row[row] = best.indices, best.values
    return best_by_row
