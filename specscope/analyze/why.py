"""`why`: a node, a step, a request or a run, answered in sentences with their evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specscope.analyze.findings import Reference
from specscope.analyze.questions.evidence import Evidence
from specscope.analyze.questions.missed import ChoicePlace, RejectionKind, RejectionKinds
from specscope.errors import UserError
from specscope.trace.history.history import History, RequestHistory
from specscope.trace.history.place import PlaceView, at, deciding, ended_by, headline, why, why_step
from specscope.trace.history.totals import Undrafted, count_undrafted, undrafted_text
from specscope.trace.history.wording import plural, quoted, said
from specscope.trace.record.privacy import NO_TOKEN
from specscope.trace.record.records import Outcome, RequestStep, StepRecord
from specscope.trace.record.vocabulary import Vocabulary, printable
from specscope.trace.words import StepFacts

SHOWN = 5  # kinds of a run
RANKS = "the drafter's likeliest tokens are not recorded, so its rank of the target's token is unknown"


@dataclass(frozen=True)
class NodeAnswer:
    """Why one node of a step, or the step as a whole, went as it did."""

    reference: Reference
    sentences: tuple[str, ...]
    typical: tuple[str, ...]  # how usual it is in this run
    evidence: dict[str, Any]  # the numbers behind the sentences, as plain values

    def to_dict(self) -> dict[str, Any]:
        sentences = [*self.sentences, *self.typical]
        return {"reference": str(self.reference), "sentences": sentences, "evidence": self.evidence}


@dataclass(frozen=True)
class RunAnswer:
    """The costliest kinds of rejection of a run, or of a request."""

    steps: int  # decode steps
    rejections: int  # of them, those that ended in a rejection
    undrafted: Counter[Undrafted]  # of them, those without drafts, by the reason
    kinds: tuple[RejectionKind, ...]
    more: int  # kinds, which are less costly
    notes: tuple[str, ...]

    @property
    def summary(self) -> str:
        """How many steps ended in a rejection, and how many drafted nothing."""
        line = f"{self.rejections:,} of {plural(self.steps, 'decode step')} ended in a rejection."
        return f"{line} {undrafted_text(self.undrafted, self.steps)}." if self.undrafted else line

    def paragraphs(self) -> list[tuple[str, str, str, str]]:
        """Of each kind: what it is, its share and cost, where to look, and the sentence there."""
        told = []
        for kind in self.kinds:
            share = f"{kind.rejections:,} of {plural(kind.of_rejections, 'rejection')}"
            basis = f"an estimate from {plural(kind.compared_drafts, 'draft')} that passed this depth"
            cost = f"they cost about {plural(round(kind.tokens_lost), 'token')}, {basis}"
            cost = cost if kind.compared_drafts else "each cost a token or more: no draft passed this depth"
            about = f"{kind.about[0].upper()}{kind.about[1:]}."
            told.append((about, f"{share}; {cost}.", str(kind.examples[0]), f"{kind.sentence}."))
        return told

    def lines(self) -> list[str]:
        """As text: a paragraph a kind."""
        lines = [self.summary]
        for number, (about, figures, example, sentence) in enumerate(self.paragraphs(), 1):
            lines += [f"\n{number}. {about}", f"   {figures}", f"   {example}: {sentence}"]
        left = self.rejections - sum(kind.rejections for kind in self.kinds)
        lines += [f"\n{plural(self.more, 'more kind')}: {plural(left, 'rejection')}."] if self.more else []
        return [*lines, *(f"! {note}" for note in self.notes)]


def why_run(history: History, request: str | None = None) -> RunAnswer:
    """The answer on all requests on the path, or on one."""
    evidence = Evidence.of(history, request)
    kinds = RejectionKinds(evidence)
    every = kinds.all()
    first = [(kind, kind.examples[0]) for kind in every[:SHOWN]]
    parts = [(kind, history.requests[place.request].step(place.index)) for kind, place in first]
    answers = tuple(replace(k, sentence=headline(p, ended_by(p), history.vocabulary)) for k, p in parts)
    rejections = every[0].of_rejections if every else 0
    notes = evidence.lacking(evidence.drafts) or kinds.notes
    if not notes and any(kind.place is ChoicePlace.UNKNOWN for kind in every[:SHOWN]):
        notes = (RANKS,)
    undrafted = count_undrafted(history.run, history.steps, request)
    return RunAnswer(len(evidence.columns), rejections, undrafted, answers, len(every) - len(answers), notes)


def why_part(history: History, request: RequestHistory, index: int, node: int | None) -> NodeAnswer:
    """The answer on a step of a request, or on one of its nodes; the number of nodes is the final token.

    Raises UserError where there is none.
    """
    position, part = request.at(index), request.step(index)
    nodes, name = len(part.tree), f"{printable(request.id)}@{index}"
    if node is not None and (part.verdict is None or node > nodes):
        known = "none: it is a prefill" if part.verdict is None else f"0 to {nodes}, the last being the final token"
        raise UserError(f"there is no node {node} in {name}; there are: {known}")
    sentences = why_step(history, history.steps[position], part) if node is None else why(history, part, node)
    about = node if node is not None else ended_by(part)
    evidence = {} if part.verdict is None else _evidence(history, history.steps[position], part, about)
    typical = () if part.verdict is None else Typical(lambda: history)(part, about)
    reference = Reference(request.id, index, history.steps[position].step, node)
    return NodeAnswer(reference, tuple(sentences), typical, evidence)


class Typical:
    """How usual a node is in a run; what that is counted from is kept while the run has no new step."""

    def __init__(self, history: Callable[[], History], limit: int | None = None) -> None:
        """`limit`: the engine steps up to which a run is counted; a screen has no time for more."""
        self._history, self._most = history, limit
        self._counted: tuple[object, RejectionKinds | None] = (None, None)

    def __call__(self, part: RequestStep, node: int) -> tuple[str, ...]:
        """How often this token was drafted and kept, and how many rejections are like this one."""
        kinds = self._kinds()
        if kinds is None or part.verdict is None:
            return ()
        sentences = []
        token = int(part.tree.token[node]) if node < len(part.tree) else NO_TOKEN
        if token != NO_TOKEN:
            drafted, tried, accepted = kinds.counts(token)
            counts = {"times": plural(drafted, "time"), "tried": f"{tried:,}", "accepted": f"{accepted:,}"}
            sentences.append(said("typical", token=quoted(self._history().vocabulary, token), **counts))
        kind = kinds.of(part.request, part.index) if node in (*deciding(part), len(part.tree)) else None
        if kind is not None:
            others = " and ".join(map(str, kind.examples))
            alike = f"; two like it: {others}" if len(kind.examples) == 2 else f"; another: {others}" if others else ""
            count, total = kind.rejections, kind.of_rejections
            of = f"{count:,} of {plural(total, 'rejection')} ({count / total:.0%})"
            sentences.append(f"{of} {'is' if count == 1 else 'are'} of this kind: {kind.about}{alike}.")
        return tuple(sentences)

    def _kinds(self) -> RejectionKinds | None:
        history = self._history()
        if self._most is not None and len(history.steps) > self._most:
            return None
        key = (id(history), len(history.steps), history.rewinds, history.branch)
        if self._counted[0] != key:
            self._counted = (key, RejectionKinds(Evidence.of(history)))
        return self._counted[1]


def _evidence(history: History, record: StepRecord, part: RequestStep, node: int) -> dict[str, Any]:
    """The numbers that the sentences are made of."""
    verdict, place, vocabulary = part.verdict, at(part, node), history.vocabulary
    assert verdict is not None
    target = place.wanted
    values: dict[str, Any] = {
        "node": node,
        "greedy": verdict.is_greedy,
        "rule": part.rule,
        "wanted": None if target is None else _token(target, vocabulary),
        "target_likeliest": [_text(top._asdict(), vocabulary) for top in place.likeliest],
        "drafter_likeliest": [_text(top._asdict(), vocabulary) for top in place.drafters_likeliest],
    }
    if node == len(part.tree):
        facts = StepFacts(record, part.request, part, history)
        drawn = {"kind": facts["kind"], "final_p": facts["final_p"], "coin": facts["final_coin"] or None}
        return {**values, "final": {**_token(place, vocabulary), **drawn}}
    outcome, facts = Outcome(int(verdict.outcome[node])), StepFacts(record, part.request, part, history, node)
    drafted: dict[str, Any] = {**_token(place, vocabulary), "outcome": outcome.name.lower()}
    if outcome is not Outcome.UNTRIED:
        drafted |= {name: facts[name] for name in ("p_tried", "q_tried", "a")}
        drafted["coin"] = facts["u"] or None
    return {**values, "drafted": drafted}


def _token(place: PlaceView, vocabulary: Vocabulary) -> dict[str, Any]:
    names = ("token", "raw_p", "raw_rank", "p", "draft_p", "draft_rank", "q")
    return _text({name: getattr(place, name) for name in names}, vocabulary)


def _text(values: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    """With the token's text; without the token, where token ids were left out."""
    known = values["token"] != NO_TOKEN
    return {**values, **({"text": vocabulary.show(values["token"])} if known else {"token": None, "text": None})}
