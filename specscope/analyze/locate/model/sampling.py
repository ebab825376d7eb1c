"""Logits to p or q under a variant of audit's sampling rules: other rules, order, parameters, tokens or rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from specscope.analyze.audit.model.rows import Asked
from specscope.analyze.audit.model.rules import PENALTIES, RequestForms, biased, first_k, first_p, least_p, penalised
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT, Drawn

STEPS = 24  # that are asked about, of each kind
T = TypeVar("T")


def some(items: Sequence[T]) -> Sequence[T]:
    """A few of them, spread over the run."""
    return items[:: max(1, len(items) // STEPS)][:STEPS]


@dataclass(frozen=True)
class RowPlace:
    """A row of logits: of a step, after its root or a node."""

    asked: Asked
    node: int

    @property
    def logits(self) -> Tensor:
        """[V]."""
        return self.asked.logits[self.node]

    @property
    def engine_step(self) -> int:
        return self.asked.step.visit.record.step


Related = Callable[["Places", RowPlace, "int | None"], int]  # of a place, and its child where one is asked about


@dataclass(frozen=True)
class Relation:
    name: str  # "the next request in the batch"
    of: Related  # -1: none


class Places:
    def __init__(self, asked: Sequence[Asked]) -> None:
        self.every = [RowPlace(one, node) for one in asked for node in sorted(one.logits)]
        self._number = {(*place.asked.step.key, place.node): row for row, place in enumerate(self.every)}
        self._by_key = {one.step.key: one for one in asked}
        self._batch: dict[int, list[Asked]] = {}
        for one in sorted(asked, key=lambda one: one.step.visit.row):
            self._batch.setdefault(one.step.visit.record.step, []).append(one)
        self._others: dict[tuple[str, int, int | None], int] = {}

    def at(self, asked: Asked | None, node: int) -> int:
        """The number of the place there; -1 where the model was not asked."""
        return -1 if asked is None else self._number.get((*asked.step.key, node), -1)

    def other(self, relation: Relation, row: int, child: int | None = None) -> int:
        """The number of the related place, of a child that is asked about; its own where there is none."""
        key = relation.name, row, child
        if key not in self._others:
            there = relation.of(self, self.every[row], child)
            self._others[key] = row if there < 0 else there
        return self._others[key]

    def beside(self, place: RowPlace) -> list[Asked]:
        return self._batch[place.engine_step]

    def before(self, place: RowPlace) -> Asked | None:
        last = place.asked.step.last
        return None if last is None else self._by_key.get(last.key)


def _neighbour(by: int) -> Related:
    """At the same node of the request `by` places further on."""

    def of(places: Places, place: RowPlace, child: int | None) -> int:
        batch = places.beside(place)
        own = next(index for index, one in enumerate(batch) if one is place.asked)
        return places.at(batch[(own + by) % len(batch)], place.node)

    return of


def _row_further(by: int) -> Related:
    """The row of the batch that lies `by` rows further on, of those that are known."""

    def of(places: Places, place: RowPlace, child: int | None) -> int:
        batch = [places.at(one, node) for one in places.beside(place) for node in sorted(one.logits)]
        return batch[(batch.index(places.at(place.asked, place.node)) + by) % len(batch)]

    return of


def _first_of_batch(places: Places, place: RowPlace, child: int | None) -> int:
    first = places.beside(place)[0]
    return places.at(first, min(first.logits, default=ROOT))


def _above(places: Places, place: RowPlace, child: int | None) -> int:
    return -1 if place.node == ROOT else places.at(place.asked, int(place.asked.step.tree.parent[place.node]))


OTHERS = PARENT, ROOT_ROW, NEXT, PREVIOUS, BEFORE, FIRST, CHILD, LATER_ROW, EARLIER_ROW = (
    Relation("the row above its own", _above),
    Relation("the root", lambda places, place, child: places.at(place.asked, ROOT)),
    Relation("the next request in the batch", _neighbour(1)),
    Relation("the previous request in the batch", _neighbour(-1)),
    Relation("the request's previous step", lambda places, place, child: places.at(places.before(place), place.node)),
    Relation("the batch's first row", _first_of_batch),
    Relation("the draft itself", lambda places, place, child: -1 if child is None else places.at(place.asked, child)),
    Relation("the next row in the batch", _row_further(1)),
    Relation("the previous row in the batch", _row_further(-1)),
)
OF_REQUESTS = (NEXT, PREVIOUS, FIRST)  # those whose parameters may be mixed up


BIAS = "logit bias"
FORM, TEMPERATURE, MIN_P, TOP_K, TOP_P = "form", "temperature", "min-p", "top-k", "top-p"
LOGITS, LARGEST, SCORES, SOFTMAX, P = "logits", "largest", "scores", "softmax", "p"
CUTS = (MIN_P, TOP_K, TOP_P)
ORDER = (BIAS, *PENALTIES, FORM, TEMPERATURE, *CUTS)
COLD, TINY = 1e-3, 2.0**-126  # a temperature below which all is moved to 0 first; the least that float32 divides by
OF_DRAWS = {TEMPERATURE: 1.0, TOP_K: 0.0, TOP_P: 1.0, MIN_P: 0.0}  # rules that are a number, with what does nothing
NUMBERS = {**OF_DRAWS, **dict(zip(PENALTIES, (1.0, 0.0, 0.0), strict=True))}
Numbers = dict[str, Tensor]  # [R, 1] each, by the rule
Changing = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Counted:
    """The tokens that penalties may count at a row."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]  # what is committed
    ends: tuple[int, ...]  # where in `output` each step's last token is
    path: tuple[int, ...]  # drafted tokens on the way to the row

    @property
    def whole(self) -> tuple[int, ...]:
        return *self.output, *self.path

    @property
    def final(self) -> list[int]:
        """The committed tokens that were the last of their step."""
        return [self.output[end] for end in self.ends if end < len(self.output)]

    @property
    def accepted(self) -> list[int]:
        return [token for place, token in enumerate(self.output) if place not in self.ends]


Count = Callable[[Counted], tuple[Sequence[int], Sequence[int]]]  # what stands as prompt, and as output


@dataclass(frozen=True)
class RuleRecipe:
    """How p is made of logits: right as it is here, or changed."""

    steps: tuple[str, ...] = ORDER
    count: Count = lambda c: (c.prompt, c.whole)
    changed: tuple[tuple[str, Changing], ...] = ()  # what becomes of LOGITS, SCORES, the SOFTMAX, P, or of a parameter
    related: tuple[tuple[str, Relation], ...] = ()  # whose are the LOGITS, the LARGEST for min-p, or a parameter
    exclusive: bool = False  # top-p leaves out the token that reaches it

    def changing(self, stage: str, rows: Tensor) -> Tensor:
        """What becomes of rows at a stage."""
        for name, change in self.changed:
            rows = change(rows) if name == stage else rows
        return rows


RIGHT = RuleRecipe()


class RuledRows:
    """The logits of some places, and the distributions that a recipe makes of them.

    `what`: "p", "q"; "raw p", "raw q": by no rule at all. `forms`: what a request's form refuses; None: it is left out.
    """

    def __init__(self, places: Places, what: str, forms: RequestForms | None) -> None:
        self.places, self.what, self.forms = places, what, forms
        self.params = [_params(place, what) for place in places.every]
        self._refused: dict[tuple[int, tuple[int, ...]], Tensor | None] = {}

    @property
    def vocab(self) -> int:
        return len(self.places.every[0].logits)

    @cached_property
    def numbers(self) -> Numbers:
        """Each parameter's value at every place; a greedy request has no temperature and cuts nothing."""
        names = {rule: rule.replace(" ", "_").replace("-", "_") for rule in NUMBERS}
        values = {rule: torch.tensor([[float(getattr(p, name))] for p in self.params]) for rule, name in names.items()}
        greedy = torch.tensor([[p.greedy] for p in self.params])
        return values | {rule: torch.where(greedy, none, values[rule]) for rule, none in OF_DRAWS.items()}

    @cached_property
    def counted(self) -> list[Counted]:
        """What penalties may count at every place."""
        return [_counted(place) for place in self.places.every]

    @property
    def active(self) -> list[str]:
        of_requests = {BIAS: any(p.logit_bias for p in self.params), FORM: any(p.limited for p in self.params)}
        of_requests |= {rule: bool((values != NUMBERS[rule]).any()) for rule, values in self.numbers.items()}
        return [rule for rule in ORDER if of_requests[rule] and not self.what.startswith("raw")]

    @torch.inference_mode()
    def distributions(self, recipe: RuleRecipe, wanted: Sequence[int]) -> Tensor:
        """[len(wanted), V] p at these places, by their numbers."""

        related = dict(recipe.related)

        def whose(what: str, rows: Sequence[int]) -> list[int]:
            return [self.places.other(related[what], row) for row in rows] if what in related else [*rows]

        needed = sorted({row for what in ("", *related) for row in whose(what, wanted)})
        at = {row: index for index, row in enumerate(needed)}
        numbers = {rule: recipe.changing(rule, each[whose(rule, needed)]) for rule, each in self.numbers.items()}
        rows = torch.stack([self.places.every[row].logits for row in whose(LOGITS, needed)]).float()
        rows = recipe.changing(LOGITS, rows).float()
        largest_of = [at.get(row, own) for own, row in enumerate(whose(LARGEST, needed))]
        for step in recipe.steps:
            rows = self._step(step, rows, needed, numbers, recipe, largest_of)
        p = recipe.changing(SOFTMAX, recipe.changing(SCORES, rows).float()).softmax(-1).float()
        p = recipe.changing(P, p).float()
        return p[[at[row] for row in wanted]]

    def _step(
        self, step: str, rows: Tensor, needed: list[int], numbers: Numbers, recipe: RuleRecipe, largest_of: list[int]
    ) -> Tensor:
        if step == BIAS:
            of_rows = zip(rows, needed, strict=True)
            return torch.stack([biased(row, self.params[number].logit_bias) for row, number in of_rows])
        if step == FORM:
            return self._limited(rows, needed, recipe)
        values = numbers[step]
        if step in PENALTIES:
            each = zip(rows, values[:, 0].tolist(), (recipe.count(self.counted[row]) for row in needed), strict=True)
            return torch.stack([penalised(step, row, value, *tokens) for row, value, tokens in each])
        if step == TEMPERATURE:
            rows = torch.where(values < COLD, rows - rows.amax(-1, keepdim=True), rows)  # else a quotient overflows
            return rows / values.clamp(min=TINY)
        if step == MIN_P:
            return least_p(rows, values, rows.amax(-1, keepdim=True)[largest_of]) if bool((values > 0).any()) else rows
        return first_k(rows, values) if step == TOP_K else first_p(rows, values, exclusive=recipe.exclusive)

    def _limited(self, rows: Tensor, needed: list[int], recipe: RuleRecipe) -> Tensor:
        for index, row in enumerate(needed):
            if self.forms is None or not self.params[row].limited:
                continue
            output = tuple(recipe.count(self.counted[row])[1])
            if (row, output) not in self._refused:
                self._refused[row, output] = self.forms.refused(self.params[row], output)
            if (refused := self._refused[row, output]) is not None:
                rows[index, refused] = -torch.inf
        return rows


def _params(place: RowPlace, what: str) -> SamplingParams:
    """The parameters by which a row is shaped. What is drafted for being the likeliest is noted before temperature."""
    if what.startswith("raw"):
        return SamplingParams(temperature=1.0)
    contexts, tree = place.asked.contexts, place.asked.step.tree
    if what != "q":
        return contexts.params
    params, children = contexts.drafter_params, tree.children(place.node)
    plain = bool(children) and tree.drawn[children[0]] == Drawn.DETERMINISTIC
    return replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) if plain else params


def _counted(place: RowPlace) -> Counted:
    asked, contexts = place.asked, place.asked.contexts
    output = tuple(contexts.output(asked.judged.rows[place.node]))
    drafted = 0 if place.node == ROOT else int(asked.step.tree.depth[place.node])
    ends, made = [], len(asked.step.visit.request.earlier() or ())
    for part in asked.step.visit.request.steps:
        made += part.emitted
        if part.emitted:
            ends.append(made - 1)
    committed = len(output) - drafted
    return Counted(tuple(contexts.text[: contexts.prompt_len]), output[:committed], tuple(ends), output[committed:])


# The ways that are searched: one change of the rules each

ROWS = "rows"  # the operation of taking another row
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NODE, BONUS, RECOVERED, TARGET = "node", "bonus", "recovered", "target"  # kinds of items


@dataclass(frozen=True)
class RuleChange:
    name: str  # "top-p left out"
    operation: str  # "top-p"
    recipe: RuleRecipe = RIGHT
    row: Relation | None = None  # whose p it is
    fitted: bool = False  # whether a number in it was fitted: then it must explain nearly all


def changed(stage: str, change: Changing) -> RuleRecipe:
    """A parameter's value, or what there is at a stage, changed at every row."""
    return RuleRecipe(changed=((stage, change),))


def times(by: float, plus: float = 0.0) -> Changing:
    return lambda value: value * by + plus


def _again(rules: Sequence[str], behind: str) -> tuple[str, ...]:
    """The steps with some rules once more, behind another one."""
    return tuple(x for step in ORDER for x in ((step, *rules) if step == behind else (step,)))


def _moved(rules: Sequence[str], to: str, *, behind: bool) -> tuple[str, ...]:
    """The steps with some rules moved to before another, or behind it."""
    rest, moved = [step for step in ORDER if step not in rules], [step for step in ORDER if step in rules]
    place = rest.index(to) + behind if to in rest else len(rest)
    return (*rest[:place], *moved, *rest[place:]) if to in rest else ORDER


COUNTS: dict[str, Count] = {  # what penalties count
    "count the prompt as output": lambda c: (c.prompt, (*c.prompt, *c.whole)),
    "count each token of the output once": lambda c: (c.prompt, tuple(set(c.whole))),
    "count only the last token of each step": lambda c: (c.prompt, (*c.final, *c.path)),
    "do not count the drafted tokens on the path": lambda c: (c.prompt, c.output),
    "count the drafted tokens on the path twice": lambda c: (c.prompt, (*c.whole, *c.path)),
    "count accepted tokens twice": lambda c: (c.prompt, (*c.whole, *c.accepted)),
    "count accepted tokens and the path twice": lambda c: (c.prompt, (*c.whole, *c.accepted, *c.path)),
    "do not count the last committed token": lambda c: (c.prompt, (*c.output[:-1], *c.path)),
    "do not count the last token before the row": lambda c: (c.prompt, c.whole[:-1]),
    "count only the drafted tokens on the path": lambda c: (c.prompt, c.path),
    "do not count the prompt": lambda c: ((), c.whole),
    "do not count the output": lambda c: (c.prompt, ()),
}


def _of_steps(active: Sequence[str]) -> Iterator[RuleChange]:
    """Rules, alone or together, that are left out or applied twice; and those of several that are easily forgotten."""
    penalties, cuts = ([rule for rule in active if rule in group] for group in (PENALTIES, CUTS))
    of_bias, last = penalties and BIAS in active, (*cuts, "")[len(cuts) - 1]
    groups = [  # in words, the operation, they themselves, where they are at work, whether twice is another thing
        *((rule, rule, (rule,), True, True) for rule in active),
        ("the penalties", "penalties", PENALTIES, len(penalties) > 1, True),
        ("the logit bias and the penalties", "penalties", (BIAS, *PENALTIES), of_bias, True),
        (", ".join(cuts), last, CUTS, len(cuts) > 1, True),
        ("the temperature and what follows", TEMPERATURE, (TEMPERATURE, *CUTS), cuts and TEMPERATURE in active, True),
        ("all rules", "rules", ORDER, len(active) > 1, True),
    ]
    known = [each for each in groups if each[3]]
    for words, operation, rules, *_ in known:
        left = tuple(step for step in ORDER if step not in rules)
        yield RuleChange(f"{words} left out", operation, RuleRecipe(left))
    for words, operation, rules, _, twice in known:
        again = RuleRecipe(_again(rules, rules[-1]))
        yield from [RuleChange(f"{words} applied twice", operation, again)] if twice else []
    if cuts:
        name = f"{', '.join(cuts)} applied before the temperature and again after it"
        yield RuleChange(name, cuts[-1], RuleRecipe(_again(CUTS, FORM)))


def _reordered(active: Sequence[str]) -> Iterator[RuleChange]:
    """Rules at each other place among those that are active: what cuts together, then each alone."""
    cuts, seen = tuple(rule for rule in active if rule in CUTS), {tuple(active)}
    single = [rule for rule in (*reversed(CUTS), *PENALTIES, BIAS, FORM, TEMPERATURE) if rule in active]
    for rules in ([cuts] if len(cuts) > 1 else []) + [(rule,) for rule in single]:
        for to in active:
            behind = ORDER.index(to) > ORDER.index(rules[-1])
            steps = _moved(rules, to, behind=behind)
            order = tuple(step for step in steps if step in active)
            if order not in seen:
                seen.add(order)
                name = f"{', '.join(rules)} {'after' if behind else 'before'} {to}"
                yield RuleChange(name, rules[-1], RuleRecipe(steps))


def _values(rows: RuledRows, active: Sequence[str]) -> Iterator[RuleChange]:
    """Parameters that are off, or another row's."""
    for rule in (TEMPERATURE, PENALTIES[0]):
        if rule in active:
            yield RuleChange(f"the inverse of the {rule}", rule, changed(rule, lambda value: 1 / value))
    for rule in PENALTIES[1:]:
        if rule in active:
            yield RuleChange(f"the {rule} with the other sign", rule, changed(rule, lambda value: -value))
    if TOP_K in active:
        yield RuleChange("top-k with one more token", TOP_K, changed(TOP_K, lambda k: k + (k > 0).float()))
        yield RuleChange("top-k with one token less", TOP_K, changed(TOP_K, lambda k: k - (k > 1).float()))
    if TOP_P in active:
        yield RuleChange("top-p without the token that reaches it", TOP_P, RuleRecipe(exclusive=True))
    for relation in (FIRST, ROOT_ROW, PARENT, *OF_REQUESTS[:2], BEFORE) if MIN_P in active else ():
        name = f"min-p by the largest p of {relation.name}"
        yield RuleChange(name, MIN_P, RuleRecipe(related=((LARGEST, relation),)))
    rules = [rule for rule, values in rows.numbers.items() if bool((values != values[0]).any())]
    for relation in OF_REQUESTS if rules else ():
        every = tuple((rule, relation) for rule in rules)
        yield RuleChange(f"the parameters of {relation.name}", "parameters", RuleRecipe(related=every))
        for rule in rules if len(rules) > 1 else ():
            yield RuleChange(f"the {rule} of {relation.name}", rule, RuleRecipe(related=((rule, relation),)))


def changes(rows: RuledRows) -> list[RuleChange]:
    """All changes of one kind that can matter to these rows; the simplest first."""
    active = rows.active
    made = [*_of_steps(active), *_values(rows, active)] if not rows.what.startswith("raw") else []
    penalties = [rule for rule in active if rule in PENALTIES]
    for name, count in COUNTS.items() if penalties or FORM in active else ():
        operation = penalties[0] if len(penalties) == 1 else "penalties"
        made.append(RuleChange(f"penalties that {name}", operation, RuleRecipe(count=count)))
    made += _reordered(active)
    has_rules = bool(made)
    made += [RuleChange(f"the row of {relation.name}", ROWS, row=relation) for relation in OTHERS]
    for relation in OTHERS if has_rules else ():
        if relation is not CHILD:
            name = f"the logits of {relation.name} under its own rules"
            made.append(RuleChange(name, ROWS, RuleRecipe(related=((LOGITS, relation),))))
    words = {LOGITS: "the logits", SCORES: "the scores before the softmax", SOFTMAX: "the softmax", P: rows.what}
    for name, dtype in DTYPES.items():
        for stage, what in words.items():
            operation = LOGITS if stage == LOGITS else SOFTMAX
            made.append(RuleChange(f"{what} in {name}", operation, changed(stage, partial(Tensor.to, dtype=dtype))))
    return made


def cut(first: int) -> RuleChange:
    among = changed(LOGITS, lambda rows: rows.index_fill(1, torch.arange(first, rows.shape[1]), -torch.inf))
    return RuleChange(f"a choice among the first {first:,} tokens only", LOGITS, among)


def left_out(token: int) -> RuleChange:
    without = changed(LOGITS, lambda rows: rows.index_fill(1, torch.tensor([token]), -torch.inf))
    return RuleChange(f"token {token} left out", LOGITS, without)


Dial = tuple[Callable[[float], RuleChange], list[float]]  # a change with a number; those tried first, ascending


def dials(rows: RuledRows, *, logits_right: bool) -> list[Dial]:
    """What has a number in it. One temperature for all requests is another thing where these have several."""

    def dial(words: str, stage: str, of: Callable[[float], Changing], low: float, high: float, count: int = 41) -> Dial:
        def change(x: float) -> RuleChange:
            return RuleChange(words.format(x), stage, changed(stage, of(x)), fitted=True)

        return change, list(np.geomspace(low, high, count))

    made, heats = list[Dial](), rows.numbers[TEMPERATURE]
    if not rows.what.startswith("raw"):
        made.append(dial("the temperature times {:.3g}", TEMPERATURE, times, 0.1, 10.0))
        cuts = (rule for rule in (MIN_P, TOP_P) if rule in rows.active)
        made += [dial(f"{rule} times {{:.3g}}", rule, times, 0.1, 10.0) for rule in cuts]
    if bool((heats != heats[0]).any()):
        made.append(dial("a temperature of {:.3g}", TEMPERATURE, partial(times, 0), 0.05, 5.0))
    if not logits_right:
        made.append(dial("the logits times {:.3g}", LOGITS, times, 0.1, 10.0))
        made.append(dial("a soft cap of {:.3g} on the logits", LOGITS, _capped, 1.0, 100.0, 31))
        made.append(dial("logits rounded to multiples of {:.3g}", LOGITS, _rounded, 1 / 64, 4.0, 25))
    return made


def _rounded(step: float) -> Changing:
    return lambda rows: (rows / step).round() * step


def _capped(cap: float) -> Changing:
    return lambda rows: cap * torch.tanh(rows / cap)
