"""A model's outputs at the rows of a request's contexts, compared with what the capture recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts
from specscope.analyze.audit.model.causal import Rows
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.audit.tally import NEAR_TIE, NO_P, SUMMED, Bounds, Tallies, conditional, span, within
from specscope.analyze.findings import Reference
from specscope.trace.record.notes import TEXT
from specscope.trace.record.params import FORM, UNREAD, SamplingParams, untold_limits
from specscope.trace.record.records import FinalKind, ParentNotes, RequestStep
from specscope.trace.record.tree import ROOT, Drawn

AskedRows = tuple[list[Ask], Tensor]  # what is asked, and the logits there: float32 [asked, V]


def by_ask(rows: Iterable[Rows], asks: Mapping[int, Sequence[Ask]]) -> Iterator[AskedRows]:
    """Rows of a model as what is asked of them."""
    for numbers, logits in rows:
        if asked := [(place, ask) for place, row in enumerate(numbers) for ask in asks.get(row, ())]:
            yield [ask for _, ask in asked], logits[[place for place, _ in asked]].cpu()


class _Judge:
    """Judges one request. `slack`: how far rounding may move a logit against the others."""

    who = "model"
    says = "p {:.4g}, the model says {:.4g}"
    params_of = "params"  # which of a request's parameters shape what is judged

    def __init__(
        self, contexts: Contexts, slack: float, tallies: Tallies, forms: RequestForms | None, top: int = 0
    ) -> None:
        """`top`: beside text lookup, how many of the likeliest tokens the drafter's model drafts at a node."""
        params: SamplingParams = getattr(contexts, self.params_of)
        self.contexts, self.tallies, self.params, self.raw_slack, self.top = contexts, tallies, params, slack, top
        self.rules = Rules(params, contexts.text[: contexts.prompt_len], forms)
        self.slack = slack * max(params.repetition_penalty, 1 / params.repetition_penalty)
        self.sampled_slack = self.slack if params.greedy else self.slack / params.temperature

    def shaped(self, asked: Sequence[Ask], logits: Tensor) -> Tensor:
        """Logits after logit bias, penalties and the form, along each row's own context."""
        counted = asked if self.rules.counts_output else ()
        return self.rules.shaped(logits, [self.contexts.output(step.rows[node]) for step, node in counted])

    def bounds(self, shaped: Tensor, p: Tensor, token: int, recorded: float) -> Bounds:
        """The range that rounding allows for p of a token in a row [V]; borders of top-k and the like included."""
        allowed = span(float(p[token]), self.sampled_slack)
        if within(recorded, allowed) or not self.rules.truncates:
            return allowed
        least, most = self.rules.bounds(shaped, self.slack)
        return span(float(least[token]), self.sampled_slack)[0], span(float(most[token]), self.sampled_slack)[1]

    def compare(self, name: str, where: Reference, recorded: float, judged: float, allowed: Bounds) -> None:
        """Count a recorded figure, and whether rounding allows it."""
        text, cuts = self.says.format(recorded, judged), self.rules.truncates
        self.tallies[name].compare(where, recorded, judged, allowed, text, cuts=cuts)

    def tops(self, name: str, where: Reference, tokens: NDArray[Any], told: NDArray[Any], raw: Tensor) -> None:
        """Count the likeliest tokens of a row, with what was told of them: by the first that rounding does not allow,
        else the last.
        """
        for token, recorded in zip(tokens.tolist(), told.tolist(), strict=True):
            judged = _of(raw, token)
            if not within(recorded, allowed := span(judged, self.raw_slack)):
                break
        self.compare(name, where, recorded, judged, allowed)


def _of(row: Tensor, token: int) -> float:
    """A token's value in a row over the vocabulary; 0 for a token that the model does not have."""
    return float(row[token]) if 0 <= token < len(row) else 0.0


def _place(notes: ParentNotes | None, parent: int) -> int:
    """The place of a tried parent in its step's notes; -1 where it has none."""
    places: list[int] = [] if notes is None else np.flatnonzero(notes.node == parent).tolist()
    return places[0] if places else -1


class TargetJudge(_Judge):
    """The target's part."""

    who = "target"

    def take(self, asked: Sequence[Ask], logits: Tensor) -> None:
        """Compare what was recorded at these parents; logits float32 [parents, V]."""
        if not self.contexts.limits:  # what the request's parameters shape
            shaped = self.shaped(asked, logits)
            p = None if self.params.greedy else self.rules.scores(shaped).softmax(-1)
            for index, (step, parent) in enumerate(asked):
                if p is None:
                    self._greedy(step, parent, shaped[index])
                else:
                    self._sampled(step, parent, shaped[index], p[index])
        form = self.params.structured_outputs is not None or FORM in self.contexts.limits
        if form and self.contexts.raw_is_masked:
            return
        for (step, parent), row in zip(asked, logits, strict=True):  # before any rule
            if step.part.logprobs is not None:
                self._logprob(step, parent, row)
            if step.part.parents is not None:
                self._raw(step, parent, row.softmax(-1), step.part.parents)

    def _logprob(self, step: AuditedStep, parent: int, logits: Tensor) -> None:
        """Compare the log-probability of the token that was emitted behind a node of the accepted path."""
        handed, path = step.part.logprobs, [ROOT, *step.verdict.path.tolist()]
        assert handed is not None
        if parent not in path or (place := path.index(parent)) >= len(handed.logprob):
            return
        token, recorded = step.part.tokens()[place], float(handed.logprob[place])
        judged = float(logits[token] - logits.logsumexp(-1))
        where = step.at(path[place + 1] if place + 1 < len(path) else None)
        tally, differs = self.tallies["log-probabilities"], not abs(recorded - judged) <= self.slack + SUMMED
        text = f"{tally.show(token)} was given {recorded:.4g}, the model says {judged:.4g}"
        tally.add(where, differs=differs, recorded=recorded, judged=judged, text=text)

    def _greedy(self, step: AuditedStep, parent: int, shaped: Tensor) -> None:
        verdict, tree = step.verdict, step.part.tree
        best = shaped.topk(2)
        for child in self._told(step, parent):
            self._choice("target p", step.at(child), int(tree.token[child]), float(verdict.p[child]), shaped, best)
        if parent == step.leaf and len(tree) not in verdict.forced:
            self._choice("final token", step.at(None), verdict.token, 1.0, shaped, best)

    def _told(self, step: AuditedStep, parent: int) -> list[int]:
        """The children whose p was recorded; others are left out, and counted."""
        children = step.part.tree.children(parent)
        if not step.verdict.tells_outcome_alone:
            return children
        self.tallies["target p"].left[NO_P] += len(children)
        return []

    def _choice(self, name: str, where: Reference, token: int, recorded: float, row: Tensor, best: Any) -> None:  # noqa: ANN401
        """A greedy target: p is 1 at its choice and 0 elsewhere. A near tie of the two `best` may go either way."""
        choice, tally = int(best.indices[0]), self.tallies[name]
        judged, text = float(token == choice), ""
        if recorded != judged:
            behind = float(best.values[0] - best.values[1]) if token == choice else float(row[choice] - row[token])
            if behind <= self.slack:
                tally.left[NEAR_TIE] += 1
                return
            text = f"p of {tally.show(token)} is {recorded:g}; the model chooses {tally.show(choice)}, by {behind:.3g}"
        tally.add(where, differs=recorded != judged, recorded=recorded, judged=judged, text=text)

    def _sampled(self, step: AuditedStep, parent: int, shaped: Tensor, p: Tensor) -> None:
        verdict, tree, notes = step.verdict, step.part.tree, step.part.parents
        children, taken = self._told(step, parent), []
        for child in children:
            token, recorded = int(tree.token[child]), float(verdict.p[child])
            taken.append((token, self.bounds(shaped, p, token, recorded)))
            self.compare("target p", step.at(child), recorded, float(p[token]), taken[-1][1])
        if parent != step.leaf:
            return
        if verdict.tells_outcome_alone:
            self.tallies["final p"].left[NO_P] += 1
            return
        token = verdict.token
        if notes is not None:
            recorded = notes.final_target_p
            allowed = self.bounds(shaped, p, token, recorded)
            self.compare("final p", step.at(None), recorded, float(p[token]), allowed)
            return
        recovered = verdict.kind is FinalKind.RECOVERED
        known = not recovered or all(tree.drawn[child] == Drawn.DETERMINISTIC for child in children)
        if not known or len(tree) in verdict.forced:
            return
        # The final token's p in the residual; rejected siblings here are deterministic, each takes its p away
        rejected = dict(taken) if recovered else {}
        left = 1 - sum(float(p[other]) for other in rejected)
        allowed = conditional(self.bounds(shaped, p, token, verdict.final_p), list(rejected.values()))
        self.compare("final p", step.at(None), verdict.final_p, float(p[token]) / left if left > 0 else 0.0, allowed)

    def _raw(self, step: AuditedStep, parent: int, raw: Tensor, notes: ParentNotes) -> None:
        """Raw p of each child and of the target's likeliest tokens, where the parent was tried."""
        row, children = _place(notes, parent), step.part.tree.children(parent)
        if row < 0 or not children:
            return
        for child in children:
            judged = _of(raw, int(step.part.tree.token[child]))
            recorded = float(notes.raw_p[child])
            self.compare("target raw p", step.at(child), recorded, judged, span(judged, self.raw_slack))
        if notes.top.shape[1]:
            self.tops("target top tokens", step.at(children[0]), notes.top[row], notes.top_p[row], raw)


def drafted_by_model(part: RequestStep, parent: int) -> list[int]:
    """Children of a node that the drafter's model drafted: all, unless text lookup drafts beside it."""
    children, method = part.tree.children(parent), part.method
    if method is None or not len(method.source):
        return children
    return [child for child in children if method.source[child] != TEXT]


def drafter_asks(contexts: Contexts) -> dict[int, list[Ask]]:
    """By row, the parents whose children a drafter's model drafted, where the capture tells what shaped it."""
    if UNREAD in contexts.limits or untold_limits(contexts.drafter_params):
        return {}
    every = contexts.asks().items()
    return {row: [ask for ask in asks if drafted_by_model(ask[0].part, ask[1])] for row, asks in every}


class DrafterJudge(_Judge):
    """The drafter's part, where it is a model: its tokens and their probabilities."""

    who, params_of = "drafter", "drafter_params"
    says = "{:.4g}, the recomputed drafter says {:.4g}"

    def take(self, asked: Sequence[Ask], logits: Tensor) -> None:
        """Compare the children of these parents; logits float32 [parents, V], of the whole vocabulary."""
        if not asked:
            return
        shaped = self.shaped(asked, logits)
        first = [drafted_by_model(step.part, parent)[0] for step, parent in asked]
        drawn = [
            step.part.tree.drawn[child] != Drawn.DETERMINISTIC for (step, _), child in zip(asked, first, strict=True)
        ]
        q = self.rules.scores(shaped).softmax(-1) if any(drawn) else shaped
        for index, (step, parent) in enumerate(asked):
            if drawn[index]:
                self._drawn(step, parent, shaped[index], q[index])
            else:
                self._likeliest(step, parent, shaped[index])
            notes, row = step.part.parents, _place(step.part.parents, parent)
            if notes is not None and row >= 0 and notes.draft_top.shape[1]:
                tops, where = (notes.draft_top[row], notes.draft_top_p[row]), step.at(first[index])
                self.tops("drafter top tokens", where, *tops, logits[index].softmax(-1))

    def _drawn(self, step: AuditedStep, parent: int, shaped: Tensor, q: Tensor) -> None:
        """Siblings drawn from q. The recorded q is that before any sibling was removed."""
        tree, notes = step.part.tree, step.part.notes
        taken: list[int] = []
        for child in tree.children(parent):
            token, recorded = int(tree.token[child]), float(tree.q[child])
            allowed = self.bounds(shaped, q, token, recorded)
            self.compare("draft p", step.at(child), recorded, float(q[token]), allowed)
            if notes is not None and len(notes.coin) and notes.coin[child] > 0:
                self._draw(step.at(child), token, float(notes.coin[child]), shaped, q, taken)
            if tree.drawn[child] == Drawn.WITHOUT_REPLACEMENT:
                taken.append(token)

    def _draw(self, where: Reference, token: int, coin: float, shaped: Tensor, q: Tensor, taken: list[int]) -> None:
        """Whether a coin draws a token from q without the tokens `taken`; at a border rounding decides."""
        tally, left = self.tallies["draft draws"], q.double().clone()
        left[taken] = 0
        ends = left.cumsum(0)
        if not ends[-1] > 0:
            return
        drawn = min(int(torch.searchsorted(ends, coin * ends[-1], right=True)), len(ends) - 1)
        if drawn != token and within(coin, self._reach(shaped, left, taken, token)):
            tally.left[NEAR_TIE] += 1
            return
        text = f"coin {coin:.4g} draws {tally.show(drawn)} from the recomputed drafter's q, not {tally.show(token)}"
        tally.add(where, differs=drawn != token, recorded=token, judged=drawn, text=text)

    def _reach(self, shaped: Tensor, left: Tensor, taken: Sequence[int], token: int) -> Bounds:
        """The coins that may draw a token when logits are off by rounding; borders of top-k and the like included."""

        def border(below: Tensor, above: Tensor, side: int) -> float:
            """Where the border between these may lie: its least or its largest place. Logits on both sides are off."""
            share = below.sum() / (below.sum() + above.sum()).clamp(min=1e-30)
            return span(float(share), 2 * self.sampled_slack)[side]

        end = token + 1
        low, high = border(left[:token], left[token:], 0), border(left[:end], left[end:], 1)
        if self.rules.truncates:
            least, most = (x.double() for x in self.rules.bounds(shaped, self.slack))
            least[taken], most[taken] = 0, 0
            low = min(low, border(least[:token], most[token:], 0))
            high = max(high, border(most[:end], least[end:], 1))
        return low, high

    def _likeliest(self, step: AuditedStep, parent: int, shaped: Tensor) -> None:
        """Siblings are the likeliest tokens, the best first; at a near tie either order is right.

        Ranked with a text's nodes, which are left out here, any of the likeliest may be left.
        """
        tree, notes, tally = step.part.tree, step.part.notes, self.tallies["drafter tokens"]
        children, beside = drafted_by_model(step.part, parent), step.part.is_ranked_with_text
        best = shaped.topk(min(max(self.top, 1) if beside else len(children), len(shaped)))
        q = shaped.softmax(-1)
        for place, child in enumerate(children):
            token, place = int(tree.token[child]), len(best.values) - 1 if beside else place
            if notes is not None:
                judged = float(q[token])
                self.compare("draft p", step.at(child), float(notes.prob[child]), judged, span(judged, self.slack))
            choice, behind = int(best.indices[place]), float(best.values[place] - shaped[token])
            differs = not (behind if beside else abs(behind)) <= self.slack  # also where both are least
            text = f"{tally.show(token)}, but the drafter's choice {place + 1} is {tally.show(choice)}"
            tally.add(step.at(child), differs=differs, recorded=token, judged=choice, text=text)
