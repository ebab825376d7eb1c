"""A model's outputs at the rows of a request's contexts, compared with what the capture recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specscope.analyze.audit.contexts import Ask, AuditedStep, Contexts
from specscope.analyze.audit.model.causal import Causal, Rows
from specscope.analyze.audit.model.rules import RequestForms, Rules
from specscope.analyze.audit.tally import NEAR_TIE, NO_P, SUMMED, Bounds, Tallies, Tally, conditional, span, within
from specscope.analyze.findings import Reference
from specscope.trace.record.notes import TEXT
from specscope.trace.record.params import FORM, UNREAD, SamplingParams, untold_limits
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import FinalKind, ParentNotes, RequestStep
from specscope.trace.record.tree import ROOT, Drawn

AskedRows = tuple[list[Ask], Tensor]  # what is asked, and the logits there: float32 [asked, V]


def by_ask(rows: Iterable[Rows], asks: Mapping[int, Sequence[Ask]]) -> Iterator[AskedRows]:
    """Rows of a model as what is asked of them."""
    for numbers, logits in rows:
        if asked := [(place, ask) for place, row in enumerate(numbers) for ask in asks.get(row, ())]:
            yield [ask for _, ask in asked], logits[[place for place, _ in asked]]


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
        """Count the likeliest tokens of a row by the first whose p rounding does not allow, else by the last."""
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
        taken = dict[int, Bounds]()
        for child in self._told(step, parent):
            token, recorded = int(tree.token[child]), float(verdict.p[child])
            taken[token] = self.bounds(shaped, p, token, recorded)
            self.compare("target p", step.at(child), recorded, float(p[token]), taken[token])
        if parent != step.leaf:
            return
        if verdict.tells_outcome_alone:
            self.tallies["final p"].left[NO_P] += 1
            return
        token, recorded = verdict.token, verdict.final_p if notes is None else notes.final_target_p
        judged, allowed = float(p[token]), self.bounds(shaped, p, token, recorded)
        if notes is None and verdict.kind is FinalKind.RECOVERED:
            # Its p in the residual; a deterministic sibling that was rejected takes its p away
            left = 1 - sum(float(p[other]) for other in taken)
            judged, allowed = judged / left if left > 0 else 0.0, conditional(allowed, list(taken.values()))
            if any(tree.drawn[child] != Drawn.DETERMINISTIC for child in tree.children(parent)):
                return
        if notes is not None or len(tree) not in verdict.forced:
            self.compare("final p", step.at(None), recorded, judged, allowed)

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
        every = self.rules.scores(shaped).softmax(-1) if any(step.part.tree.is_sampled for step, _ in asked) else shaped
        for (step, parent), raw, row, q in zip(asked, logits, shaped, every, strict=True):
            first = drafted_by_model(step.part, parent)[0]
            if step.part.tree.drawn[first] != Drawn.DETERMINISTIC:
                self._drawn(step, parent, row, q)
            else:
                self._likeliest(step, parent, row)
            notes, place = step.part.parents, _place(step.part.parents, parent)
            if notes is not None and place >= 0 and notes.draft_top.shape[1]:
                tops = (notes.draft_top[place], notes.draft_top_p[place])
                self.tops("drafter top tokens", step.at(first), *tops, raw.softmax(-1))

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
        """Siblings are the likeliest tokens, the best first, or at a near tie in either order; ranked with a text's
        nodes, any of the likeliest may be left.
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


LEAST = 2e-3  # relative error of a norm that is rounding in float32: kernels add up in another order
SAFETY = 4.0  # times the largest error that the target's own dtype made on a few texts

Norms = NDArray[np.float32]  # [T, layers]
Layers = Sequence[int | str]


def norms_of(states: Tensor, layers: int) -> Norms:
    """[T, layers] the norm of each layer's hidden states in [T, layers * width]."""
    norms: Norms = torch.stack([part.norm(dim=-1) for part in states.chunk(layers, -1)], dim=-1).float().numpy()
    return norms


def allowed_error(rounded: Sequence[tuple[Tensor, Tensor]], layers: int) -> float:
    """The relative error of a norm that rounding explains. `rounded`: states in the capture's dtype, and exact ones."""
    errors = [_errors(norms_of(low, layers), norms_of(exact[: len(low)], layers)) for low, exact in rounded if len(low)]
    return max([LEAST, *(SAFETY * float(error.max()) for error in errors if error.size)])


def judge_fed(
    causal: Causal, layers: Layers, plans: Sequence[Contexts], features: Mapping[str, Tensor], allowed: float, to: Tally
) -> None:
    """Compare the rows that fed the head in each step. features: of each request, [T, layers * width]."""
    looks: str | None = None  # of the first step that differs
    for contexts in (contexts for contexts in plans if len(features[contexts.request])):
        states = features[contexts.request]
        right, end = norms_of(states, len(layers)), min(len(states), len(contexts.text) - 1)
        for step in contexts.steps:
            notes = step.part.notes
            if notes is None or notes.fed_norms.shape[1:] != (len(layers),):
                continue
            known = notes.fed_position < min(step.part.position, end)
            positions, norms, tokens = notes.fed_position[known], notes.fed_norms[known], notes.fed_token[known]
            if not len(positions):
                continue
            texts, errors = np.array(contexts.text)[positions + 1], _errors(norms, right[positions])
            row, layer = map(int, np.unravel_index(int(errors.argmax()), errors.shape))
            differs, recorded = bool(errors[row, layer] > allowed), float(norms[row, layer])
            judged = float(right[positions[row], layer])
            text = f"layer {layers[layer]}, position {positions[row]}: a norm of {recorded:.4g}, not {judged:.4g}"
            if other := np.flatnonzero((tokens != texts) & (tokens != NO_TOKEN)).tolist():
                differs, recorded, judged = True, float(tokens[other[0]]), float(texts[other[0]])
                fed, wanted = to.show(int(recorded)), to.show(int(judged))
                text = f"{fed} was fed at position {positions[other[0]]}, where the text has {wanted}"
            elif differs and looks is None:
                looks = _likeness(causal, layers, contexts, norms, positions, allowed)
            to.add(step.where, differs=differs, recorded=recorded, judged=judged, text=text)
    to.about += f"; it looks like {looks}" if looks else ""


def _errors(norms: Norms, right: Norms) -> Norms:
    errors: Norms = np.abs(norms - right) / np.maximum(right, 1e-30)
    return errors


def _likeness(
    causal: Causal, layers: Layers, contexts: Contexts, norms: Norms, positions: NDArray[np.int32], allowed: float
) -> str:
    """Whose hidden states they are, by the norms of all layers: another position's, or other layers'; "" elsewhere."""
    every = (*range(int(causal.config.num_hidden_layers)), "final")
    states = causal.alone(contexts.text[: int(positions.max()) + 2], every)[1]
    assert states is not None
    known, last = norms_of(states, len(every)), len(every) - 1
    own = [last if layer == "final" else int(layer) for layer in layers]
    for by, where in ((-1, "before"), (1, "after")):
        near = np.clip(positions + by, 0, len(known) - 1)
        if np.median(_errors(norms, known[near][:, own])) < allowed:
            return f"the hidden states of the position {where}"
    errors = np.median(_errors(norms[:, :, None], known[positions][:, None]), axis=0)  # [layers, every]
    best = errors.argmin(axis=1).tolist()
    if errors.min(axis=1).max() >= allowed or best == own:
        return ""
    return f"layers {', '.join(str(every[layer]) for layer in best)} instead of {', '.join(map(str, layers))}"
