"""A run with all that judges it, and what verify and audit found wrong: each check that failed, in words, with the
condition under which it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from specscope.analyze.audit.audit import Audit, audit
from specscope.analyze.audit.options import Options, Progress
from specscope.analyze.conditions import Condition, find
from specscope.analyze.evidence.arrays import Indices
from specscope.analyze.facts import facts_table
from specscope.analyze.findings import CheckResult, Finding
from specscope.analyze.locate.located import Located
from specscope.analyze.verify.case import Case
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History

if TYPE_CHECKING:
    from specscope.analyze.audit.model.rows import Models
    from specscope.analyze.locate.model.rules import SampledFault

MOST = 2000  # items of either kind that a condition is looked for in
CLEAR = 0.5  # the correlation from which on a condition is told
ALWAYS = 0.9  # of what was tested: where so much fails, a condition would only say what was tested
SHOWN = 3  # conditions
LIKELY = (  # facts on which known causes depend: chance has fewer rules among these than among all
    "the step before",
    "the previous step's path was moved",
    "preemptions of the request",
    "prefill chunks",
    "tokens found in the prefix cache",
    "place in the batch",
    "depth",
    "sibling",
)


@dataclass(frozen=True)
class JudgedCase:
    """What is named and what is located come from the same searches, each made once; they raise UserError."""

    case: Case
    audited: Audit
    options: Options

    @staticmethod
    def of(history: History, source: str, options: Options, progress: Progress = lambda *_: None) -> JudgedCase:
        """A run, verified and audited."""
        case = Case(history, judge(history, source=source))
        return JudgedCase(case, audit(history, source, options, progress), options)

    @cached_property
    def models(self) -> Models:
        """The models, each loaded once."""
        from specscope.analyze.audit.model.rows import Models

        return Models(self.options)

    @cached_property
    def p(self) -> SampledFault | None:
        """What makes another p of the target's logits."""
        from specscope.analyze.locate.model.rules import search_sampling

        return search_sampling(self.case, self.audited, self.models, drafter=False)

    @cached_property
    def q(self) -> SampledFault | None:
        """What makes another q of the drafter's."""
        from specscope.analyze.locate.model.rules import search_sampling

        return search_sampling(self.case, self.audited, self.models, drafter=True)

    @cached_property
    def verdicts(self) -> list[Located]:
        """What decides otherwise than p, q and coin."""
        from specscope.analyze.locate.model.verdicts import located_verdicts

        return located_verdicts(self.case, self.audited, self.models)


@dataclass(frozen=True)
class Failure:
    """A check that failed, of verify or audit: what any fault that is named must account for."""

    judge: str
    check: Finding

    @property
    def line(self) -> str:
        """What it found, in words."""
        check = self.check
        verify = f"verify, {check.name}: {check.detail or check.about}"
        return f"audit: {check.sentence}" if self.judge == "audit" else verify

    @property
    def weight(self) -> float:
        """How many failed; a statistical check fails once."""
        return float(max(self.check.failed, 1))


def failures_of(case: Case, audit: Audit | None) -> list[Failure]:
    """Every check of verify and audit that failed."""
    failures = [Failure("verify", check) for check in case.trial.failed]
    findings = () if audit is None else audit.findings
    return failures + [Failure("audit", one) for one in findings if one.result is CheckResult.FAILED]


def conditions(case: Case, failures: Sequence[Failure]) -> tuple[str, ...]:
    """When it happens: of the failed checks the clearest conditions over recorded facts, a sentence each."""
    clear: list[tuple[Condition, str]] = []
    for failure in failures:
        check, noun = failure.check, "step" if failure.check.unit != "node" else "node"
        found = _condition(case, check) if failure.judge == "verify" else check.condition
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
    of_nodes = check.unit == "node"
    every, wrong = (np.flatnonzero(c.tried), check.wrong) if of_nodes else (np.arange(len(c)), _steps(case, check))
    both = np.intersect1d(every, wrong), np.setdiff1d(every, wrong)
    if not all(map(len, both)):
        return None
    some = [part[:: max(1, len(part) // MOST)].tolist() for part in both]
    references = [c.at_node(item) if of_nodes else c.at_step(item) for part in some for item in part]
    differs = [True] * len(some[0]) + [False] * len(some[1])
    facts = facts_table(case.history, references)
    steps = [f"{where.request}@{where.index}" for where in references]
    likely = find({name: facts[name] for name in LIKELY if name in facts}, differs, steps)
    return likely if likely is not None and likely.correlation >= CLEAR else find(facts, differs, steps)


def _steps(case: Case, check: Finding) -> Indices:
    """The decode steps in which it failed, as the evidence numbers them."""
    if check.unit == "request step":
        wrong = {(case.visits[place].request.id, case.visits[place].part.index) for place in check.wrong.tolist()}
        places = [(visit.request.id, visit.part.index) in wrong for visit in case.evidence.visits]
        return np.flatnonzero(places)
    if check.unit == "parent":
        return np.asarray(np.unique(case.evidence.parents.step[check.wrong]), np.int64)
    return check.wrong if check.unit in ("step", "draw") else check.wrong[:0]
