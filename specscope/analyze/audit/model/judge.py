"""A model's outputs at the rows of a request's contexts, compared with what the capture recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.audit.tally import NEAR_TIE, NO_P, SUMMED, Tally, conditional, is_far, span, within
from specscope.analyze.findings import Reference
from specscope.trace.record.notes import TEXT
from specscope.trace.record.params import UNREAD, SamplingParams, untold_limits
from specscope.trace.record.records import FinalKind, ParentNotes, RequestStep
from specscope.trace.record.tree import ROOT, Drawn

FORM = "structured_outputs"
Tops = tuple[NDArray[Any], NDArray[Any]]  # tokens, and the probabilities recorded for them
Ask = tuple[AuditedStep, int]  # a step, and the parent whose children's probabilities are asked for
Bounds = tuple[float, float]
Tallies = dict[str, Tally]


class _Judge:
    """Judges one request. `slack`: how far rounding may move a logit against the others. `params`: what shapes them."""

    says = "p {:.4g}, the model says {:.4g}"

    def __init__(
        self, contexts: Contexts, slack: float, tallies: Tallies, forms: RequestForms | None, params: SamplingParams
    ) -> None:
        self.contexts, self.tallies, self.params, self.raw_slack = contexts, tallies, params, slack
        self.rules = Rules(params, contexts.text[: contexts.prompt_len], forms)
        self.slack = slack * max(params.repetition_penalty, 1 / params.repetition_penalty)
        self.sampled_slack = self.slack if params.greedy else self.slack / params.temperature

    def shaped(self, rows: Sequence[int], logits: Tensor) -> Tensor:
        """Logits after logit bias, penalties and the form, along each row's own context."""
        counts = self.rules.counts_output
        return self.rules.shaped(logits, [self.contexts.output(row) for row in rows] if counts else ())

    def bounds(self, shaped: Tensor, p: Tensor, token: int, recorded: float) -> Bounds:
        """The range that rounding allows for p of a token in a row [V]; borders of top-k and the like included."""
        allowed = span(float(p[token]), self.sampled_slack)
        if within(recorded, allowed) or not self.rules.truncates:
            return allowed
        low, high = self.rules.bounds(shaped, self.slack)
        ends = [span(float(x[token]), self.sampled_slack) for x in (low, high)]
        return ends[0][0], ends[1][1]

    def compare(self, name: str, where: Reference, recorded: float, judged: float, allowed: Bounds) -> None:
        """Count a recorded figure, and whether rounding allows it."""
        differs, text = not within(recorded, allowed), self.says.format(recorded, judged)
        # at a border of top-k, top-p or min-p rounding takes a token in or out, and that moves all others
        far = differs and not self.rules.truncates and is_far(recorded, judged, allowed)
        self.tallies[name].add(where, differs=differs, recorded=recorded, judged=judged, text=text, is_far=far)

    def tops(self, name: str, where: Reference, top: Tops, raw: Tensor) -> None:
        """Count the likeliest tokens of a row: by the first that rounding does not allow, else the last."""
        for token, recorded in zip(*(values.tolist() for values in top), strict=True):
            judged = _of(raw, token)
            if not within(recorded, span(judged, self.raw_slack)):
                break
        self.compare(name, where, recorded, judged, span(judged, self.raw_slack))


def _of(row: Tensor, token: int) -> float:
    """A token's value in a row over the vocabulary; 0 for a token that the model does not have."""
    return float(row[token]) if 0 <= token < len(row) else 0.0


def _place(notes: ParentNotes | None, parent: int) -> int:
    """The place of a tried parent in its step's notes; -1 where it has none."""
    places: list[int] = [] if notes is None else np.flatnonzero(notes.node == parent).tolist()
    return places[0] if places else -1


class TargetJudge(_Judge):
    """The target's part."""

    def __init__(self, contexts: Contexts, slack: float, tallies: Tallies, forms: RequestForms | None = None) -> None:
        super().__init__(contexts, slack, tallies, forms, contexts.params)
        form = contexts.params.structured_outputs is not None or FORM in contexts.limits
        self.has_raw = not (contexts.shaped is not None and contexts.shaped.raw_is_masked and form)
        self.asks: dict[int, list[Ask]] = defaultdict(list)
        for step in contexts.steps:
            for parent, row in step.rows.items():
                self.asks[row].append((step, parent))

    def take(self, rows: Sequence[int], logits: Tensor) -> None:
        """Compare all that is asked at these rows; logits float32 [rows, V]."""
        asked = [(index, *ask) for index, row in enumerate(rows) for ask in self.asks[row]]
        if not self.contexts.limits:  # what the request's parameters shape
            shaped = self.shaped(rows, logits)
            p = None if self.params.greedy else self.rules.scores(shaped).softmax(-1)
            for index, step, parent in asked:
                if p is None:
                    self._greedy(step, parent, shaped[index])
                else:
                    self._sampled(step, parent, shaped[index], p[index])
        if not self.has_raw:  # what was recorded before any rule
            return
        for index, step, parent in asked:
            if step.part.logprobs is not None:
                self._logprob(step, parent, logits[index])
        raw = logits.softmax(-1) if any(step.part.parents is not None for _, step, _ in asked) else logits
        for index, step, parent in asked:
            if step.part.parents is not None:
                self._raw(step, parent, raw[index], step.part.parents)

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
            allowed = span(judged, self.raw_slack)
            self.compare("target raw p", step.at(child), float(notes.raw_p[child]), judged, allowed)
        if notes.top.shape[1]:
            self.tops("target top tokens", step.at(children[0]), (notes.top[row], notes.top_p[row]), raw)


def drafted_by_model(part: RequestStep, parent: int) -> list[int]:
    """Children of a node that the drafter's model drafted: all, unless text lookup drafts beside it."""
    children, method = part.tree.children(parent), part.method
    if method is None or not len(method.source):
        return children
    return [child for child in children if method.source[child] != TEXT]


class DrafterJudge(_Judge):
    """The drafter's part, where it is a model: its tokens and their probabilities."""

    says = "{:.4g}, the drafter run afresh says {:.4g}"

    def __init__(
        self, contexts: Contexts, slack: float, tallies: Tallies, top: int = 0, forms: RequestForms | None = None
    ) -> None:
        """`top`: beside text lookup, how many of the likeliest tokens the model drafts at a node."""
        super().__init__(contexts, slack, tallies, forms, contexts.drafter_params)
        self.top = top

    def asks(self) -> dict[int, list[Ask]]:
        """By row, the parents whose children are asked for."""
        asks: dict[int, list[Ask]] = defaultdict(list)
        if UNREAD in self.contexts.limits or untold_limits(self.contexts.drafter_params):
            return asks
        for step in self.contexts.steps:
            for parent, row in step.rows.items():
                if drafted_by_model(step.part, parent):
                    asks[row].append((step, parent))
        return asks

    def take(self, asked: Sequence[Ask], logits: Tensor) -> None:
        """Compare the children of these parents; logits float32 [parents, V], of the whole vocabulary."""
        if not asked:
            return
        shaped = self.shaped([step.rows[parent] for step, parent in asked], logits)
        first = [drafted_by_model(step.part, parent)[0] for step, parent in asked]
        sampled = [
            step.part.tree.drawn[child] != Drawn.DETERMINISTIC for (step, _), child in zip(asked, first, strict=True)
        ]
        q = self.rules.scores(shaped).softmax(-1) if any(sampled) else None
        thought = shaped.softmax(-1)
        for index, (step, parent) in enumerate(asked):
            if sampled[index] and q is not None:
                self._drawn(step, parent, shaped[index], q[index])
            else:
                self._likeliest(step, parent, shaped[index], thought[index])
            notes, row = step.part.parents, _place(step.part.parents, parent)
            if notes is not None and row >= 0 and notes.draft_top.shape[1]:
                top = notes.draft_top[row], notes.draft_top_p[row]
                self.tops("drafter top tokens", step.at(first[index]), top, logits[index].softmax(-1))

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
        text = f"coin {coin:.4g} draws {tally.show(drawn)} from the q of the drafter run afresh"
        text += f", not {tally.show(token)}"
        tally.add(where, differs=drawn != token, recorded=float(token), judged=float(drawn), text=text)

    def _reach(self, shaped: Tensor, left: Tensor, taken: Sequence[int], token: int) -> Bounds:
        """The coins that may draw a token when logits are off by rounding; borders of top-k and the like included."""
        borders = (float(left[:token].sum() / left.sum()), float(left[: token + 1].sum() / left.sum()))
        slack = 2 * self.sampled_slack  # a border has logits on both sides of it
        low, high = (span(border, slack) for border in borders)
        if not self.rules.truncates:
            return low[0], high[1]
        least, most = (x.double() for x in self.rules.bounds(shaped, self.slack))
        least[taken], most[taken] = 0, 0
        below, above = float(least[:token].sum()), float(most[token:].sum())
        first = span(below / max(below + above, 1e-30), slack)[0]
        below, above = float(most[: token + 1].sum()), float(least[token + 1 :].sum())
        return min(low[0], first), max(high[1], span(below / max(below + above, 1e-30), slack)[1])

    def _likeliest(self, step: AuditedStep, parent: int, shaped: Tensor, thought: Tensor) -> None:
        """Siblings are the likeliest tokens, the best first; at a near tie either order is right."""
        tree, notes = step.part.tree, step.part.notes
        children = drafted_by_model(step.part, parent)
        beside = step.part.is_ranked_with_text  # whose nodes are left out here
        best = shaped.topk(min(max(self.top, 1) if beside else len(children), len(shaped)))
        tokens, values = best.indices.tolist(), best.values.tolist()
        tally = self.tallies["drafter tokens"]
        for place, child in enumerate(children):
            # ranked with the text's nodes: any of the likeliest may be left
            rank, token = len(values) - 1 if beside else place, int(tree.token[child])
            if notes is not None:
                judged = float(thought[token])
                self.compare("draft p", step.at(child), float(notes.prob[child]), judged, span(judged, self.slack))
            behind, recorded, judged = values[rank] - float(shaped[token]), float(token), float(tokens[rank])
            differs = not (behind if beside else abs(behind)) <= self.slack  # also where both are least
            text = f"{tally.show(token)}, but the drafter's choice {rank + 1} is {tally.show(tokens[rank])}"
            text = text if differs else ""
            tally.add(step.at(child), differs=differs, recorded=recorded, judged=judged, text=text)
