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
from specscope.analyze.audit.options import ModelSource
from specscope.analyze.audit.tally import Tally
from specscope.errors import UserError, first_line
from specscope.trace.history.wording import plural
from specscope.trace.record.records import RunInfo
from specscope.trace.record.rules import ROUNDING

REQUESTS, TOKENS, STEPS = 4, 96, 16  # that rounding is measured on: requests, and of each the tokens and steps
BRANCHES = 4  # rows beside the text of each that are measured
WIDEST = 8  # tokens of a row that are compared
SAFETY = 2.5  # the largest deviation seen among about a thousand, times this, is still rounding
HEAD_SAFETY = 4.0  # of a head: each level is fed what the last one rounded, and 3.1 times was seen among 5,000
ABSURD = 10.0  # times the usual rounding: more cannot be rounding
LEAST_KNOWN = "bfloat16"  # where a capture does not say its dtype
# How a judge fails on unexpected input: shapes, places, numbers
FAULTS = (UserError, RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, AssertionError)

Step = Callable[[int], None]  # reports how many more steps are judged


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


@dataclass(frozen=True)
class HeadInput:
    """What an EAGLE head is judged over: the target's features along each request's text."""

    head: Head
    features: list[Tensor]  # of each plan
    short: list[Contexts]  # what rounding is measured on, with features in the capture's dtype
    rounded: list[Tensor | None]
    forms: RequestForms


@dataclass(frozen=True)
class OfTarget:
    """The result of judging the target."""

    slack: float  # how far rounding goes
    features: HeadInput | None  # what an EAGLE head is judged over; None where there is none
    why_no_head: str  # why that is so, where one was to be judged


def judge_target(
    source: ModelSource,
    run: RunInfo,
    device: str,
    plans: Sequence[Contexts],
    tallies: dict[str, Tally],
    done: Step,
    lost: Lost,
    head: ModelSource | None = None,
    fed: Tally | None = None,
) -> OfTarget:
    """Judge the target at every plan's rows. Steps with tokens that it does not have go to the plans' `unknown`.

    `fed`: gets the rows that fed the head.

    Raises UserError where the target cannot judge at all.
    """
    causal = Causal(source, run.dtype, device)
    forms = RequestForms(source, causal.vocab, run.eos_tokens)
    for contexts in plans:
        contexts.keep_within(causal.vocab)
    below, why = _head(head, causal)
    layers = () if below is None else below.layers
    judged = [contexts for contexts in plans if contexts.steps]
    short = _short(judged)
    rounded = [causal.alone(contexts.text, layers)[1] for contexts in short] if layers else []
    slack = calibrate(causal, run.dtype, short)
    features = []
    for contexts in plans:
        pieces: list[Tensor] = []
        with lost.spared(contexts.request):
            judge = TargetJudge(contexts, slack, tallies, forms)
            for (rows, logits), piece in causal.rows(contexts, layers):
                if piece is not None:
                    pieces.append(piece.cpu())
                if rows:
                    judge.take(rows, logits.cpu())
        features.append(torch.cat(pieces) if pieces else torch.zeros(0))
        done(len(contexts.steps))
    if layers and fed is not None:
        whole = {contexts.request: states for contexts, states in zip(plans, features, strict=True)}
        both = [(low, whole[contexts.request]) for contexts, low in zip(short, rounded, strict=True) if low is not None]
        judge_fed(causal, layers, plans, features, allowed_error(both, len(layers)), fed)
    return OfTarget(slack, None if below is None else HeadInput(below, features, short, rounded, forms), why)


def _head(source: ModelSource | None, causal: Causal) -> tuple[Head | None, str]:
    """A head over a target, or why it cannot judge."""
    if source is None:
        return None, ""
    try:
        return Head(source, causal.model), ""
    except UserError as error:
        return None, str(error)


def judge_draft_model(
    source: ModelSource,
    run: RunInfo,
    device: str,
    plans: Sequence[Contexts],
    tallies: dict[str, Tally],
    done: Step,
    lost: Lost,
    top: int,
) -> float:
    """Judge a drafter that is a causal LM; returns how far rounding goes. `top`: as DrafterJudge has it.

    Raises UserError.
    """
    causal = Causal(source, run.dtype, device)
    forms = RequestForms(source, causal.vocab, run.eos_tokens)
    plans = [replace(contexts, steps=list(contexts.steps), unknown=[]) for contexts in plans]
    for contexts in plans:
        contexts.keep_within(causal.vocab)
    slack = calibrate(causal, run.dtype, _short([contexts for contexts in plans if contexts.steps]))
    for contexts in plans:
        with lost.spared(contexts.request):
            judge = DrafterJudge(contexts, slack, tallies, top, forms)
            asks = judge.asks()
            for (rows, logits), _ in causal.rows(contexts):
                asked = [(index, ask) for index, row in enumerate(rows) for ask in asks.get(row, ())]
                if asked:
                    judge.take([ask for _, ask in asked], logits[[index for index, _ in asked]].cpu())
        done(len(contexts.steps))
    return slack


def judge_head(
    over: HeadInput,
    run: RunInfo,
    plans: Sequence[Contexts],
    tallies: dict[str, Tally],
    done: Step,
    lost: Lost,
    top: int,
) -> float:
    """Judge an EAGLE head over the target's true features; returns how far rounding goes. `top`: as DrafterJudge."""
    slack = calibrate_head(over, run.dtype, plans)
    for contexts, along in zip(plans, over.features, strict=True):
        with lost.spared(contexts.request):
            judge = DrafterJudge(contexts, slack, tallies, top, over.forms)
            asked = [ask for asks in judge.asks().values() for ask in asks]
            for some, logits in over.head.rows(contexts, along, asked):
                judge.take(some, logits)
        done(len(contexts.steps))
    return slack


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


def calibrate_head(over: HeadInput, dtype: str, plans: Sequence[Contexts]) -> float:
    """The same for a head: in the capture's dtype over features of that dtype, and in float32 over the judge's."""
    whole = {contexts.request: along for contexts, along in zip(plans, over.features, strict=True)}
    low = over.head.to(getattr(torch, dtype))
    known = [_head_rows(low, contexts, along) for contexts, along in zip(over.short, over.rounded, strict=True)]
    exact = over.head.to(torch.float32)
    largest = 0.0
    for contexts, rows in zip(over.short, known, strict=True):
        rows_found = _head_rows(exact, contexts, whole[contexts.request])
        for key, logits in rows.items():
            if key not in rows_found:  # its features were not made
                continue
            best = logits.topk(min(WIDEST, int((logits > -torch.inf).sum())))
            largest = max(largest, float((rows_found[key][best.indices] - best.values).abs().max()))
    return _slack(dtype, largest, HEAD_SAFETY)


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
