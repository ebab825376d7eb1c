"""What an audit's differences say about the cause: where they begin, against where each cause would make them begin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.tally import FED
from specscope.analyze.conditions import log_fisher, phi
from specscope.analyze.diagnose.causes import DRAFTER, LOGPROBS, TARGET, Cause
from specscope.analyze.diagnose.diagnosis import LOG_CHANCE, Proof, Suspect, counted
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.analyze.significance import tail_of_binomial
from specscope.analyze.verify.case import Case, Step
from specscope.plans.heads import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part
from specscope.trace.record.tree import ROOT

Facts = dict[str, NDArray[Any]]
Bools = NDArray[np.bool_]
NEAR = 8  # positions within which all requests first reach beyond the end of a table
BEFORE = 3  # steps of a request that must agree before the end of a table
LEAST = 0.35  # correlation between a prediction and the differences
FEW = 5  # drafted tokens: fewer show no pattern
FINAL = ("final token", "final p")
DRAWS = "draft draws"
ALIKE = "; it looks like "  # before what the audit says of the rows that fed a head


@dataclass(frozen=True)
class Prediction:
    """Where a cause would make steps differ for the first time in their request: where a fact has such a value."""

    cause: Cause
    fact: str
    where: str
    holds: Callable[[NDArray[Any]], NDArray[Any]]


def _some(values: NDArray[Any]) -> Bools:
    return np.asarray(values > 0)


def _one_of(*values: str) -> Callable[[NDArray[Any]], Bools]:
    return lambda facts: np.isin(facts, values)


LAST, LOST, CHUNKS = "the step before", "preemptions of the request", "prefill chunks"
FOUND = "tokens found in the prefix cache"
MOVED = ("the path of the step before was moved", "the step before moved its path", _some)
REJECTED = (LAST, "the step before rejected a draft", _one_of("nothing", "partial"))
PREEMPTED = (LOST, "the request was preempted before", _some)
IN_CHUNKS = (CHUNKS, "the prompt came in several chunks", lambda values: values > 1)
OF_TARGET = (
    Prediction(Cause.TARGET_KV, *MOVED),
    Prediction(Cause.TARGET_KV, *REJECTED),
    Prediction(Cause.BLOCKS_SHARED, "a block is held by two requests", "a block is held by two requests", _some),
    Prediction(Cause.TARGET_KV, *IN_CHUNKS),
    Prediction(Cause.TARGET_KV, *PREEMPTED),
)
OF_DRAFTER = (
    Prediction(Cause.DRAFTER_KV, LAST, "the step before was accepted in full", _one_of("full")),
    Prediction(Cause.DRAFTER_KV, *PREEMPTED),
    Prediction(Cause.DRAFTER_KV, *REJECTED),
    Prediction(Cause.DRAFTER_KV, FOUND, "the beginning of the prompt was found in the prefix cache", _some),
    Prediction(Cause.DRAFTER_FED, *IN_CHUNKS),
)
OF_HEAD = (
    Prediction(Cause.DRAFTER_FED, *MOVED),
    Prediction(Cause.DRAFTER_FED, "accepted in the step before", "the step before accepted drafted tokens", _some),
    *OF_DRAFTER,
)
OF_DRAFT_MODEL = (*OF_DRAFTER, Prediction(Cause.DRAFTER_KV, *MOVED))


def from_audit(case: Case, audit: Audit) -> list[Suspect]:
    """Causes that fit the places where the models disagree with the capture."""
    target = _first(audit, [name for name in TARGET if name != LOGPROBS])
    drafter = _first(audit, [name for name in DRAFTER if name != DRAWS])  # draws follow from these
    suspects: list[Suspect | None] = []
    if target is not None:
        suspects += _predicted(case, target, OF_TARGET, "target")
        suspects += [_rules(case, audit, target), _final(case, audit), _decay(case, target)]
    if drafter is not None:
        eagle = case.history.run is not None and runs_head(model_part(case.history.run.drafter))
        suspects += _predicted(case, drafter, OF_HEAD if eagle else OF_DRAFT_MODEL, "drafter")
        suspects += [_beyond(case, drafter), _odd_token(case, drafter), _at_another_place(case, drafter)]
    suspects += [_shown(audit, "head's embedding", Cause.HEAD_EMBEDDING), _fed(audit), _draws(case, audit)]
    suspects.append(None if target is not None else _shown(audit, LOGPROBS, Cause.LOGPROBS))
    return [suspect for suspect in suspects if suspect is not None]


def _first(audit: Audit, names: Sequence[str]) -> Finding | None:
    """The first of these quantities that differs."""
    for name in names:
        finding = audit.finding(name)
        if finding is not None and finding.result is CheckResult.FAILED and finding.items:
            return finding
    return None


def _shown(audit: Audit, name: str, cause: Cause) -> Suspect | None:
    """A cause that one quantity shows by itself."""
    finding = audit.finding(name)
    if finding is None or finding.result is not CheckResult.FAILED:
        return None
    return Suspect(cause, Proof.ROWS, (f"{name}: {finding.detail}",), example=finding.example)


def _fed(audit: Audit) -> Suspect | None:
    """Rows that fed the head, where the audit says whose hidden states they are."""
    finding = audit.finding(FED)
    if finding is None or not finding.failed or ALIKE not in finding.about:
        return None
    line = f"in {counted(finding)} the rows that fed the head look like {finding.about.rpartition(ALIKE)[2]}"
    return Suspect(Cause.DRAFTER_FED, Proof.ROWS, (line,), example=finding.example)


def _draws(case: Case, audit: Audit) -> Suspect | None:
    """Drafted tokens that their coins do not draw, where their q is the model's; none where siblings alone are wrong.

    What moves or drops siblings leaves a node that has none as it was drawn.
    """
    draws, q = audit.finding(DRAWS), audit.finding("draft p")
    if draws is None or draws.result is not CheckResult.FAILED or q is None or q.result is not CheckResult.PASSED:
        return None
    wrong = _drafted(case, draws, wrong=True)
    if not any(len(step.tree.children(int(step.tree.parent[node]))) == 1 for step, node in wrong):
        return None
    line = (
        f"the drafter's q is the model's at all {plural(q.tested, 'node')}, but the recorded coin draws another "
        f"token from it at {draws.failed:,} of {draws.tested:,}"
    )
    return Suspect(Cause.Q_NOT_DRAWN, Proof.CONDITION, (line,), example=draws.example)


def onset(case: Case, finding: Finding) -> tuple[Facts, Bools, list[Reference]]:
    """The steps of each request up to the first that differs: facts of each, and whether it is that one.

    What is wrong in a cache stays wrong, so that later steps say nothing about how it began.
    """
    wrong: dict[tuple[str, int], bool] = {}
    where: dict[tuple[str, int], Reference] = {}
    for item, differs in zip(finding.items, finding.differs, strict=True):
        key = (item.request, item.index)
        wrong[key] = wrong.get(key, False) or differs
        where.setdefault(key, replace(item, node=None))
    first: dict[str, int] = {}
    for (request, index), differs in wrong.items():
        if differs:
            first[request] = min(first.get(request, index), index)
    keys = sorted(key for key in wrong if key[1] <= first.get(key[0], key[1]))
    items = [where[key] for key in keys]
    table = facts_table(case.history, items)
    return {n: np.asarray(v) for n, v in table.items()}, np.array([wrong[key] for key in keys], np.bool_), items


def _predicted(case: Case, finding: Finding, predictions: Sequence[Prediction], what: str) -> list[Suspect]:
    """The causes whose predictions fit the places at which differences begin."""
    facts, differs, items = onset(case, finding)
    suspects = []
    for prediction in predictions:
        if prediction.fact not in facts:
            continue
        held = prediction.holds(facts[prediction.fact])
        a, b, c, d, agree = _crossed(held, differs)
        chance = log_fisher(a, b, c, d)
        if chance > LOG_CHANCE or (agree < LEAST and c):  # an intermittent fault is at work in few steps that fit
            continue
        line = (
            f"the {what} differs from the model for the first time in {a:,} of {a + b:,} steps where "
            f"{prediction.where}, in {c:,} of {c + d:,} others"
        )
        example = next((item for item, yes in zip(items, held & differs, strict=True) if yes), finding.example)
        suspect = Suspect(prediction.cause, Proof.CONDITION, (line,), (), example, a, a + c, chance=math.exp(chance))
        suspects.append(suspect)
    return suspects


def _crossed(held: Bools, wrong: Bools) -> tuple[int, int, int, int, float]:
    """How many are held and wrong, held and right, not held and wrong, neither; and their correlation."""
    a, b = int((held & wrong).sum()), int((held & ~wrong).sum())
    c, d = int((~held & wrong).sum()), int((~held & ~wrong).sum())
    return a, b, c, d, float(phi(np.array([a]), np.array([a + b]), a + c, a + b + c + d)[0])


def _rules(case: Case, audit: Audit, target: Finding) -> Suspect | None:
    """The sampling rules, where p is wrong and the raw p is right."""
    ruled = (step.params is not None and (not step.params.greedy or step.params.penalised) for step in case.steps)
    raw = [audit.finding(name) for name in ("target raw p", "target top tokens")]
    known = [finding for finding in raw if finding is not None and finding.tested]
    if not any(ruled) or not known or any(finding.result is CheckResult.FAILED for finding in known):
        return None
    line = (
        f"p after the sampling rules differs from the model's at {target.failed:,} of {target.tested:,}, "
        f"p before them at none of {known[0].tested:,}"
    )
    lines = tuple(filter(None, (line, target.sentence)))
    return Suspect(Cause.RULES_WRONG, Proof.CONDITION, lines, example=target.example)


def _final(case: Case, audit: Audit) -> Suspect | None:
    """The final token is not the model's choice, though p of every drafted token is."""
    p = audit.finding("target p")
    final = _first(audit, FINAL)
    if final is None or p is None or p.result is not CheckResult.PASSED:
        return None
    wrong = [
        step
        for item, differs in zip(final.items, final.differs, strict=True)
        if differs and (step := case.by_key.get((item.request, item.index))) is not None
    ]
    line = f"the final token is not the model's in {counted(final)}, p of all {p.tested:,} drafted tokens is"
    # Behind accepted drafts, in requests whose rules look at the output
    off_path = all(_is_off_its_path(step) for step in wrong) and not any(_is_choice(step) for step in wrong)
    cause = Cause.RULES_WRONG if off_path else Cause.FINAL_OTHER_NODE
    return Suspect(cause, Proof.CONDITION, (line,), example=final.example)


def _is_off_its_path(step: Step) -> bool:
    """Whether the rules that its final token is under must count accepted drafts of the same step."""
    return step.params is not None and (step.params.penalised or step.params.limited) and len(step.verdict.path) > 0


def _is_choice(step: Step) -> bool:
    """Whether the final token is the target's choice at another tried parent than the one that it follows."""
    notes, path = step.part.parents, step.verdict.path
    leaf = int(path[-1]) if len(path) else ROOT
    return notes is not None and bool(((notes.choice == step.verdict.token) & (notes.node != leaf)).any())


def _drafted(case: Case, finding: Finding, *, wrong: bool) -> list[tuple[Step, int]]:
    """The nodes that differ (`wrong`) or agree; all nodes of a step that is compared as a whole."""
    nodes = []
    for item, differs in zip(finding.items, finding.differs, strict=True):
        step = case.by_key.get((item.request, item.index))
        if step is not None and differs == wrong:
            nodes += [(step, node) for node in (range(len(step.tree)) if item.node is None else (item.node,))]
    return nodes


def _odd_token(case: Case, finding: Finding) -> Suspect | None:
    """Padding: nearly all nodes that differ hold one token, which is in no text."""
    nodes = _drafted(case, finding, wrong=True)
    texts = {token for step in case.steps for token in step.text}
    odd = Counter(int(step.tree.token[node]) for step, node in nodes if int(step.tree.token[node]) not in texts)
    token, count = odd.most_common(1)[0] if odd else (0, 0)
    if count < max(FEW, 0.9 * odd.total()):
        return None
    line = f"token {token}, which is in no text, is {count:,} of {plural(len(nodes), 'drafted token')} that differ"
    example = next(step.reference(node) for step, node in nodes if int(step.tree.token[node]) == token)
    return Suspect(Cause.DRAFT_PLACEHOLDERS, Proof.CONDITION, (line,), example=example, explained=count, of=len(nodes))


def _at_another_place(case: Case, finding: Finding) -> Suspect | None:
    """Nodes that differ and are the text's token some places on or before: more often than nodes that agree are."""
    wrong, right = _drafted(case, finding, wrong=True), _drafted(case, finding, wrong=False)
    total, shift = len(wrong), max((1, -1, 2, -2), key=lambda shift: _there(wrong, shift))
    hits, share = _there(wrong, shift), (_there(right, shift) + 1) / (len(right) + 2)
    if hits < max(FEW, 0.4 * total, 2 * _there(wrong, 0)):
        return None
    where = f"{abs(shift)} {'further on' if shift > 0 else 'before'}"
    line = f"drafted tokens that differ are the text's token {where} at {hits:,} of {total:,}, others at {share:.0%}"
    chance, example = tail_of_binomial(hits, total, min(share, 0.99)), wrong[0][0].reference()
    return Suspect(Cause.DRAFT_POSITION, Proof.CONDITION, (line,), (), example, hits, total, chance=chance)


def _there(nodes: Sequence[tuple[Step, int]], shift: int) -> int:
    """How many drafted tokens are the text's token `shift` places beyond their own depth."""
    return sum(
        step.token_after(int(step.tree.depth[node]) + shift) == int(step.tree.token[node]) for step, node in nodes
    )


def _beyond(case: Case, finding: Finding) -> Suspect | None:
    """A rotary table that ends: nearly everything beyond some position differs, and nearly nothing before it.

    Requests that agree at first must all differ from the same position on, and not each from its own. Where all prompts
    have one length, the first steps of all end at one position: so `BEFORE` steps must agree first.
    """
    positions, differs, first, agreed = list[int](), list[bool](), dict[str, int](), dict[str, set[int]]()
    for item, wrong in zip(finding.items, finding.differs, strict=True):
        if (step := case.by_key.get((item.request, item.index))) is not None:
            position = step.part.position + (0 if item.node is None else int(step.tree.depth[item.node]))
            positions.append(position)
            differs.append(wrong)
            if wrong:
                first[item.request] = min(first.get(item.request, position), position)
            else:
                agreed.setdefault(item.request, set()).add(item.index)
    begins = [position for request, position in first.items() if len(agreed.get(request, ())) >= BEFORE]
    if len(begins) < 3 or max(begins) - min(begins) > NEAR:
        return None
    places, wrongs = np.array(positions), np.array(differs, np.bool_)
    edge = int(np.quantile(places[wrongs], 0.002))
    a, b, c, d, agree = _crossed(places >= edge, wrongs)
    if c + d < 30 or agree < 0.8:
        return None
    line = (
        f"the drafter differs from the model at {a:,} of {plural(a + b, 'node')} from position {edge:,} on, at {c:,} "
        f"of {c + d:,} before it, in {plural(len(first), 'request')}"
    )
    return Suspect(Cause.POSITIONS, Proof.ROWS, (line,), (), finding.example, explained=a, of=a + c, spoiled=b)


def _decay(case: Case, finding: Finding) -> Suspect | None:
    """Requests that began before some engine step agree throughout; those that began after it differ from the start."""
    began: dict[str, int] = {}
    for visit in case.visits:
        began.setdefault(visit.request.id, visit.record.step)
    flags: dict[str, list[bool]] = {}
    for item, differs in zip(finding.items, finding.differs, strict=True):
        flags.setdefault(item.request, []).append(differs)
    names = sorted((name for name in flags if len(flags[name]) >= 4), key=lambda name: began[name])
    bad = np.array([np.mean(flags[name]) > 0.25 for name in names], np.bool_)
    if len(names) < 8 or bad.all() or not bad.any():
        return None
    edge = int(bad.argmax())
    a, b = int(bad[edge:].sum()), int((~bad[edge:]).sum())
    chance = log_fisher(a, b, 0, edge)
    if edge < 3 or chance > LOG_CHANCE:
        return None
    line = (
        f"{edge:,} requests that began before engine step {began[names[edge]]:,} agree with the model, {a:,} of "
        f"{a + b:,} that began later do not"
    )
    return Suspect(Cause.TARGET_KV, Proof.CONDITION, (line,), example=finding.example, chance=math.exp(chance))
