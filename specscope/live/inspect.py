"""The full distributions at a node: too large for a trace, so computed on demand. Looking changes nothing.

Of the step that ran last, and of one that was begun, the very tensors are there. Those of an earlier step are computed
again, in KV of their own: a scratch table that shares the blocks before the step, so that what was wrong in them still
shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specscope.debug.views import DistributionView, NodeView, Probs, Removed, TopToken, kl_of, rank_of
from specscope.engine.engine import Engine
from specscope.engine.request import Turn
from specscope.errors import UserError
from specscope.live.again import run_again
from specscope.speculate.allowed import mask_
from specscope.speculate.drafters.base import Context, Draft
from specscope.speculate.sampling import LogitRows, scaled, softmax_
from specscope.speculate.verify.distribution import Chosen, Left, rejected
from specscope.trace.history.history import RequestHistory
from specscope.trace.history.place import ratios
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestStep, Verdict
from specscope.trace.record.rules import MATCH, ROUNDING, looks_ahead
from specscope.trace.record.tree import ROOT, Drawn, Ints

SHOWN = 5  # of the likeliest tokens that a form removed


@dataclass(frozen=True)
class PartTensors:
    """A request's part in a step, with the tensors behind it."""

    context: Context  # the request before the step
    step: int
    index: int
    draft: Draft
    logits: Tensor  # [n + 1, V] the target's: the root's row, then each node's
    verdict: Verdict | None  # None where the step is not judged yet
    computed: bool = False  # whether it was computed again
    notes: tuple[str, ...] = ()

    def path(self, node: int) -> list[int]:
        tree = self.draft.tree
        return [] if node == ROOT else [int(tree.token[i]) for i in tree.path_to(node)]

    def target(self, node: int) -> Left:
        """The target's distribution below a node, as it is sampled from."""
        rows = self.context.rows(self.logits[node + 1 : node + 2], lambda: [self.path(node)])
        return rows.distributions()[0]


def view_last(engine: Engine, part: RequestStep, node: int | None) -> NodeView:
    """A view of the step that ran last, of which `part` is one."""
    last = engine.last
    assert last is not None
    assert last.known is not None
    place = [other.request for other in last.known.requests].index(part.request)
    return _view(engine, _of_turn(engine, last.turns[place], last.known.step, part), node)


def view_begun(engine: Engine, request: str, node: int | None) -> NodeView:
    """A view of the step that the engine is in. Raises UserError before its forward phase."""
    now = engine.current
    if now is None or not any(turn.logits is not None for turn in now.turns):
        raise UserError("there are no logits yet: they come with the forward phase")
    turn = next((turn for turn in now.decoding if turn.request.id == request), None)
    if turn is None:
        raise UserError(f"{request} draws no token in this step")
    return _view(engine, _of_turn(engine, turn, engine.steps, None), node)


def view_earlier(engine: Engine, history: RequestHistory, step: int, part: RequestStep, node: int | None) -> NodeView:
    """A view of any step of a request whose whole context is known. Raises UserError where it is not."""
    place, info = history.place_of(part.index), history.info
    assert place is not None
    tokens = history.before(place, part.context_len + part.prefill_tokens + 1)
    if info is None or len(tokens) != part.context_len + part.prefill_tokens + 1:
        raise UserError(f"the context of {part.request} is partly unknown: its step {part.index} cannot be recomputed")
    allowed = engine.forms.allowed(info.params)
    context = Context(part.request, tokens, len(info.prompt_tokens), info.params, allowed)
    logits, draft, notes = run_again(engine, part, context)
    return _view(engine, PartTensors(context, step, part.index, draft, logits, part.verdict, True, notes), node)


def _of_turn(engine: Engine, turn: Turn, step: int, part: RequestStep | None) -> PartTensors:
    request = turn.request
    assert turn.logits is not None
    before = len(request.tokens) if part is None else part.context_len + part.prefill_tokens + 1
    allowed = engine.forms.allowed(request.params)
    context = Context(request.id, request.tokens[:before], len(request.prompt_tokens), request.params, allowed)
    index, verdict = (request.steps, None) if part is None else (part.index, part.verdict)
    return PartTensors(context, step, index, turn.draft, turn.logits, verdict)


def _view(engine: Engine, seen: PartTensors, node: int | None) -> NodeView:
    """The view at the place where a node's token, or the final token, was drawn."""
    context, tree, verdict = seen.context, seen.draft.tree, seen.verdict
    if not len(seen.logits) or (node is None and verdict is None):
        raise UserError(f"{context.request} drew no token in this step: it fed a part of its prompt")
    if node is not None and not 0 <= node < len(tree):
        raise UserError(f"there is no node {node}: this step has {len(tree)}, numbered from 0")
    if node is None:
        assert verdict is not None
        above, token = (int(verdict.path[-1]) if len(verdict.path) else ROOT), verdict.token
    else:
        above, token = int(tree.parent[node]), int(tree.token[node])
    path, logits = seen.path(above), seen.logits[above + 1].float()
    p = seen.target(above) if node is not None else _left(seen, above)
    chosen = torch.zeros_like(logits)
    if isinstance(p, Chosen):
        chosen[p.token] = 1
    row, q = seen.draft.row(path), seen.draft.q.get(above)
    draft = None if row is None else row.full()[0]
    moved = LogitRows(logits[None], context.params, context.tokens, context.prompt_len, [path]).shaped()
    allowed = context.allowed
    limits = None if allowed is None else allowed.rows(context.tokens[context.prompt_len :], [path])
    refused = () if limits is None or not limits.any() else (_refused(moved[0], limits, context.params),)
    moved = (moved if limits is None else mask_(moved.clone(), limits))[0]
    raw, drafted = _array(logits.softmax(-1)), None if draft is None else _array(draft.softmax(-1))
    outside = draft is not None and bool(draft[token] == -torch.inf)
    return NodeView(
        request=context.request,
        step=seen.step,
        index=seen.index,
        node=node,
        token=token,
        raw=DistributionView.of(raw, token),
        p=DistributionView.of(_array(chosen if isinstance(p, Chosen) else p.row), token),
        draft=None if drafted is None else DistributionView.of(drafted, token, outside=outside),
        q=None if q is None else DistributionView.of(_array(q), token),
        removed=(*refused, *_removed(moved, context.params)),
        choice_rank=None if drafted is None else rank_of(drafted, int(raw.argmax())),
        kl=None if drafted is None else kl_of(raw, drafted),
        tv=None if drafted is None else float(np.abs(raw - drafted).sum() / 2),
        computed=seen.computed,
        notes=(*seen.notes, *_contradictions(engine, seen)),
    )


def _array(row: Tensor) -> Probs:
    return row.float().cpu().numpy()


def _left(seen: PartTensors, above: int) -> Left:
    """The target's p less what rejected children took, by the step's rule: what the final token was drawn from."""
    p = seen.target(above)
    tree, verdict = seen.draft.tree, seen.verdict
    q = None if verdict is not None and verdict.rule == MATCH else seen.draft.q.get(above)
    ahead = ratios(tree, verdict).parent if verdict is not None and looks_ahead(verdict.rule) else None
    for child in tree.children(above):
        drawn, scale = tree.drawn[child], 1.0 if ahead is None or q is None else float(ahead[child])
        if drawn == Drawn.DETERMINISTIC:  # all of q is on it, whatever its siblings were drawn from
            p, _, _ = rejected(p, None, int(tree.token[child]), gone=False)
            continue
        p, q, _ = rejected(p, q, int(tree.token[child]), gone=drawn == Drawn.WITHOUT_REPLACEMENT, scale=scale)
    return p


def _contradictions(engine: Engine, seen: PartTensors) -> Iterator[str]:
    """Remarks where the numbers here differ from those that were judged."""
    if seen.verdict is None:
        return
    tree, least = seen.draft.tree, ROUNDING.get(engine.run_info.dtype, 0.0)
    below: dict[int, Left] = {}
    for node, (above, token) in enumerate(zip(tree.parent.tolist(), tree.token.tolist(), strict=True)):
        if above not in below:
            below[above] = seen.target(above)
        here, judged = below[above].prob(token), float(seen.verdict.p[node])
        if abs(here - judged) > least:
            yield f"node {node} was judged with p {judged:.4g}; here its p is {here:.4g}"


def _refused(logits: Tensor, limits: Ints, params: SamplingParams) -> Removed:
    """What the request's form or minimum length removes before the other rules; [V], [1, V / 32]."""
    p = logits.softmax(-1)
    allowed = mask_(torch.zeros(1, len(p)), limits)[0] == 0
    gone = p.masked_fill(allowed.to(p.device), 0)
    best = gone.topk(min(SHOWN, len(gone)))
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    form = params.structured_outputs
    name = f"min_tokens {params.min_tokens}" if form is None else f"structured output ({form.kind})"
    return Removed(name, int((~allowed).sum()), float(gone.sum()), tuple(TopToken(t, m) for t, m in likeliest if m > 0))


def _removed(logits: Tensor, params: SamplingParams) -> Iterator[Removed]:
    if params.greedy:
        yield Removed("temperature 0", len(logits) - 1, float(1 - logits.softmax(-1).max()))
        return
    rows = scaled(logits[None], params.temperature)
    whole = rows.softmax(-1)[0]
    left = torch.ones_like(whole, dtype=torch.bool)
    for name, rules in (
        (f"min-p {params.min_p}", {"min_p": params.min_p}),
        (f"top-k {params.top_k}", {"min_p": params.min_p, "top_k": params.top_k}),
        (f"top-p {params.top_p}", {"min_p": params.min_p, "top_k": params.top_k, "top_p": params.top_p}),
    ):
        passing = softmax_(rows.clone(), SamplingParams(temperature=params.temperature, **rules))[0] > 0  # type: ignore[arg-type]
        gone = left & ~passing
        if bool(gone.any()):
            yield Removed(name, int(gone.sum()), float(whole[gone].sum()))
        left = left & passing
