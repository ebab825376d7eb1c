"""What verify and audit found wrong: each check that failed, in words, with the condition under which it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specscope.analyze.audit.audit import Audit
from specscope.analyze.conditions import Condition, find
from specscope.analyze.diagnose.case import Case
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Finding, Reference

MOST = 2000  # items of either kind that a condition is looked for in
CLEAR = 0.5  # the correlation from which on a condition is told
ALWAYS = 0.9  # of what was tested: where so much fails, a condition would only say what was tested
SHOWN = 3  # conditions
LIKELY = (  # facts on which known causes depend: chance has fewer rules among these than among all
    "the step before",
    "the path of the step before was moved",
    "preemptions of the request",
    "prefill chunks",
    "tokens found in the prefix cache",
    "place in the batch",
    "depth",
    "sibling",
)


@dataclass(frozen=True)
class Failure:
    """A check that failed, of verify or audit: what any fault that is named must account for."""

    judge: str
    check: Finding
    line: str  # what it found, in words
    condition: Condition | None = None  # of audit's; verify looks for none

    @property
    def weight(self) -> float:
        """How many failed; a statistical check fails once."""
        return float(max(self.check.failed, 1))


def failures_of(case: Case, audit: Audit | None) -> list[Failure]:
    """Every check of verify and audit that failed."""
    failures = [
        Failure("verify", check, f"verify, {check.name}: {check.detail or check.about}") for check in case.trial.failed
    ]
    if audit is not None:
        wrong = [finding for finding in audit.findings if finding.result is CheckResult.FAILED]
        failures += [Failure("audit", finding, f"audit: {finding.sentence}", finding.condition) for finding in wrong]
    return failures


def conditions(case: Case, failures: Sequence[Failure]) -> tuple[str, ...]:
    """When it happens: of the failed checks the clearest conditions over recorded facts, a sentence each."""
    clear: list[tuple[Condition, str]] = []
    for failure in failures:
        check, noun = failure.check, "step" if failure.check.unit != "node" else "node"
        found = failure.condition or (_condition(case, check) if failure.judge == "verify" else None)
        if found is not None and found.tests and found.correlation >= CLEAR:
            clear.append((found, found.sentence(f"{check.name}: wrong", noun)))
    sentences: dict[str, str] = {}
    for found, sentence in sorted(clear, key=lambda pair: -pair[0].score):
        sentences.setdefault(found.text, sentence)
    return tuple(sentences.values())[:SHOWN]


def _condition(case: Case, check: Finding) -> Condition | None:
    """The shortest rule over the facts of decode steps, or of tried nodes, that tells those that failed from others."""
    c = case.evidence
    if not len(check.wrong) or not len(c) or check.failed > ALWAYS * check.tested:
        return None
    if check.unit == "node":
        tried = np.flatnonzero(c.tried)
        items = [(node, c.at_node(node)) for node in _some(tried, check.wrong)]
        wrong = set(check.wrong.tolist())
    else:
        wrong = set(_steps(case, check))
        items = [(step, c.at_step(step)) for step in _some(np.arange(len(c)), np.array(sorted(wrong), np.int64))]
    references: list[Reference] = [where for _, where in items]
    differs = [item in wrong for item, _ in items]
    if all(differs) or not any(differs):
        return None
    facts = facts_table(case.history, references)
    steps = [f"{where.request}@{where.index}" for where in references]
    likely = find({name: facts[name] for name in LIKELY if name in facts}, differs, steps)
    return likely if likely is not None and likely.correlation >= CLEAR else find(facts, differs, steps)


def _some(every: Indices, wrong: Indices) -> list[int]:
    """All that failed and the others, or some of either, evenly spread."""
    others = np.setdiff1d(every, wrong)
    kept = [part[:: max(1, len(part) // MOST)] for part in (np.intersect1d(every, wrong), others)]
    return [int(item) for part in kept for item in part]


def _steps(case: Case, check: Finding) -> list[int]:
    """The decode steps in which it failed, as the evidence numbers them."""
    c = case.evidence
    if check.unit == "request step":
        number = {(visit.request.id, visit.part.index): step for step, visit in enumerate(c.visits)}
        keys = [(case.visits[place].request.id, case.visits[place].part.index) for place in check.wrong.tolist()]
        return [number[key] for key in keys if key in number]
    if check.unit == "parent":
        return [int(step) for step in np.unique(c.parents.step[check.wrong])]
    return [int(step) for step in check.wrong] if check.unit in ("step", "draw") else []
