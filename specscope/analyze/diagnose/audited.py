"""What an audit's differences say about the cause: where they begin, against where each cause would make them begin."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.tally import FED
from specscope.analyze.conditions import log_fisher, phi
from specscope.analyze.diagnose.causes import DRAFTER, LOGPROBS, TARGET, Cause
from specscope.analyze.diagnose.diagnosis import LOG_CHANCE, Suspect, counted
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Finding, Reference
from specscope.analyze.locate.located import Proof
from specscope.analyze.significance import tail_of_binomial
from specscope.analyze.verify.trial import Case, Step
from specscope.plans.kinds import runs_head
from specscope.trace.history.wording import plural
from specscope.trace.record.tree import ROOT, Bools

Compared = tuple[Step, int | None, bool]  # a node, or a step as a whole, and whether it differs
NEAR = 8  # positions within which all requests first reach beyond the end of a table
BEFORE = 3  # steps of a request that must agree before the end of a table
LEAST = 0.35  # correlation between a prediction and the differences
FEW = 5  # drafted tokens: fewer show no pattern
FINAL = ("final token", "final p")
DRAWS = "draft draws"
ALIKE = "; it looks like "  # before what the audit says of the rows that fed a head
# Where a cause would make steps differ for the first time in their request: the fact, which values, in words
Prediction = tuple[str, Callable[[NDArray[Any]], NDArray[Any]], str]


_some: Callable[[NDArray[Any]], NDArray[Any]] = partial(np.less, 0)
LAST, SHARED = "the step before", "two requests hold one block"
MOVED: Prediction = ("the previous step's path was moved", _some, "the step before moved its path")
REJECTED: Prediction = (
    LAST,
    lambda facts: np.isin(facts, ("nothing", "partial")),
    "the step before rejected a draft",
)
FULL: Prediction = (LAST, lambda facts: facts == "full", "the step before was accepted in full")
PREEMPTED: Prediction = ("preemptions of the request", _some, "the request was preempted before")
IN_CHUNKS: Prediction = ("prefill chunks", lambda values: values > 1, "the prompt came in several chunks")
FOUND = ("tokens found in the prefix cache", _some, "the beginning of the prompt was found in the prefix cache")
ACCEPTED: Prediction = ("accepted in the previous step", _some, "the step before accepted drafted tokens")
OF_TARGET: dict[Prediction, Cause] = {
    **dict.fromkeys((MOVED, REJECTED, IN_CHUNKS, PREEMPTED), Cause.TARGET_KV),
    (SHARED, _some, SHARED): Cause.BLOCKS_SHARED,
}
OF_DRAFTER = {**dict.fromkeys((FULL, PREEMPTED, REJECTED, FOUND), Cause.DRAFTER_KV), IN_CHUNKS: Cause.DRAFTER_FED}
OF_HEAD = {**dict.fromkeys((MOVED, ACCEPTED), Cause.DRAFTER_FED), **OF_DRAFTER}


def from_audit(case: Case, audit: Audit) -> Iterator[Suspect]:
    """Causes that fit the places where the models disagree with the capture."""
    results = (CheckResult.FAILED, CheckResult.PASSED)
    failed, passed = ({one.name: one for one in audit.findings if one.result is result} for result in results)
    target = _first(failed, [name for name in TARGET if name != LOGPROBS])
    drafter = _first(failed, [name for name in DRAFTER if name != DRAWS])  # draws follow from these
    if target is not None:
        yield from _predicted(case, target, OF_TARGET, "target")
        yield from _final(case, failed, passed) if "target p" in passed else _rules(case, target, failed, passed)
        yield from _decay(case, target)
    elif LOGPROBS in failed:
        yield _shown(failed[LOGPROBS], Cause.LOGPROBS)
    if drafter is not None:
        is_head = case.history.run is not None and runs_head(case.history.run.drafter)
        yield from _predicted(case, drafter, OF_HEAD if is_head else {**OF_DRAFTER, MOVED: Cause.DRAFTER_KV}, "drafter")
        yield from _beyond(case, drafter)
        yield from _odd_token(case, drafter)
        yield from _at_another_place(case, drafter)
    if "head's embedding" in failed:
        yield _shown(failed["head's embedding"], Cause.HEAD_EMBEDDING)
    if FED in failed and (ALIKE in failed[FED].about or target is None):
        _, alike, other = failed[FED].about.rpartition(ALIKE)
        looks = f"look like {other}" if alike else "have other norms than the target's hidden states"
        line = f"in {counted(failed[FED])} the rows that fed the head {looks}"
        yield Suspect(Cause.DRAFTER_FED, Proof.ROWS if alike else Proof.SUM, (line,), failed[FED].example)
    if DRAWS in failed and "draft p" in passed:
        yield from _draws(case, failed[DRAWS], passed["draft p"])


def _first(failed: dict[str, Finding], names: Sequence[str]) -> Finding | None:
    return next((failed[name] for name in names if name in failed and failed[name].items), None)


def _shown(finding: Finding, cause: Cause) -> Suspect:
    """A cause that one quantity shows by itself."""
    return Suspect(cause, Proof.ROWS, (f"{finding.name}: {finding.detail}",), finding.example)


def _draws(case: Case, draws: Finding, q: Finding) -> Iterator[Suspect]:
    """Drafted tokens that their coins do not draw, where their q is the model's; none where siblings alone are wrong:
    what moves or drops these leaves a node that has none as it was drawn."""
    nodes = _nodes(_compared(case, draws), wrong=True)
    if any(len(step.tree.children(int(step.tree.parent[node]))) == 1 for step, node in nodes):
        line = f"the drafter's q is the model's at all {plural(q.tested, 'node')}, but the recorded coin draws another "
        line += f"token from it at {draws.failed:,} of {draws.tested:,}"
        yield Suspect(Cause.Q_NOT_DRAWN, Proof.CONDITION, (line,), draws.example)


def onset(case: Case, finding: Finding) -> tuple[dict[str, NDArray[Any]], Bools, list[Reference]]:
    """The steps of each request up to the first that differs: facts of each, and whether it is that one."""
    wrong = sorted(compress(finding.items, finding.differs), key=lambda item: -item.index)
    first = {item.request: item.index for item in wrong}
    where = {(item.request, item.index): replace(item, node=None) for item in reversed(finding.items)}
    keys = sorted(key for key in where if key[1] <= first.get(key[0], key[1]))
    items = [where[key] for key in keys]
    facts = {name: np.asarray(values) for name, values in facts_table(case.history, items).items()}
    return facts, np.array([first.get(request) == index for request, index in keys], np.bool_), items


def _predicted(case: Case, finding: Finding, predictions: dict[Prediction, Cause], what: str) -> Iterator[Suspect]:
    """The causes whose predictions fit the places at which differences begin."""
    facts, differs, items = onset(case, finding)
    for (fact, holds, where), cause in predictions.items():
        if fact not in facts:
            continue
        held = np.asarray(holds(facts[fact]), np.bool_)
        a, b, c, d, agree = _crossed(held, differs)
        chance = log_fisher(a, b, c, d)
        if chance <= LOG_CHANCE and (agree >= LEAST or not c):  # an intermittent fault: at work in few steps that fit
            line = f"the {what} differs from the model for the first time in {a:,} of {a + b:,} steps where "
            line += f"{where}, in {c:,} of {c + d:,} others"
            example = next(compress(items, held & differs), finding.example)
            yield Suspect(cause, Proof.CONDITION, (line,), example, a, a + c, chance=math.exp(chance))


def _crossed(held: Bools, wrong: Bools) -> tuple[int, int, int, int, float]:
    """How many are held and wrong, held and right, not held and wrong, neither; and their correlation."""
    a, b = int((held & wrong).sum()), int((held & ~wrong).sum())
    c, d = int((~held & wrong).sum()), int((~held & ~wrong).sum())
    return a, b, c, d, float(phi(np.array([a]), np.array([a + b]), a + c, a + b + c + d)[0])


def _rules(case: Case, target: Finding, failed: dict[str, Finding], passed: dict[str, Finding]) -> Iterator[Suspect]:
    names = ("target raw p", "target top tokens")
    known = [passed[name] for name in names if name in passed]
    ruled = (step.params is not None and (not step.params.greedy or step.params.penalised) for step in case.steps)
    if known and not {*names} & {*failed} and any(ruled):
        line = f"p after the sampling rules differs from the model's at {target.failed:,} of {target.tested:,}, "
        line += f"p before them at none of {known[0].tested:,}"
        yield Suspect(Cause.RULES_WRONG, Proof.CONDITION, (line, target.sentence), target.example)


def _final(case: Case, failed: dict[str, Finding], passed: dict[str, Finding]) -> Iterator[Suspect]:
    """The final token is not the model's choice, though p of every drafted token is. The rules are wrong where all such
    tokens are behind accepted drafts, in requests whose rules look at the output, and none is another parent's choice.
    """
    final = _first(failed, FINAL)
    if final is None:
        return
    of_rules = True
    for step, _, wrong in _compared(case, final):
        notes, path, params = step.part.parents, step.verdict.path.tolist(), step.params
        off_path = params is not None and (params.penalised or params.limited) and len(path) > 0
        choice = notes is not None and ((notes.choice == step.verdict.token) & (notes.node != [ROOT, *path][-1])).any()
        of_rules &= not wrong or (off_path and not choice)
    p = passed["target p"]
    line = f"the final token is not the model's in {counted(final)}, p of all {p.tested:,} drafted tokens is"
    cause = Cause.RULES_WRONG if of_rules else Cause.FINAL_OTHER_NODE
    yield Suspect(cause, Proof.CONDITION, (line,), final.example)


def _compared(case: Case, finding: Finding) -> list[Compared]:
    items = zip(finding.items, finding.differs, strict=True)
    known = ((case.by_key.get((item.request, item.index)), item.node, differs) for item, differs in items)
    return [(step, node, differs) for step, node, differs in known if step is not None]


def _nodes(compared: Iterable[Compared], *, wrong: bool) -> list[tuple[Step, int]]:
    """The nodes that differ (`wrong`) or agree; all nodes of a step that is compared as a whole."""
    some = [(step, node) for step, node, differs in compared if differs == wrong]
    return [(step, one) for step, node in some for one in (range(len(step.tree)) if node is None else (node,))]


def _odd_token(case: Case, finding: Finding) -> Iterator[Suspect]:
    """Padding: nearly all nodes that differ hold one token, which is in no text."""
    nodes = _nodes(_compared(case, finding), wrong=True)
    texts = {token for step in case.steps for token in step.text}
    odd = Counter(int(step.tree.token[node]) for step, node in nodes if int(step.tree.token[node]) not in texts)
    for token, count in odd.most_common(1):
        if count >= max(FEW, 0.9 * odd.total()):
            of = plural(len(nodes), "drafted token")
            line = f"token {token}, which is in no text, is {count:,} of {of} that differ"
            example = next(step.reference(node) for step, node in nodes if int(step.tree.token[node]) == token)
            yield Suspect(Cause.DRAFT_PLACEHOLDERS, Proof.CONDITION, (line,), example, count, len(nodes))


def _at_another_place(case: Case, finding: Finding) -> Iterator[Suspect]:
    """Nodes that differ and are the text's token some places on or before: more often than nodes that agree are."""
    compared = _compared(case, finding)
    wrong, right = _nodes(compared, wrong=True), _nodes(compared, wrong=False)
    total, shift = len(wrong), max((1, -1, 2, -2), key=lambda shift: _there(wrong, shift))
    hits, share = _there(wrong, shift), (_there(right, shift) + 1) / (len(right) + 2)
    if hits >= max(FEW, 0.4 * total, 2 * _there(wrong, 0)):
        where = f"{abs(shift)} {'further on' if shift > 0 else 'before'} at {hits:,} of {total:,}"
        line = f"drafted tokens that differ are the text's token {where}, others at {share:.0%}"
        chance, example = tail_of_binomial(hits, total, min(share, 0.99)), wrong[0][0].reference()
        yield Suspect(Cause.DRAFT_POSITION, Proof.CONDITION, (line,), example, hits, total, chance=chance)


def _there(nodes: Sequence[tuple[Step, int]], shift: int) -> int:
    """How many drafted tokens are the text's token `shift` places beyond their own depth."""
    places = ((step, step.after - 1 + int(step.tree.depth[node]) + shift, node) for step, node in nodes)
    return sum(step.text[place : place + 1] == [int(step.tree.token[node])] for step, place, node in places)


def _beyond(case: Case, finding: Finding) -> Iterator[Suspect]:
    """A rotary table that ends: nearly everything beyond some position differs, and nearly nothing before it. Requests
    of which `BEFORE` steps agree at first must all differ from the same position on, and not each from its own.
    """
    compared, first, agreed = _compared(case, finding), dict[str, int](), dict[str, set[int]]()
    depths = (0 if node is None else int(step.tree.depth[node]) for step, node, _ in compared)
    positions = [step.part.position + depth for (step, _, _), depth in zip(compared, depths, strict=True)]
    for (step, _, wrong), position in zip(compared, positions, strict=True):
        if wrong:
            first[step.request] = min(first.get(step.request, position), position)
        else:
            agreed.setdefault(step.request, set()).add(step.part.index)
    begins = [position for request, position in first.items() if len(agreed.get(request, ())) >= BEFORE]
    if len(begins) < 3 or np.ptp(begins) > NEAR:
        return
    places, wrongs = np.array(positions), np.array([wrong for _, _, wrong in compared], np.bool_)
    edge = int(np.quantile(places[wrongs], 0.002))
    a, b, c, d, agree = _crossed(places >= edge, wrongs)
    if c + d >= 30 and agree >= 0.8:
        line = f"the drafter differs from the model at {a:,} of {plural(a + b, 'node')} from position {edge:,} on, at "
        line += f"{c:,} of {c + d:,} before it, in {plural(len(first), 'request')}"
        yield Suspect(Cause.ROTARY_POSITIONS, Proof.ROWS, (line,), finding.example, a, a + c, b)


def _decay(case: Case, finding: Finding) -> Iterator[Suspect]:
    """Requests that began before some engine step agree throughout; those that began after it differ from the start."""
    began = {visit.request.id: visit.record.step for visit in reversed(case.visits)}
    flags: dict[str, list[bool]] = {}
    for item, differs in zip(finding.items, finding.differs, strict=True):
        flags.setdefault(item.request, []).append(differs)
    names = sorted((name for name in flags if len(flags[name]) >= 4), key=lambda name: began[name])
    bad = np.array([np.mean(flags[name]) > 0.25 for name in names], np.bool_)
    if len(names) < 8 or bad.all() or not bad.any():
        return
    edge = int(bad.argmax())
    a, b = int(bad[edge:].sum()), int((~bad[edge:]).sum())
    chance = log_fisher(a, b, 0, edge)
    if edge >= 3 and chance <= LOG_CHANCE:
        line = f"{edge:,} requests that began before engine step {began[names[edge]]:,} agree with the model, {a:,} of "
        line += f"{a + b:,} that began later do not"
        yield Suspect(Cause.TARGET_KV, Proof.CONDITION, (line,), finding.example, chance=math.exp(chance))
