"""The final draws once more: what is left of p by the models, and the token that the recorded coin draws from it.

A capture says how likely each final token was, not what else could have been drawn. With the models at hand the whole
residual is known: each draw can be done again (in our own runs, where the coin decides by the cumulative sum), and it
shows whether the drawn tokens lean to what the drafter held likely or unlikely, as they must not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import AuditedStep, Contexts, contexts_of
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.head import Head
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import Proof, Suspect
from specscope.analyze.diagnose.rates import ScoreSum
from specscope.analyze.diagnose.rerun.models import Models
from specscope.analyze.findings import Reference
from specscope.plans.heads import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import FinalKind
from specscope.trace.record.rules import ROUNDING, STANDARD
from specscope.trace.record.tree import Drawn

REQUESTS = 12  # whose draws are done again
BORDER = 2e-3  # a coin so near to another token's part of the sum may have drawn that token, whatever the dtype
HOPELESS = 0.25  # where rounding may move the border by more, a draw says nothing
SIGMAS = 5.0


@dataclass
class Draws:
    """Final draws after a rejection, done again."""

    total: int = 0
    other: int = 0  # where the coin draws another token
    lean: ScoreSum = field(default_factory=ScoreSum)  # log q of the drawn tokens, less what the residual says
    example: Reference | None = None


def shared_noise(case: Case, models: Models) -> list[Suspect]:
    """Recovered tokens that do not follow from the residual."""
    run = case.history.run
    wanted = [
        step.request
        for step in case.drafting
        if step.rejected_last and step.is_sampled and step.params is not None and not step.params.greedy
    ]
    if run is None or models.options.draft is None or len(wanted) < 20:
        return []
    names = list(dict.fromkeys(wanted))
    draws = _draws(case, models, names[:: max(1, len(names) // REQUESTS)][:REQUESTS])
    ours = run.is_ours
    lines = []
    if ours and draws.other > max(2, 0.05 * draws.total):
        lines.append(
            f"the recorded coin draws another token from the residual in {draws.other:,} of {draws.total:,} draws"
        )
    if draws.lean.count >= 20 and abs(draws.lean.z) > SIGMAS:
        side = "less" if draws.lean.value < 0 else "more"
        lines.append(
            f"tokens drawn from the residual are {side} likely to the drafter than draws from it would be, "
            f"{abs(draws.lean.z):.0f} standard errors over {plural(draws.lean.count, 'draw')}"
        )
    if not lines:
        return []
    proof = Proof.ROWS if ours and draws.other else Proof.SUM
    return [Suspect(Cause.COINS, proof, tuple(lines), example=draws.example, rerun=True)]


def _draws(case: Case, models: Models, names: Sequence[str]) -> Draws:
    run, target = case.history.run, models.target
    eagle = run is not None and runs_head(model_part(run.drafter))
    head = models.head if eagle else None
    draft = None if eagle else models.draft
    draws = Draws()
    for name in names:
        contexts = _contexts(case, name)
        if contexts is None or contexts.limits or contexts.params.limited:  # p is not the models' alone
            continue
        leaves = {step.rows[step.leaf]: step for step in contexts.steps if _recovered(step)}
        p, features = _rows(target, contexts, leaves, head, contexts.params)
        if head is not None and features is not None:
            q = _head_rows(head, contexts, features, leaves)
        elif draft is not None:
            q, _ = _rows(draft, contexts, leaves, None, contexts.drafter_params)
        else:
            continue
        for row, step in leaves.items():
            if row in p and row in q:
                _again(draws, step, p[row], q[row], ROUNDING.get(run.dtype if run else "", ROUNDING["bfloat16"]))
    return draws


def _contexts(case: Case, name: str) -> Contexts | None:
    request = case.history.requests[name]
    places = [place for place, part in enumerate(request.steps) if part.verdict is not None]
    numbers = [case.history.steps[index].step for index in request.engine_steps]
    return contexts_of(request, places, numbers, case.history.run)


def _recovered(step: AuditedStep) -> bool:
    """Whether its final token was drawn after sampled drafts were rejected."""
    verdict, tree = step.part.verdict, step.part.tree
    is_recovered = verdict is not None and verdict.kind is FinalKind.RECOVERED and verdict.rule == STANDARD
    if verdict is None or not is_recovered or len(verdict.forced):  # other rules leave something else of p
        return False
    children = tree.children(step.leaf)
    return bool(children) and tree.drawn[children[0]] != Drawn.DETERMINISTIC


def _rows(
    model: Causal, contexts: Contexts, leaves: dict[int, AuditedStep], head: Head | None, params: SamplingParams
) -> tuple[dict[int, Tensor], Tensor | None]:
    """The distribution at each leaf, after all rules; the features along the text with them."""
    by_row, along = {}, []
    for (rows, logits), piece in model.rows(contexts, () if head is None else head.layers):
        by_row.update(
            {row: _ruled(contexts, row, logits[index], params) for index, row in enumerate(rows) if row in leaves}
        )
        if piece is not None:
            along.append(piece.cpu())
    return by_row, torch.cat(along) if along else None


def _head_rows(head: Head, contexts: Contexts, features: Tensor, leaves: dict[int, AuditedStep]) -> dict[int, Tensor]:
    wanted = {id(step) for step in leaves.values()}
    asked = [
        (step, node)
        for step in contexts.steps
        if id(step) in wanted
        for node in sorted(step.rows)
        if step.part.tree.children(node)
    ]
    by_row = {}
    for some, logits in head.rows(contexts, features, asked):
        for (step, node), row in zip(some, logits, strict=True):
            if node == step.leaf:
                by_row[step.rows[node]] = _ruled(contexts, step.rows[node], row, contexts.drafter_params)
    return by_row


def _ruled(contexts: Contexts, row: int, logits: Tensor, params: SamplingParams) -> Tensor:
    rules = Rules(params, contexts.text[: contexts.prompt_len])
    outputs = [contexts.output(row)] if params.penalised else [[]]
    return rules.scores(rules.shaped(logits[None].cpu(), outputs)).softmax(-1)[0].double()


def _again(draws: Draws, step: AuditedStep, p: Tensor, q: Tensor, rounding: float) -> None:
    """Draw once more, and count whether another token comes out and how the recorded one leans."""
    verdict, tree = step.part.verdict, step.part.tree
    assert verdict is not None
    whole, border = q, rounding  # subtraction magnifies the errors of p and q
    for child in tree.children(step.leaf):
        left = (p - q).clamp(min=0)
        if (mass := float(left.sum())) > 0:
            p, border = left / mass, border / mass
        if tree.drawn[child] == Drawn.WITHOUT_REPLACEMENT:
            rest = q.clone()
            rest[int(tree.token[child])] = 0
            q = rest / rest.sum() if float(rest.sum()) > 0 else q
    token = verdict.token
    if float(p[token]) < 1e-9:
        return  # it could not be drawn at all: another cause
    ends = p.cumsum(0)
    below, above = float(ends[token] - p[token]), float(ends[token])
    border = max(border, BORDER)
    if border < HOPELESS:
        draws.total += 1
        if not below - border <= verdict.final_coin <= above + border:
            draws.other += 1
            draws.example = draws.example or step.at(None)
    held = whole.clamp(min=1e-9).log()
    mean = float((p * held).sum())
    variance = float((p * held * held).sum()) - mean * mean
    draws.lean.add(math.log(max(float(whole[token]), 1e-9)) - mean, max(variance, 0.0))
