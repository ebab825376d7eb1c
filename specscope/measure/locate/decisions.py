"""The engine's own sampling and verdict, held against rules over its logits and formulas over its p, q and coins."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.contexts import AuditedStep, Contexts
from specscope.analyze.audit.model.rows import Asked
from specscope.analyze.audit.model.rules import RequestForms
from specscope.analyze.evidence.columns import Columns
from specscope.analyze.locate.decided import (
    ACCEPTANCE,
    FINAL,
    RESIDUAL,
    SUM,
    Figure,
    P,
    Q,
    decide,
    interval_of,
)
from specscope.analyze.locate.formulas import FORMULAS
from specscope.analyze.locate.located import Held, Located, Operation, Proof, Stage, Walk
from specscope.analyze.locate.model import sampling
from specscope.analyze.locate.model.rules import search_rows
from specscope.analyze.locate.model.sampling import BONUS, NODE, TARGET, Places, RuledRows, RuleRecipe
from specscope.analyze.locate.model.search import Item
from specscope.analyze.verify.trial import Case, Step
from specscope.engine.phases import StepState
from specscope.measure.locate.drive import Drive
from specscope.speculate.drafters.base import Draft
from specscope.speculate.verify.batch import VerifyBatch
from specscope.trace.history.wording import plural
from specscope.trace.record.coins import Stream, coins
from specscope.trace.record.records import FinalKind, RequestStep
from specscope.trace.record.rules import MATCH, is_own
from specscope.trace.record.tree import ROOT, Doubles, Drawn

ROWS = 600  # of p and q that were examined in all
KEPT = 12  # steps whose rows are kept to be searched
SHARE = 2e-5  # of a row's mass that rounding may move
BORDER = 1e-5  # by which a border of top-p or min-p may be off, relative
SLACK = 1e-3  # of log odds
COIN, ENTROPY = "coin", "entropy"
OPERATIONS = {  # in words, and what its figures are of
    P: ("the p that a draft is judged by", "trial"),
    Q: ("the q that a draft is judged by", "trial"),
    ACCEPTANCE: ("whether a draft is accepted", "trial"),
    RESIDUAL: ("the residual after a rejection", "rejection"),
    FINAL: ("what the final token is drawn from", "final token"),
    COIN: ("the coins that decide", "step"),
    ENTROPY: ("the entropies beside the verdict", "step"),
}
SHOWN = {
    "p_trial": "p as tried",
    "q_trial": "q as tried",
    "accept_prob": "a",
    "outcome": "the outcome",
    "residual_mass": "the residual's mass",
    "kind": "the end of the path",
    "final_p": "the p of the final token",
    "token": "distance between the coin and the token's interval",
}


@dataclass(eq=False)
class RuledStep:
    """The p, or q, of a step: the engine's rows beside the logits that they are made of."""

    asked: Asked
    ours: dict[int, Tensor]  # [V] by node
    wrong: set[int] = field(default_factory=set)  # nodes


class DecisionWatch:
    """Holds what the engine decides against rules and formulas, step by step."""

    def __init__(self, drive: Drive, case: Case, contexts: Mapping[str, Contexts], forms: RequestForms | None) -> None:
        self.drive, self.case, self.contexts, self.forms = drive, case, contexts, forms
        self.rules = {side: Operation(Stage.SAMPLING, "rules", f"{side} by the sampling rules") for side in "pq"}
        self.verdict = {name: Operation(Stage.VERDICT, name, words) for name, (words, _) in OPERATIONS.items()}
        self.held: dict[Operation, list[Figure]] = defaultdict(list)
        self.kept: dict[str, list[RuledStep]] = {"p": [], "q": []}  # of p and q, to be searched
        self.before: dict[str, Sequence[RuledStep]] = {"p": (), "q": ()}  # of the engine's step before
        # By operation of the verdict the steps that differ in it first, and where
        self.wrong: dict[str, list[tuple[RequestStep, int | None]]] = defaultdict(list)
        self.left_out = Counter[str]()  # steps that were not judged, by why
        self.rows = self.steps = 0
        drive.decided = self.see

    @torch.inference_mode()
    def see(self, now: StepState, parts: tuple[RequestStep, ...]) -> None:
        """A step that the engine has verified by itself."""
        if now.judged is None or self.rows > ROWS:
            return
        batch, noted, sampled, greedy = now.judged.batch, now.judged.notes(), 0, 0
        ruled: dict[str, list[RuledStep]] = {"p": [], "q": []}
        number = -1
        for turn, part in zip(now.turns, parts, strict=True):
            draft, logits = turn.draft, turn.logits
            if turn.verdict is None or logits is None:
                continue
            number, count = number + 1, len(draft.tree) + 1
            if batch.trees.greedy[number]:
                rows, greedy = _chosen(batch, greedy, count), greedy + count
            else:
                rows = batch.target.p[sampled : sampled + count].float().cpu().clone()  # its memory is used again
                sampled += count
            if (judged := self._judged(part)) is None:
                continue
            self.rows, self.steps = self.rows + count, self.steps + 1
            step, contexts = self.case.by_key[part.request, part.index], self.contexts[part.request]
            if not contexts.limits:
                made = logits.float().cpu().clone()
                asked = Asked(step, judged, contexts, {node: made[node + 1] for node in judged.rows})
                ruled["p"].append(RuledStep(asked, {node: rows[node + 1] for node in judged.rows}))
            if draft.q:
                ruled["q"].append(_drawn(step, judged, contexts, draft))
            if is_own(part.rule):
                self.left_out["their rule is your own"] += 1
            else:
                self._decide(replace(part, verdict=turn.verdict, parents=noted[number]), judged, draft, rows)
        for side, some in ruled.items():
            self._ruled(side, [step for step in some if step.asked.logits])

    def _judged(self, part: RequestStep) -> AuditedStep | None:
        """The step with the rows of its contexts; None where it is not judged."""
        steps = self.contexts[part.request].steps if part.request in self.contexts else ()
        judged = next((step for step in steps if step.part.index == part.index), None)
        why = "" if judged is not None else "the text before them is not known"
        if judged is not None and (part.request, part.index) not in self.case.by_key:
            why = "they have forced outcomes"
        elif judged is not None and part.request in self.drive.unlike:
            why = "their drafts were not drawn again"
        self.left_out.update([why] if why else [])
        return None if why else judged

    def _ruled(self, side: str, some: Sequence[RuledStep]) -> None:
        """p or q of a step's requests against the rules over the same logits; where rows differ the step is kept."""
        if some:
            rows, steps = self._rows(side, some)
            ours = torch.stack([step.ours[p.node] for step, p in zip(steps, rows.places.every, strict=True)])
            for step, place, *both in zip(steps, rows.places.every, *_apart(rows, ours), strict=True):
                where = place.asked.step.reference(None if place.node == ROOT else place.node)
                figure = Figure("rules", side, place.node, both[0], 0.0, both[1], where)
                self.held[self.rules[side]].append(figure)
                step.wrong |= {place.node} if figure.differs else set()
        if any(step.wrong for step in some) and len(self.kept[side]) < KEPT:
            self.kept[side] += [step for step in (*self.before[side], *some) if step not in self.kept[side]]
        self.before[side] = some

    def _rows(self, side: str, some: Sequence[RuledStep]) -> tuple[RuledRows, list[RuledStep]]:
        """All rows of some steps, and the step of each."""
        rows = RuledRows(Places([step.asked for step in some]), side, self.forms)
        by_key = {step.asked.step.key: step for step in some}
        return rows, [by_key[place.asked.step.key] for place in rows.places.every]

    def _decide(self, part: RequestStep, judged: AuditedStep, draft: Draft, rows: Tensor) -> None:
        """`part`: with the engine's own verdict and notes."""
        p = dict(enumerate(rows.double().numpy(), ROOT))
        q = {node: drawn.double().cpu().numpy() for node, drawn in draft.q.items()}
        for figure in _figures(part, p, q, self.contexts[part.request].params.seed):
            self.held[self.verdict[figure.operation]].append(replace(figure, where=judged.at(figure.node)))
            if figure.differs:
                is_number = figure.what not in ("outcome", "kind")  # of which a formula may give another
                if is_number and len(self.wrong[figure.operation]) < KEPT:
                    self.wrong[figure.operation].append((part, figure.node))
                return

    def located(self) -> Iterator[Located]:
        for operation, figures in self.held.items():
            if wrong := _wrong(figures):
                of_rules = operation.stage is Stage.SAMPLING
                yield self._sampled(wrong, len(figures)) if of_rules else self._decided(operation, wrong, figures)

    def _sampled(self, wrong: Sequence[Figure], compared: int) -> Located:
        """The rule by which p or q differs."""
        first, side = wrong[0], wrong[0].what
        rows, steps = self._rows(side, self.kept[side])
        found = search_rows(self.case, rows, [*_items(rows, steps)], logits_right=True, side="in the engine")
        of_rows = f"{len(wrong):,} of {plural(compared, 'row')}"
        text = f"{side} of {of_rows} is not what the rules give for the engine's own logits"
        if found is not None:
            return replace(found.located, sentence=f"{text}; {found.located.sentence}", proof=Proof.PLACE)
        words = f"{'the target' if side == 'p' else 'the drafter'}: the sampling rules"
        text += f": up to {max(figure.error for figure in wrong):.2g} of a row's mass differs"
        smallest, count = f"{first.where}: {first.error:.2g} of its mass differs", len(wrong)
        operation = Operation(Stage.SAMPLING, "rules", words)
        return Located(operation, text, "", smallest, first.where, count, count, certain=False)

    def _decided(self, operation: Operation, wrong: Sequence[Figure], figures: Sequence[Figure]) -> Located:
        first, (words, unit) = wrong[0], OPERATIONS[operation.name]
        counted = [figure for figure in figures if figure.what == first.what]
        count = f"{len(_wrong(counted)):,} of {plural(len(counted), unit)}"
        text = f"{words}: {count} differ, over the engine's own p, q and coins"
        smallest = f"{first.where}: {SHOWN.get(first.what, first.what)} is {first.ours:.6g} in the engine and "
        smallest += f"{first.right:.6g} by the formula"
        looks = _looks(operation.name, self.wrong[operation.name]) if self.wrong[operation.name] else ""
        return Located(operation, text, looks, smallest, first.where, len(wrong), len(wrong), unit)

    def walk(self) -> Walk | None:
        told = sorted(self.held.items(), key=lambda each: each[0].stage is Stage.VERDICT)
        if not told or (where := told[0][1][0].where) is None:
            return None
        held = tuple(_held(*each) for each in told)
        return Walk(Stage.VERDICT, where, (), held, "specscope's sampling and verdict", "rules and formulas")

    def agrees(self) -> Iterator[tuple[str, Stage]]:
        """A sentence each, with the stage that it is about."""
        for side, operation in self.rules.items():
            if (figures := self.held.get(operation, [])) and not _wrong(figures):
                rows = plural(len(figures), "row")
                follow = f"{side} of {rows}, recomputed, is what they give for the engine's own logits"
                yield f"the sampling rules: {follow}", Stage.SAMPLING
        figures = [figure for name in self.verdict.values() for figure in self.held.get(name, [])]
        if figures and not _wrong(figures):
            counts = f"{plural(len(figures), 'figure')} of {plural(self.steps, 'step')}"
            yield f"the verdict: {counts}, run again, follow from p, q and coins", Stage.VERDICT

    def notes(self) -> list[str]:
        return [f"the walk's verdicts: {plural(count, 'step')} left out: {why}" for why, count in self.left_out.items()]


def _looks(name: str, wrong: Sequence[tuple[RequestStep, int | None]]) -> str:
    """What stands in place of a figure of an operation in these steps, by the columns of them; "" for nothing known."""
    c, nodes = Columns([part for part, _ in wrong]), [node or 0 for _, node in wrong]  # of final tokens: of the step
    at = np.arange(len(nodes)) if name == FINAL else c.start[:-1] + np.array(nodes, np.int64)
    formulas = [formula for formula in FORMULAS.values() if formula.operation == name and name not in (COIN, ENTROPY)]
    return next((best.name for formula in formulas if (best := formula.best(c, at)) is not None), "")


def _figures(part: RequestStep, p: Mapping[int, Doubles], q: Mapping[int, Doubles], seed: int) -> Iterator[Figure]:
    """The figures of a step in the order of deciding, the engine's beside those of the formulas."""
    tree, notes, verdict = part.tree, part.parents, part.verdict
    assert verdict is not None
    due, is_match = coins(seed, Stream.VERIFY, part.position, len(tree) + 1), verdict.rule == MATCH
    for node, above in enumerate(tree.parent.tolist()):
        first = tree.children(above)[0] if is_match and verdict.outcome[node] else node
        yield Figure(COIN, "the coin", node, float(verdict.coin[node]), float(due[first + 1]), 0.0)
    if not (is_match and verdict.kind is FinalKind.RECOVERED):
        yield Figure(COIN, "the final coin", None, verdict.final_coin, float(due[0]), 0.0)
    for node, above in enumerate(tree.parent.tolist()):
        right = float(p[above][tree.token[node]])
        yield Figure(P, "p", node, float(verdict.p[node]), right, 1e-6 * right + 1e-12)
    decided = decide(verdict, tree, p, q)
    yield from decided.figures
    if decided.left is None or decided.drawn_from is None:
        return
    # The final token: its coin lies in its interval, and its p is what is left of p there
    left, off = decided.left.value, decided.left.error
    low, high = interval_of(decided.drawn_from, verdict.token)
    away = max(low - decided.final_coin, decided.final_coin - high, 0.0) if high > low else 1.0
    yield Figure(FINAL, "token", None, away, 0.0, off + SUM)
    right = float(left[verdict.token]) / float(left.sum())
    yield Figure(FINAL, "final_p", None, verdict.final_p, right, off + SUM * right + 1e-9)
    if notes is None:
        return
    for place, node in enumerate(notes.node.tolist()):
        of_node = None if node == ROOT else node
        yield _spread("the entropy of p", of_node, notes.entropy[place], p[node])
        if tree.drawn[tree.children(node)[0]] != Drawn.DETERMINISTIC:
            yield _spread("the entropy of q", of_node, notes.q_entropy[place], q[node])
    yield _spread("the entropy of the final token's distribution", None, notes.final_entropy, left, 40 * off)


def _spread(what: str, node: int | None, ours: float, row: Doubles, off: float = 0.0) -> Figure:
    some = row[row > 0]
    right = float(-(some * np.log(some)).sum())
    return Figure(ENTROPY, what, node, float(ours), right, 2e-4 * (1 + right) + off)


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
        row = draft.row(path) if node in draft.q and draft.q[node].any() else None  # none: behind a form's end
        if row is not None:
            logits[node], ours[node] = row.full()[0].cpu(), draft.q[node].float().cpu()
    return RuledStep(Asked(step, judged, contexts, logits), ours)


def _apart(rows: RuledRows, ours: Tensor) -> tuple[list[float], list[float]]:
    """Of each row how much of its mass differs than by the rules, and how much of that rounding explains."""
    allowed = [0.0 if each.greedy else SHARE + 1e-6 / max(each.temperature, 1e-3) for each in rows.params]
    errors = _moved(rows, ours, sampling.RIGHT, range(len(ours)))
    at_border = [i for i, error in enumerate(errors) if error > allowed[i]]
    for by in (1 + BORDER, 1 - BORDER) if at_border else ():
        recipe = RuleRecipe(changed=(("top-p", _times(by)), ("min-p", _times(1 / by))))
        for i, error in zip(at_border, _moved(rows, ours, recipe, at_border), strict=True):
            errors[i] = min(errors[i], error)
    return errors, allowed


def _times(by: float) -> Callable[[Tensor], Tensor]:
    return lambda value: torch.where(value < 1, value * by, value)


def _moved(rows: RuledRows, ours: Tensor, recipe: RuleRecipe, some: Sequence[int]) -> list[float]:
    """How much of the mass of some rows lies elsewhere."""

    def moved(own: Tensor, due: Tensor, *, greedy: bool) -> float:
        if greedy:  # how far the choice lies below the likeliest, in log odds that rounding does not explain
            below = float(due.max().log() - due[int(own.argmax())].log())
            return below if below > SHARE else 0.0
        if not bool(due.isfinite().all()):
            return 0.0  # nothing may come there
        mass = float((own - due).abs().sum())
        kept = bool((((own > 0) != (due > 0)) & (torch.maximum(own, due) > 1e-30)).any())
        return 1.0 if mass != mass else max(mass, SHARE * 100 if kept else 0.0)

    both = zip(some, rows.distributions(recipe, some), strict=True)
    return [moved(ours[i], due, greedy=rows.what == "p" and rows.params[i].greedy) for i, due in both]


def _items(rows: RuledRows, steps: Sequence[RuledStep]) -> Iterator[Item]:
    """The engine's p, or q, of the tokens that tell the most at rows of these steps."""
    right = rows.distributions(sampling.RIGHT, range(len(steps)))
    for number, (step, place, due) in enumerate(zip(steps, rows.places.every, right, strict=True)):
        if bool(due.isnan().any()):
            continue
        own, node, differs = step.ours[place.node], place.node, place.node in step.wrong
        is_greedy = rows.params[number].greedy and rows.what == "p"
        off = (own.clamp(min=1e-5).log() - due.clamp(min=1e-5).log()).abs()
        tops = [(own, 2), *([(off, 3), ((own - due).abs(), 2)] if differs else [])]
        tokens = sorted({token for values, count in tops for token in values.topk(count).indices.tolist()})
        children = place.asked.step.tree.children(node)
        child = children[0] if children else None
        kind = NODE if child is not None else TARGET if node == ROOT else BONUS
        where = place.asked.step.reference(None if node == ROOT else node)
        for token in [int(own.argmax())] if is_greedy else tokens:
            if not differs or is_greedy or float(off[token]) > SLACK:
                yield Item(number, token, float(own[token]), kind, where, differs, SLACK, node, child, is_greedy)


def _wrong(figures: Sequence[Figure]) -> list[Figure]:
    return [figure for figure in figures if figure.differs]


def _held(operation: Operation, figures: Sequence[Figure]) -> Held:
    worst = max(figures, key=lambda figure: figure.error - figure.allowed)
    errors = np.array([[figure.error] for figure in figures], np.float32)
    return Held(operation, worst.allowed, worst.error, len(figures), len(_wrong(figures)), errors)
