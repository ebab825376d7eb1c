"""What an audit's differences say about the cause: where they begin, against where each cause would make them begin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.audit.audit import FED, Audit
from specscope.analyze.conditions import log_fisher, phi
from specscope.analyze.diagnose.by_text import tail_of_binomial
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import LOG_CHANCE, Proof, Suspect
from specscope.analyze.diagnose.together import DRAFTER, LOGPROBS, TARGET
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.plans.heads import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.notes import model_part
from specscope.trace.record.tree import ROOT

Facts = dict[str, NDArray[Any]]
Bools = NDArray[np.bool_]
NEAR = 8  # positions within which all requests first reach beyond the end of a table
BEFORE = 3  # steps of a request that must agree before the end of a table
LEAST = 0.35  # correlation between a prediction and the differences

FINAL = ("final token", "final p")
DRAWS = "draft draws"
ALIKE = "; it looks like "  # before what the audit says of the rows that fed a head


@dataclass(frozen=True)
class Prediction:
    """Where a cause would make steps differ for the first time in their request."""

    cause: Cause
    where: str
    holds: Callable[[Facts], Bools]


def _eq(name: str, value: object) -> Callable[[Facts], Bools]:
    return lambda facts: np.asarray(facts[name] == value)


def _in(name: str, *values: str) -> Callable[[Facts], Bools]:
    return lambda facts: np.isin(facts[name], values)


def _over(name: str, least: float) -> Callable[[Facts], Bools]:
    return lambda facts: np.asarray(facts[name] > least)


OF_TARGET = (
    Prediction(Cause.TARGET_KV, "the step before moved its path", _eq("the path of the step before was moved", True)),
    Prediction(Cause.TARGET_KV, "the step before rejected a draft", _in("the step before", "nothing", "partial")),
    Prediction(Cause.BLOCKS_SHARED, "a block is held by two requests", _eq("a block is held by two requests", True)),
    Prediction(Cause.TARGET_KV, "the prompt came in several chunks", _over("prefill chunks", 1)),
    Prediction(Cause.TARGET_KV, "the request was preempted before", _over("preemptions of the request", 0)),
)
MOVED = ("the path of the step before was moved", _eq("the path of the step before was moved", True))
OF_DRAFTER = (
    Prediction(Cause.DRAFTER_KV, "the step before was accepted in full", _eq("the step before", "full")),
    Prediction(Cause.DRAFTER_KV, "the request was preempted before", _over("preemptions of the request", 0)),
    Prediction(Cause.DRAFTER_KV, "the step before rejected a draft", _in("the step before", "nothing", "partial")),
    Prediction(
        Cause.DRAFTER_KV,
        "the beginning of the prompt was found in the prefix cache",
        _over("tokens found in the prefix cache", 0),
    ),
    Prediction(Cause.DRAFTER_FED, "the prompt came in several chunks", _over("prefill chunks", 1)),
)
OF_HEAD = (
    Prediction(Cause.DRAFTER_FED, *MOVED),
    Prediction(Cause.DRAFTER_FED, "the step before accepted drafted tokens", _over("accepted in the step before", 0)),
    *OF_DRAFTER,
)
OF_DRAFT_MODEL = (*OF_DRAFTER, Prediction(Cause.DRAFTER_KV, *MOVED))


def from_audit(case: Case, audit: Audit) -> list[Suspect]:
    """Causes that fit the places where the models disagree with the capture."""
    target = _first(audit, [name for name in TARGET if name != LOGPROBS])
    drafter = _first(audit, [name for name in DRAFTER if name != DRAWS])  # draws follow from these
    suspects: list[Suspect | None] = []
    if target is not None:
        facts, differs, items = onset(case, target)
        suspects += [_predicted(target, prediction, facts, differs, items, "target") for prediction in OF_TARGET]
        suspects.append(_rules(case, audit, target))
        suspects.append(_final(case, audit))
        suspects.append(_decay(case, target))
    if drafter is not None:
        facts, differs, items = onset(case, drafter)
        eagle = case.history.run is not None and runs_head(model_part(case.history.run.drafter))
        predictions = OF_HEAD if eagle else OF_DRAFT_MODEL
        suspects += [_predicted(drafter, prediction, facts, differs, items, "drafter") for prediction in predictions]
        suspects.append(_beyond(case, drafter))
        suspects += [_odd_token(case, drafter), _at_another_place(case, drafter)]
    suspects += [_embedding(audit), _fed(audit), _draws(case, audit), _logprobs(audit) if target is None else None]
    return [suspect for suspect in suspects if suspect is not None]


def _embedding(audit: Audit) -> Suspect | None:
    """A head's embedding that has nothing in common with the target's: not loaded, or another model's."""
    finding = audit.finding("head's embedding")
    if finding is None or finding.result is not CheckResult.FAILED:
        return None
    line = f"the head's embedding and the target's have {finding.detail}"
    return Suspect(Cause.HEAD_EMBEDDING, Proof.ROWS, (line,))


def _fed(audit: Audit) -> Suspect | None:
    """Rows that fed the head, where the audit says whose hidden states they are."""
    finding = audit.finding(FED)
    if finding is None or not finding.failed or ALIKE not in finding.about:
        return None
    looks = finding.about.rpartition(ALIKE)[2]
    line = (
        f"in {finding.failed:,} of {plural(finding.tested, finding.unit)} the rows that fed the head look like {looks}"
    )
    return Suspect(Cause.DRAFTER_FED, Proof.ROWS, (line,), example=finding.example)


def _logprobs(audit: Audit) -> Suspect | None:
    """Log-probabilities that are not the model's, where its other figures are."""
    finding = audit.finding(LOGPROBS)
    if finding is None or finding.result is not CheckResult.FAILED:
        return None
    line = f"{finding.failed:,} of {plural(finding.tested, finding.unit)}: {finding.detail}"
    return Suspect(Cause.LOGPROBS, Proof.ROWS, (line,), example=finding.example)


def _draws(case: Case, audit: Audit) -> Suspect | None:
    """Drafted tokens that their coins do not draw, where their q is the model's; none where siblings alone are wrong.

    What moves or drops siblings leaves a node that has none as it was drawn.
    """
    draws, q = audit.finding(DRAWS), audit.finding("draft p")
    if draws is None or q is None or draws.result is not CheckResult.FAILED:
        return None
    alone = [
        step
        for step, node in _drafted(case, draws, wrong=True)
        if len(step.tree.children(int(step.tree.parent[node]))) == 1
    ]
    if q.result is not CheckResult.PASSED or not alone:
        return None
    line = (
        f"the drafter's q is the model's at all {plural(q.tested, 'node')}, but the recorded coin draws another "
        f"token from it at {draws.failed:,} of {draws.tested:,}"
    )
    return Suspect(Cause.Q_NOT_DRAWN, Proof.CONDITION, (line,), example=draws.example)


def _first(audit: Audit, names: Sequence[str]) -> Finding | None:
    """The first of these quantities that differs."""
    for name in names:
        finding = audit.finding(name)
        if finding is not None and finding.result is CheckResult.FAILED and finding.items:
            return finding
    return None


def onset(case: Case, finding: Finding) -> tuple[Facts, Bools, list[Reference]]:
    """The steps of each request up to the first that differs: facts of each, and whether it is that one.

    What is wrong in a cache stays wrong, so that later steps say nothing about how it began.
    """
    wrong: dict[tuple[str, int], bool] = {}
    where: dict[tuple[str, int], Reference] = {}
    for item, differs in zip(finding.items, finding.differs, strict=True):
        key = (item.request, item.index)
        wrong[key] = wrong.get(key, False) or differs
        where.setdefault(key, Reference(item.request, item.index, item.step))
    first: dict[str, int] = {}
    for (request, index), differs in wrong.items():
        if differs:
            first[request] = min(first.get(request, index), index)
    keys = sorted(key for key in wrong if key[1] <= first.get(key[0], key[1]))
    items = [where[key] for key in keys]
    table = facts_table(case.history, items)
    return {n: np.asarray(v) for n, v in table.items()}, np.array([wrong[key] for key in keys], np.bool_), items


def _predicted(
    finding: Finding, prediction: Prediction, facts: Facts, differs: Bools, items: list[Reference], what: str
) -> Suspect | None:
    """A cause, where its prediction fits the places at which differences begin; None where it does not."""
    try:
        held = prediction.holds(facts)
    except KeyError:
        return None
    a, b = int((held & differs).sum()), int((held & ~differs).sum())
    c, d = int((~held & differs).sum()), int((~held & ~differs).sum())
    agree = float(phi(np.array([a]), np.array([a + b]), a + c, a + b + c + d)[0])
    chance = log_fisher(a, b, c, d)
    if chance > LOG_CHANCE or (agree < LEAST and c):  # an intermittent fault is at work in few of the steps that fit
        return None
    line = (
        f"the {what} differs from the model for the first time in {a:,} of {a + b:,} steps where {prediction.where}, "
        f"in {c:,} of {c + d:,} others"
    )
    example = next((item for item, yes in zip(items, held & differs, strict=True) if yes), finding.example)
    return Suspect(
        prediction.cause,
        Proof.CONDITION,
        (line,),
        example=example,
        explained=a,
        of=a + c,
        chance=math.exp(chance),
    )


def _rules(case: Case, audit: Audit, target: Finding) -> Suspect | None:
    """The sampling rules, where p is wrong and the raw p is right; those along a path, where p at the root is right."""
    ruled = (step.params is not None and (not step.params.greedy or step.params.penalised) for step in case.steps)
    if not any(ruled):
        return None
    raw = [audit.finding(name) for name in ("target raw p", "target top tokens")]
    known = [finding for finding in raw if finding is not None and finding.tested]
    if not known or any(finding.result is CheckResult.FAILED for finding in known):
        return None
    lines = [
        f"p after the sampling rules differs from the model's at {target.failed:,} of {target.tested:,}, "
        f"p before them at none of {known[0].tested:,}"
    ]
    if target.sentence:
        lines.append(target.sentence)
    at_root = any(
        wrong and item.node is not None and case.by_key[item.request, item.index].tree.parent[item.node] == ROOT
        for item, wrong in zip(target.items, target.differs, strict=True)
        if (item.request, item.index) in case.by_key
    )
    if not at_root:
        lines.append("so only below the root's children: the rules must follow a node's own path")
    return Suspect(Cause.RULES_WRONG, Proof.CONDITION, tuple(lines), example=target.example)


def _final(case: Case, audit: Audit) -> Suspect | None:
    """The final token is not the model's choice, though p of every drafted token is."""
    p = audit.finding("target p")
    final = _first(audit, FINAL)
    if final is None or p is None or p.result is not CheckResult.PASSED:
        return None
    items = zip(final.items, final.differs, strict=True)
    wrong = [case.by_key.get((item.request, item.index)) for item, differs in items if differs]
    lines = [
        f"the final token is not the model's in {final.failed:,} of {plural(final.tested, 'step')}, p of "
        f"all {p.tested:,} drafted tokens is"
    ]
    above = sum(step is not None and step.part.parents is not None and _is_choice(step) for step in wrong)
    if above > 1:
        lines.append(f"it is the target's choice at another node that was tried in {above:,} of these")
    if not above and all(step is not None and _is_off_its_path(step) for step in wrong):
        lines.append("it comes behind accepted drafts there, in requests whose rules look at the output")
        return Suspect(Cause.RULES_WRONG, Proof.CONDITION, tuple(lines), example=final.example)
    return Suspect(Cause.FINAL_OTHER_NODE, Proof.CONDITION, tuple(lines), example=final.example)


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
    if not odd:
        return None
    token, count = odd.most_common(1)[0]
    if count < 5 or count < 0.9 * odd.total():
        return None
    line = f"token {token}, which is in no text, is {count:,} of {plural(len(nodes), 'drafted token')} that differ"
    example = next(step.reference(node) for step, node in nodes if int(step.tree.token[node]) == token)
    return Suspect(Cause.DRAFT_PLACEHOLDERS, Proof.CONDITION, (line,), example=example, explained=count, of=len(nodes))


def _at_another_place(case: Case, finding: Finding) -> Suspect | None:
    """Nodes that differ and are the text's token some places on or before: more often than nodes that agree are."""
    wrong, right = _drafted(case, finding, wrong=True), _drafted(case, finding, wrong=False)
    best: Suspect | None = None
    for shift in (1, -1, 2, -2):
        hits, total = _there(wrong, shift), len(wrong)
        share = (_there(right, shift) + 1) / (len(right) + 2)
        if hits < 5 or hits < 0.4 * total or hits < 2 * _there(wrong, 0):
            continue
        chance = tail_of_binomial(hits, total, min(share, 0.99))
        where = f"{abs(shift)} {'further on' if shift > 0 else 'before'}"
        line = (
            f"drafted tokens that differ are the text's token {where} at {hits:,} of {total:,}, others at {share:.0%}"
        )
        if best is None or hits > (best.explained or 0):
            example = wrong[0][0].reference()
            best = Suspect(
                Cause.DRAFT_POSITION,
                Proof.CONDITION,
                (line,),
                (),
                example,
                explained=hits,
                of=total,
                chance=chance,
            )
    return best


def _there(nodes: Sequence[tuple[Step, int]], shift: int) -> int:
    """How many drafted tokens are the text's token `shift` places beyond their own depth."""
    return sum(
        step.token_after(int(step.tree.depth[node]) + shift) == int(step.tree.token[node]) for step, node in nodes
    )


def _beyond(case: Case, finding: Finding) -> Suspect | None:
    """A rotary table that ends: nearly everything beyond some position differs, and nearly nothing before it."""
    positions, records, differs, items = [], [], [], []
    for item, wrong in zip(finding.items, finding.differs, strict=True):
        step = case.by_key.get((item.request, item.index))
        if step is not None:
            depth = 0 if item.node is None else int(step.tree.depth[item.node])
            positions.append(step.part.position + depth)
            records.append(step.visit.record.step)
            differs.append(wrong)
            items.append(item)
    places, wrongs = np.array(positions), np.array(differs, np.bool_)
    if wrongs.all() or not wrongs.any():
        return None
    edge, held, agree = _edge(places, wrongs)
    a, b = int((held & wrongs).sum()), int(held.sum())
    c, d = int((~held & wrongs).sum()), int((~held).sum())
    in_time, _, as_well = _edge(np.array(records), wrongs)
    requests = len({item.request for item, yes in zip(items, held & wrongs, strict=True) if yes})
    if requests < 3 or d < 30 or agree < 0.8 or not _begins_at_one_place(items, places, wrongs):
        return None
    against = (f"it differs from engine step {in_time:,} on as clearly",) if as_well > agree - 0.05 else ()
    line = (
        f"the drafter differs from the model at {a:,} of {plural(b, 'node')} from position {edge:,} on, at {c:,} of "
        f"{d:,} before it, in {plural(requests, 'request')}"
    )
    example = next(item for item, yes in zip(items, held & wrongs, strict=True) if yes)
    proof = Proof.CONDITION if against else Proof.ROWS
    return Suspect(Cause.POSITIONS, proof, (line,), against, example, explained=a, of=a + c, spoiled=b - a)


def _begins_at_one_place(items: Sequence[Reference], positions: NDArray[np.int_], wrong: Bools) -> bool:
    """Whether requests that agree at first all differ from the same position on, and not each from its own.

    Where all prompts have one length, the first steps of all end at one position: so `BEFORE` steps must agree first.
    """
    first: dict[str, int] = {}
    agreed: dict[str, set[int]] = {}
    for item, position, differs in zip(items, positions.tolist(), wrong.tolist(), strict=True):
        if differs:
            first[item.request] = min(first.get(item.request, position), position)
        else:
            agreed.setdefault(item.request, set()).add(item.index)
    begins = [position for request, position in first.items() if len(agreed.get(request, ())) >= BEFORE]
    return len(begins) >= 3 and max(begins) - min(begins) <= NEAR


def _edge(positions: NDArray[np.int_], wrong: Bools) -> tuple[int, Bools, float]:
    """The position from which nearly all differs, what lies beyond it, and how well that predicts what differs."""
    edge = int(np.quantile(positions[wrong], 0.002))
    held = positions >= edge
    inside, beyond = int((held & wrong).sum()), int(held.sum())
    return edge, held, float(phi(np.array([inside]), np.array([beyond]), int(wrong.sum()), len(positions))[0])


def _decay(case: Case, finding: Finding) -> Suspect | None:
    """Requests that began before some engine step agree throughout; those that began after it differ from the start."""
    began: dict[str, int] = {}
    for visit in case.visits:
        began.setdefault(visit.request.id, visit.record.step)
    wrong: dict[str, int] = {}
    total: dict[str, int] = {}
    first: dict[str, Reference] = {}
    for item, differs in zip(finding.items, finding.differs, strict=True):
        total[item.request] = total.get(item.request, 0) + 1
        wrong[item.request] = wrong.get(item.request, 0) + differs
        if differs:
            first.setdefault(item.request, item)
    names = sorted((name for name in total if total[name] >= 4), key=lambda name: began[name])
    bad = np.array([wrong[name] > 0.25 * total[name] for name in names], np.bool_)
    if len(names) < 8 or bad.all() or not bad.any():
        return None
    edge = int(bad.argmax())
    a, b, d = int(bad[edge:].sum()), int((~bad[edge:]).sum()), edge
    if d < 3 or log_fisher(a, b, 0, d) > LOG_CHANCE:
        return None
    step = began[names[edge]]
    line = (
        f"{d:,} requests that began before engine step {step:,} agree with the model, {a:,} of {a + b:,} that began "
        "later do not"
    )
    chance = math.exp(log_fisher(a, b, 0, d))
    return Suspect(Cause.TARGET_KV, Proof.CONDITION, (line,), example=first[names[edge]], chance=chance)
