"""The walk goes on behind the logits: the engine's own sampling and verdict, over what it has computed there and then.

Every figure is held against rules and formulas that share nothing with the engine's: p and q against the rules over the
very logits; p and q as tried, a, outcomes, residuals, the final token and the entropies against the formulas of the
rule, over the engine's own p, q and coins. So the first that differs is where it breaks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.rows import Asked
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.findings import Reference as Where
from specscope.analyze.locate.decided import (
    ACCEPTANCE,
    FINAL,
    RESIDUAL,
    SUM,
    Decided,
    GivenStep,
    P,
    Q,
    decide,
    interval_of,
)
from specscope.analyze.locate.formulas import FORMULAS
from specscope.analyze.locate.located import Held, Located, Operation, Proof, Stage, Walk
from specscope.analyze.locate.model import sampling
from specscope.analyze.locate.model.other_rows import Places
from specscope.analyze.locate.model.rules import search_rows
from specscope.analyze.locate.model.sampling import BONUS, NODE, TARGET, RuledRows, RuleRecipe
from specscope.analyze.locate.model.search import Item
from specscope.analyze.locate.operations import code_of, our_operation
from specscope.analyze.verify.case import Case, Step
from specscope.measure.locate.drive import Drive
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins_at
from specscope.trace.record.records import FinalKind, ParentNotes, RequestStep, Verdict
from specscope.trace.record.rules import MATCH
from specscope.trace.record.tree import ROOT, Doubles, Drawn

if TYPE_CHECKING:
    from specscope.engine.state import StepState
    from specscope.speculate.drafters.base import Draft
    from specscope.speculate.verify.inputs import VerifyBatch

ROWS = 600  # of p and q that are looked at in all
KEPT = 12  # steps whose rows are kept to be searched
SHARE = 2e-5  # of a row's mass that rounding may move
BORDER = 1e-5  # by which a border of top-p or min-p may be off, relative
SLACK = 1e-3  # of log odds
COIN, ENTROPY = "coin", "entropy"
WORDS = {
    P: "the p that a draft is judged by",
    Q: "the q that a draft is judged by",
    ACCEPTANCE: "whether a draft is accepted",
    RESIDUAL: "what a rejection leaves of p",
    FINAL: "what the final token is drawn from",
    COIN: "the coins that decide",
    ENTROPY: "the entropies beside the verdict",
}
UNIT = {P: "trial", Q: "trial", ACCEPTANCE: "trial", RESIDUAL: "rejection", FINAL: "final token"}
SHOWN = {
    "p": "p",
    "p_trial": "p as tried",
    "q_trial": "q as tried",
    "accept_prob": "a",
    "outcome": "the outcome",
    "residual_mass": "the residual's mass",
    "kind": "the end of the path",
    "final_p": "the p of the final token",
    "token": "how far the coin lies from the token's interval",
}


class TwoFigures(NamedTuple):
    """One figure of both sides: the engine's, beside what rules or formulas give."""

    operation: str
    what: str
    node: int | None
    ours: float
    right: float
    allowed: float
    where: Where | None = None

    @property
    def error(self) -> float:
        """How far ours is off; a number that is none is off by all."""
        off = abs(self.ours - self.right)
        return off if off == off else 1.0

    @property
    def differs(self) -> bool:
        """Whether by more than rounding explains."""
        return self.error > self.allowed


@dataclass(eq=False)
class RuledStep:
    """The p, or q, of a step: the engine's rows beside the logits that they are made of."""

    asked: Asked
    ours: dict[int, Tensor]  # [V] by node
    wrong: set[int] = field(default_factory=set)  # nodes


@dataclass
class RuledSide:
    """p, or q: what was compared, and steps that are kept to be searched."""

    what: str
    figures: list[TwoFigures] = field(default_factory=list)
    kept: list[RuledStep] = field(default_factory=list)
    before: Sequence[RuledStep] = ()  # of the engine's step before

    def keep(self, some: Sequence[RuledStep]) -> None:
        """A step of the engine: kept where some rows differ, with those of the step before."""
        if any(step.wrong for step in some) and len(self.kept) < KEPT:
            self.kept += [step for step in (*self.before, *some) if step not in self.kept]
        self.before = some


class DecisionWatch:
    """Holds what the engine decides against rules and formulas, step by step."""

    def __init__(self, drive: Drive, case: Case, contexts: Mapping[str, Contexts], forms: RequestForms | None) -> None:
        self.drive, self.case, self.contexts, self.forms = drive, case, contexts, forms
        self.sides = {"p": RuledSide("p"), "q": RuledSide("q")}
        self.held: dict[str, list[TwoFigures]] = {}
        self.wrong: dict[str, list[tuple[RequestStep, int | None]]] = {}  # by operation, where a step differs first
        self.left_out = Counter[str]()  # steps that were not judged, by why
        self.rows = self.steps = 0
        drive.decided = self.see

    @torch.inference_mode()
    def see(self, now: StepState, parts: tuple[RequestStep, ...]) -> None:
        """A step that the engine has verified by itself."""
        if now.judged is None or self.rows > ROWS:
            return
        batch, noted, number, sampled, greedy = now.judged.batch, now.judged.notes(), -1, 0, 0
        ruled: dict[str, list[RuledStep]] = {"p": [], "q": []}
        for turn, part in zip(now.turns, parts, strict=True):
            verdict, draft = turn.verdict, turn.draft
            if verdict is None or turn.logits is None:
                continue
            number += 1
            count = len(draft.tree) + 1
            if batch.inputs[number].greedy:
                rows, greedy = _chosen(batch, greedy, count), greedy + count
            else:
                rows = batch.target.p[sampled : sampled + count].float().cpu().clone()  # its memory is used again
                sampled += count
            judged = self._judged(part)
            if judged is None:
                continue
            self.rows, self.steps = self.rows + count, self.steps + 1
            logits = turn.logits.float().cpu().clone()
            step, contexts = self.case.by_key[part.request, part.index], self.contexts[part.request]
            if not contexts.limits:
                asked = Asked(step, judged, contexts, {node: logits[node + 1] for node in judged.rows})
                ruled["p"].append(RuledStep(asked, {node: rows[node + 1] for node in judged.rows}))
            if draft.q:
                ruled["q"].append(_drawn(step, judged, contexts, draft))
            self._decide(part, judged, draft, rows, verdict, noted[number])
        for what, some in ruled.items():
            self._ruled(self.sides[what], [step for step in some if step.asked.logits])

    def _judged(self, part: RequestStep) -> AuditedStep | None:
        """The step with the rows of its contexts; None where it is not judged."""
        contexts = self.contexts.get(part.request)
        judged = None if contexts is None else next((s for s in contexts.steps if s.part.index == part.index), None)
        if judged is None:
            self.left_out["the text before them is not known"] += 1
        elif (part.request, part.index) not in self.case.by_key:
            self.left_out["something was forced in them"] += 1
        elif part.request in self.drive.unlike:
            self.left_out["their drafts were not drawn again"] += 1
        else:
            return judged
        return None

    def _ruled(self, side: RuledSide, some: Sequence[RuledStep]) -> None:
        """p or q of a step's requests against the rules over the same logits."""
        if some:
            rows = RuledRows(Places([step.asked for step in some]), side.what, self.forms)
            by_key = {step.asked.step.key: step for step in some}
            steps = [by_key[place.asked.step.key] for place in rows.places.every]
            ours = torch.stack([step.ours[p.node] for step, p in zip(steps, rows.places.every, strict=True)])
            for step, place, *both in zip(steps, rows.places.every, *_apart(rows, ours, side.what), strict=True):
                where = place.asked.step.reference(None if place.node == ROOT else place.node)
                figure = TwoFigures("rules", side.what, place.node, both[0], 0.0, both[1], where)
                side.figures.append(figure)
                step.wrong |= {place.node} if figure.differs else set()
        side.keep(some)

    def _sampled(self, side: RuledSide) -> Located | None:
        """The rule by which p or q differs."""
        if not (wrong := _wrong(side.figures)):
            return None
        rows = RuledRows(Places([step.asked for step in side.kept]), side.what, self.forms)
        found = search_rows(self.case, rows, [*_items(rows, side)], logits_right=True, side="in the engine")
        run, first = self.drive.history.run, wrong[0]
        whose = "the target" if side.what == "p" else "the drafter"
        of_rows = f"{len(wrong):,} of {plural(len(side.figures), 'row')}"
        counts = f"{side.what} of {of_rows} is not what the rules make of the engine's own logits"
        if found is not None:
            operation = replace(found.located.operation, stage=Stage.SAMPLING, code=code_of(run, "rules"))
            text = f"{counts}; {found.located.sentence}"
            return replace(found.located, operation=operation, sentence=text, proof=Proof.PLACE, spoiled=0)
        return Located(
            our_operation(run, Stage.SAMPLING, "rules", f"{whose}: the sampling rules"),
            f"{counts}: up to {max(figure.error for figure in wrong):.2g} of a row's mass lies elsewhere",
            smallest=f"{first.where}: {first.error:.2g} of its mass lies elsewhere",
            where=first.where,
            explained=len(wrong),
            differing=len(wrong),
            certain=False,
        )

    # From p, q and coins to what is committed

    def _decide(
        self,
        part: RequestStep,
        judged: AuditedStep,
        draft: Draft,
        rows: Tensor,
        verdict: Verdict,
        notes: ParentNotes | None,
    ) -> None:
        given = GivenStep(
            verdict.rule,
            draft.tree,
            _LazyRows(lambda node: rows[node + 1]),
            _LazyRows(lambda node: draft.q[node].probs),
            verdict.coin,
            verdict.final_coin,
        )
        seed = self.contexts[part.request].params.seed
        for figure in _figures(given, verdict, seed, part.position, notes):
            self.held.setdefault(figure.operation, []).append(figure._replace(where=judged.at(figure.node)))
            if figure.differs:
                if len(steps := self.wrong.setdefault(figure.operation, [])) < KEPT:
                    steps.append((replace(part, verdict=verdict, parents=notes), figure.node))
                return

    # What was found

    def located(self) -> list[Located]:
        """What differs, with its place."""
        found = [located for side in self.sides.values() if (located := self._sampled(side)) is not None]
        return [*found, *(self._located(name, figures) for name, figures in self.held.items() if _wrong(figures))]

    def _located(self, name: str, figures: Sequence[TwoFigures]) -> Located:
        wrong, unit = _wrong(figures), UNIT.get(name, "step")
        first = wrong[0]
        counted = [figure for figure in figures if figure.what == first.what]
        count = f"{len(_wrong(counted)):,} of {plural(len(counted), unit)}"
        shown = SHOWN.get(first.what, first.what)
        text = f"{shown} is {first.ours:.6g} in the engine and {first.right:.6g} by the formula"
        return Located(
            our_operation(self.drive.history.run, Stage.VERDICT, name, WORDS[name]),
            f"{WORDS[name]}: {count} differ, over the engine's own p, q and coins",
            looks=_looks(name, self.wrong.get(name, [])),
            smallest=f"{first.where}: {text}",
            where=first.where,
            explained=len(wrong),
            differing=len(wrong),
            unit=unit,
        )

    def walk(self) -> Walk | None:
        """All that was compared, by operation."""
        run, sides = self.drive.history.run, [side for side in self.sides.values() if side.figures]
        told = [
            (our_operation(run, Stage.SAMPLING, "rules", f"{side.what} by the sampling rules"), side.figures)
            for side in sides
        ]
        for name, figures in self.held.items():
            told.append((our_operation(run, Stage.VERDICT, name, WORDS[name]), figures))
        held, first = [_held(*each) for each in told], next((figures[0] for _, figures in told), None)
        if first is None or first.where is None:
            return None
        engine = "specscope's sampling and verdict"
        return Walk(Stage.VERDICT, first.where, (), tuple(held), engine, "rules and formulas")

    def ruled_out(self) -> list[str]:
        """What agrees, a sentence each."""
        lines = [
            f"the sampling rules: {side.what} of {plural(len(side.figures), 'row')}, run again, is what they make "
            "of the engine's own logits"
            for side in self.sides.values()
            if side.figures and not _wrong(side.figures)
        ]
        figures = [figure for some in self.held.values() for figure in some]
        if figures and not _wrong(figures):
            steps = plural(self.steps, "step")
            lines.append(
                f"the verdict: {plural(len(figures), 'figure')} of {steps}, run again, follow from p, q and coins"
            )
        return lines

    def notes(self) -> list[str]:
        """What was not judged, and why."""
        return [f"the walk's verdicts: {plural(count, 'step')} left out: {why}" for why, count in self.left_out.items()]


def _looks(name: str, wrong: Sequence[tuple[RequestStep, int | None]]) -> str:
    """What stands in place of a figure of an operation in these steps, by the columns of them; "" for nothing known."""
    if name in (COIN, ENTROPY):
        return ""
    c, nodes = Columns([part for part, _ in wrong]), [node or 0 for _, node in wrong]  # of final tokens: of the step
    at = np.arange(len(nodes)) if name == FINAL else c.start[:-1] + np.array(nodes, np.int64)
    formulas = (formula for formula in FORMULAS.values() if formula.operation == name)
    return next((looks for formula in formulas if (looks := formula.looks(c, at)[0])), "")


class _LazyRows(dict[int, Doubles]):
    """Rows in float64, made when they are asked for."""

    def __init__(self, of: Callable[[int], Tensor]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, node: int) -> Doubles:
        self[node] = row = self._of(node).double().cpu().numpy()
        return row


def _figures(
    given: GivenStep, verdict: Verdict, seed: int, position: int, notes: ParentNotes | None
) -> Iterator[TwoFigures]:
    """(Operation, (what, node, ours, right, allowed)) of a step in the order of deciding."""
    tree = given.tree
    due = coins_at(np.array([seed], np.uint64), Stream.VERIFY, np.array([position]), np.array([len(tree) + 1]))
    recovered = verdict.kind is FinalKind.RECOVERED
    for node in range(len(tree)):
        first = tree.children(int(tree.parent[node]))[0] if given.rule == MATCH and verdict.outcome[node] else node
        yield TwoFigures(COIN, "the coin", node, float(verdict.coin[node]), float(due[first + 1]), 0.0)
    if not (given.rule == MATCH and recovered):
        yield TwoFigures(COIN, "the final coin", None, verdict.final_coin, float(due[0]), 0.0)
    for node, above in enumerate(tree.parent.tolist()):
        right = float(given.p[above][tree.token[node]])
        yield TwoFigures(P, "p", node, float(verdict.p[node]), right, 1e-6 * right + 1e-12)
    yield from _decided(given, verdict, decided := decide(given, verdict.outcome))
    if notes is not None and decided.left is not None:
        yield from _spreads(given, decided, notes)


def _decided(given: GivenStep, verdict: Verdict, decided: Decided) -> Iterator[TwoFigures]:
    """The same of the verdict alone, beside what the formulas give."""
    for figure in decided.figures:
        if figure.field == "kind":
            same = (
                verdict.kind is decided.kind
                and (int(verdict.path[-1]) if len(verdict.path) else ROOT) == decided.accepted
            )
            yield TwoFigures(figure.operation, "kind", None, float(same), 1.0, 0.0)
        else:
            ours = float(getattr(verdict, figure.field)[figure.node])
            yield TwoFigures(figure.operation, figure.field, figure.node, ours, figure.right, figure.allowed)
    if decided.left is not None and decided.drawn_from is not None:
        yield from _final(decided, verdict)


def _final(decided: Decided, verdict: Verdict) -> Iterator[TwoFigures]:
    """The final token: its coin lies in its interval, and its p is what is left of p there."""
    assert decided.left is not None
    assert decided.drawn_from is not None
    left, off = decided.left.value, decided.left.error
    low, high = interval_of(decided.drawn_from, verdict.token)
    away = max(low - decided.final_coin, decided.final_coin - high, 0.0) if high > low else 1.0
    yield TwoFigures(FINAL, "token", None, away, 0.0, off + SUM)
    right = float(left[verdict.token]) / float(left.sum())
    yield TwoFigures(FINAL, "final_p", None, verdict.final_p, right, off + SUM * right + 1e-9)


def _spreads(given: GivenStep, decided: Decided, notes: ParentNotes) -> Iterator[TwoFigures]:
    """Entropies of what was sampled from, at the parents that were tried and of the final token."""
    assert decided.left is not None
    for place, node in enumerate(notes.node.tolist()):
        of_node = None if node == ROOT else node
        yield _spread("the entropy of p", of_node, notes.entropy[place], given.p[node])
        if given.tree.drawn[given.children(node)[0]] != Drawn.DETERMINISTIC:
            yield _spread("the entropy of q", of_node, notes.q_entropy[place], given.q[node])
    left = decided.left
    yield _spread(
        "the entropy of what the final token is drawn from", None, notes.final_entropy, left.value, 40 * left.error
    )


def _spread(what: str, node: int | None, ours: float, row: Doubles, off: float = 0.0) -> TwoFigures:
    right = _entropy(row)
    return TwoFigures(ENTROPY, what, node, float(ours), right, 2e-4 * (1 + right) + off)


def _entropy(row: Doubles) -> float:
    some = row[row > 0]
    return float(-(some * np.log(some)).sum())


def _chosen(batch: VerifyBatch, start: int, count: int) -> Tensor:
    """[count, V] a greedy target's choices as rows."""
    choices = batch.target.choices[start : start + count].cpu()
    vocab = batch.target.p.shape[1]
    return torch.nn.functional.one_hot(choices, vocab).float()


def _drawn(step: Step, judged: AuditedStep, contexts: Contexts, draft: Draft) -> RuledStep:
    """The drafter's logits where it drew, and the q that it drew from."""
    tree, logits, ours = draft.tree, dict[int, Tensor](), dict[int, Tensor]()
    for node in judged.rows:
        path = [] if node == ROOT else tree.token[tree.path_to(node)].tolist()
        row = draft.row(path) if node in draft.q else None
        if row is not None:
            logits[node], ours[node] = row.full().cpu(), draft.q[node].probs.float().cpu()
    return RuledStep(Asked(step, judged, contexts, logits), ours)


def _apart(rows: RuledRows, ours: Tensor, what: str) -> tuple[list[float], list[float]]:
    """Of each row how much of its mass lies elsewhere than by the rules, and how much of that rounding explains."""
    allowed = [0.0 if each.greedy else SHARE + 1e-6 / max(each.temperature, 1e-3) for each in rows.params]
    errors = _moved(rows, ours, what, sampling.RIGHT, range(len(ours)))
    at_border = [i for i, error in enumerate(errors) if error > allowed[i]]
    for by in (1 + BORDER, 1 - BORDER) if at_border else ():
        recipe = RuleRecipe(knobs=(("top_p", _times(by)), ("min_p", _times(1 / by))))
        for i, error in zip(at_border, _moved(rows, ours, what, recipe, at_border), strict=True):
            errors[i] = min(errors[i], error)
    return errors, allowed


def _times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda value: torch.where(value < 1, value * by, value)


def _moved(rows: RuledRows, ours: Tensor, what: str, recipe: RuleRecipe, some: Sequence[int]) -> list[float]:
    right = rows.distributions(recipe, some)
    errors = []
    for number, i in enumerate(some):
        own, due = ours[i], right[number]
        if what == "p" and rows.params[i].greedy:
            # how far the choice lies below the likeliest, in log odds that rounding does not explain
            below = float(due.max().log() - due[int(own.argmax())].log())
            errors.append(below if below > SHARE else 0.0)
        elif bool(due.isnan().any()) or not bool(due.isfinite().all()):
            errors.append(0.0)  # nothing may come there
        else:
            moved = float((own - due).abs().sum())
            kept = bool((((own > 0) != (due > 0)) & (torch.maximum(own, due) > 1e-30)).any())
            errors.append(1.0 if moved != moved else max(moved, SHARE * 100 if kept else 0.0))
    return errors


def _items(rows: RuledRows, side: RuledSide) -> Iterator[Item]:
    """The engine's p, or q, of the tokens that tell the most at the rows that are kept."""
    kept = {step.asked.step.key: step for step in side.kept}
    right = rows.distributions(sampling.RIGHT, range(len(rows.places.every)))
    for number, place in enumerate(rows.places.every):
        step, due = kept[place.asked.step.key], right[number]
        own, differs = step.ours[place.node], place.node in step.wrong
        if bool(due.isnan().any()):
            continue
        is_greedy = rows.params[number].greedy and side.what == "p"
        off = (own.clamp(min=1e-5).log() - due.clamp(min=1e-5).log()).abs()
        tokens = {*own.topk(2).indices.tolist()}
        if differs:
            tokens |= {*off.topk(3).indices.tolist(), *(own - due).abs().topk(2).indices.tolist()}
        children = place.asked.step.tree.children(place.node)
        kind = NODE if children else TARGET if place.node == ROOT else BONUS
        for token in [int(own.argmax())] if is_greedy else sorted(tokens):
            wrong = differs and (is_greedy or float(off[token]) > SLACK)
            if wrong == differs:
                where = place.asked.step.reference(None if place.node == ROOT else place.node)
                child = children[0] if children else None
                yield Item(number, token, float(own[token]), kind, where, wrong, SLACK, place.node, child, is_greedy)


def _wrong(figures: Sequence[TwoFigures]) -> list[TwoFigures]:
    return [figure for figure in figures if figure.differs]


def _held(operation: Operation, figures: Sequence[TwoFigures]) -> Held:
    worst = max(figures, key=lambda figure: figure.error - figure.allowed)
    errors = np.array([[figure.error] for figure in figures], np.float32)
    return Held(operation, worst.allowed, worst.error, len(figures), len(_wrong(figures)), errors)
