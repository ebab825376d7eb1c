"""Logits to p or q under a variant of the sampling rules: each rule a step, in an order, over the rows of some places.

The rules are audit's; what is changed is which of them, in what order, with whose parameters and over which tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.rules import PENALTIES, biased, first_k, first_p, least_p, penalised
from specscope.analyze.locate.model.other_rows import (
    BEFORE,
    CHILD,
    FIRST,
    OF_REQUESTS,
    OTHERS,
    PARENT,
    ROOT_ROW,
    Places,
    Relation,
    RowPlace,
)
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT, Drawn

BIAS = "logit bias"
FORM, TEMPERATURE, MIN_P, TOP_K, TOP_P = "form", "temperature", "min-p", "top-k", "top-p"
LOGITS, SOFTMAX = "logits", "softmax"
CUTS = (MIN_P, TOP_K, TOP_P)
ORDER = (BIAS, *PENALTIES, FORM, TEMPERATURE, *CUTS)
COLD, TINY = 1e-3, 2.0**-126  # a temperature below which all is moved to 0 first; the least that float32 divides by
OF_DRAWS = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0}  # and the value that does nothing
KNOBS = {**OF_DRAWS, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
Knobs = dict[str, Tensor]  # [R, 1] each


@dataclass(frozen=True)
class Counted:
    """The tokens that penalties may count at a row."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]  # what is committed
    ends: tuple[int, ...]  # where in `output` each step's last token is
    path: tuple[int, ...]  # drafted tokens on the way to the row

    @property
    def final(self) -> list[int]:
        """The committed tokens that were the last of their step."""
        return [self.output[end] for end in self.ends if end < len(self.output)]

    @property
    def accepted(self) -> list[int]:
        """The committed tokens that were accepted drafts."""
        ends = set(self.ends)
        return [token for place, token in enumerate(self.output) if place not in ends]


Count = Callable[[Counted], tuple[Sequence[int], Sequence[int]]]  # what stands as prompt, and as output


def as_it_should(counted: Counted) -> tuple[Sequence[int], Sequence[int]]:
    """The prompt, and the output with the path."""
    return counted.prompt, (*counted.output, *counted.path)


@dataclass(frozen=True)
class RuleRecipe:
    """How p is made of logits: right as it is here, or changed."""

    steps: tuple[str, ...] = ORDER
    count: Count = as_it_should
    knobs: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = ()  # changes of a parameter's values
    knobs_of: tuple[tuple[str, Relation], ...] = ()  # parameters that are another row's
    largest_of: Relation | None = None  # the row whose maximum min-p goes by
    logits_of: Relation | None = None  # the row whose logits are taken
    rounded: tuple[tuple[str, torch.dtype], ...] = ()  # what is rounded to a dtype: LOGITS, "scores", SOFTMAX, "p"
    first: int | None = None  # only the first tokens of the vocabulary can come
    scale: float = 1.0  # of the logits
    cap: float | None = None  # a soft cap on the logits
    exclusive: bool = False  # top-p leaves out the token that reaches it

    @property
    def references(self) -> list[Relation]:
        """The other rows that it needs."""
        return [*(of for _, of in self.knobs_of), *(x for x in (self.largest_of, self.logits_of) if x is not None)]


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
        """Tokens in a row."""
        return len(self.places.every[0].logits)

    @cached_property
    def knobs(self) -> Knobs:
        """Each parameter's value at every place; a greedy request has no temperature and cuts nothing."""
        values = {name: torch.tensor([[float(getattr(p, name))] for p in self.params]) for name in KNOBS}
        greedy = torch.tensor([[p.greedy] for p in self.params])
        return values | {name: torch.where(greedy, none, values[name]) for name, none in OF_DRAWS.items()}

    @cached_property
    def counted(self) -> list[Counted]:
        """What penalties may count at every place."""
        return [_counted(place) for place in self.places.every]

    def active(self, rule: str) -> bool:
        """Whether any request has this rule."""
        if rule in (BIAS, FORM):
            return any(bool(params.logit_bias) if rule == BIAS else params.limited for params in self.params)
        name = rule.replace(" ", "_").replace("-", "_")
        return bool((self.knobs[name] != KNOBS[name]).any())

    @torch.inference_mode()
    def distributions(self, recipe: RuleRecipe, wanted: Sequence[int]) -> Tensor:
        """[len(wanted), V] p at these places, by their numbers."""
        needed = sorted({*wanted, *(self.places.other(of, row) for of in recipe.references for row in wanted)})
        at = {row: index for index, row in enumerate(needed)}
        knobs = {name: values[needed] for name, values in self.knobs.items()}
        for name, of in recipe.knobs_of:
            knobs[name] = self.knobs[name][[self.places.other(of, row) for row in needed]]
        for name, change in recipe.knobs:
            knobs[name] = change(knobs[name])
        source = [row if recipe.logits_of is None else self.places.other(recipe.logits_of, row) for row in needed]
        rows = torch.stack([self.places.every[row].logits for row in source]).float()
        rows = self._logits(rows, recipe)
        rounded = dict(recipe.rounded)
        for step in recipe.steps:
            rows = self._step(step, rows, needed, knobs, recipe, at)
        if "scores" in rounded:
            rows = rows.to(rounded["scores"]).float()
        p = rows.to(rounded[SOFTMAX]).softmax(-1).float() if SOFTMAX in rounded else rows.softmax(-1)
        p = p.to(rounded["p"]).float() if "p" in rounded else p
        return p[[at[row] for row in wanted]]

    def _logits(self, rows: Tensor, recipe: RuleRecipe) -> Tensor:
        """What is done to the logits before any rule."""
        rounded = dict(recipe.rounded)
        rows = rows.to(rounded[LOGITS]).float() if LOGITS in rounded else rows.clone()
        if recipe.scale != 1:
            rows = rows * recipe.scale
        if recipe.cap is not None:
            rows = recipe.cap * torch.tanh(rows / recipe.cap)
        if recipe.first is not None:
            rows[:, recipe.first :] = -torch.inf
        return rows

    def _step(
        self, step: str, rows: Tensor, needed: list[int], knobs: Knobs, recipe: RuleRecipe, at: dict[int, int]
    ) -> Tensor:
        """One rule."""
        if step == TEMPERATURE:
            cold = knobs["temperature"] < COLD
            rows = torch.where(cold, rows - rows.amax(-1, keepdim=True), rows)  # else a quotient overflows
            return rows / knobs["temperature"].clamp(min=TINY)
        if step == BIAS:
            of_rows = zip(rows, needed, strict=True)
            return torch.stack([biased(row, self.params[number].logit_bias) for row, number in of_rows])
        if step in PENALTIES:
            return self._penalised(step, rows, needed, knobs, recipe)
        if step == FORM:
            return self._limited(rows, needed, recipe)
        if step == MIN_P:
            if not bool((knobs["min_p"] > 0).any()):
                return rows
            largest = rows.amax(-1, keepdim=True)
            if recipe.largest_of is not None:
                of = [at.get(self.places.other(recipe.largest_of, row), index) for index, row in enumerate(needed)]
                largest = largest[of]
            return least_p(rows, knobs["min_p"], largest)
        if step == TOP_K:
            return first_k(rows, knobs["top_k"])
        return first_p(rows, knobs["top_p"], exclusive=recipe.exclusive)

    def _penalised(self, step: str, rows: Tensor, needed: list[int], knobs: Knobs, recipe: RuleRecipe) -> Tensor:
        values = knobs[step.replace(" ", "_")][:, 0].tolist()
        counted = [recipe.count(self.counted[row]) for row in needed]
        each = zip(rows, values, counted, strict=True)
        return torch.stack([penalised(step, row, value, *tokens) for row, value, tokens in each])

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
    output = contexts.output(asked.judged.rows[place.node])
    drafted = 0 if place.node == ROOT else int(asked.step.tree.depth[place.node])
    ends, made = [], len(asked.step.visit.request.earlier() or ())
    for part in asked.step.visit.request.steps:
        made += part.emitted
        if part.emitted:
            ends.append(made - 1)
    committed = len(output) - drafted
    prompt = contexts.text[: contexts.prompt_len]
    return Counted(tuple(prompt), tuple(output[:committed]), tuple(ends), tuple(output[committed:]))


# The ways that are searched: one change of the rules each, and at which tokens it is at work

Changed = Callable[[RuleRecipe], RuleRecipe]
ROWS = "rows"  # the operation of taking another row
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NODE, BONUS, RECOVERED, TARGET = "node", "bonus", "recovered", "target"  # kinds of items


@dataclass(frozen=True)
class RuleChange:
    """One change of the rules."""

    name: str  # "top-p left out"
    operation: str  # "top-p"
    of: Changed = lambda recipe: recipe
    row: Relation | None = None  # whose p it is
    fitted: bool = False  # whether a number in it was fitted: then it must explain nearly all


@dataclass(frozen=True)
class Scope:
    """At which tokens a change is at work."""

    name: str  # "below the root alone"; "" for everywhere
    holds: Callable[[str, int], bool]  # of a kind of item, and the node of its row


EVERYWHERE = Scope("", lambda kind, node: True)
SCOPES = (
    EVERYWHERE,
    Scope("for the bonus token alone", lambda kind, node: kind == BONUS),
    Scope("for the recovered token alone", lambda kind, node: kind == RECOVERED),
    Scope("for final tokens alone", lambda kind, node: kind != NODE),
    Scope("for drafted tokens alone", lambda kind, node: kind == NODE),
    Scope("below the root alone", lambda kind, node: node != ROOT),
    Scope("at the root alone", lambda kind, node: node == ROOT),
)


def _set(**fields: Any) -> Changed:  # noqa: ANN401
    """Fields of a recipe in another way."""
    return lambda recipe: replace(recipe, **fields)


def _more(name: str, *items: tuple[str, Any]) -> Changed:
    """Entries of a recipe beside those that it has."""
    return lambda recipe: replace(recipe, **{name: (*getattr(recipe, name), *items)})  # type: ignore[arg-type]


def _steps(change: Callable[[Sequence[str]], Sequence[str]]) -> Changed:
    return lambda recipe: replace(recipe, steps=tuple(change(recipe.steps)))


def _without(*rules: str) -> Changed:
    return _steps(lambda steps: [step for step in steps if step not in rules])


def _twice(*rules: str) -> Changed:
    """The rules again, all of them behind the last one."""

    def again(steps: Sequence[str]) -> Sequence[str]:
        places = [place for place, step in enumerate(steps) if step in rules]
        end = places[-1] + 1 if places else 0
        return [*steps[:end], *(steps[place] for place in places), *steps[end:]]

    return _steps(again)


def _moved(rule: str, to: str, *, behind: bool) -> Changed:
    """A rule moved to before another, or behind it."""

    def move(steps: Sequence[str]) -> Sequence[str]:
        if rule not in steps or to not in steps:
            return steps
        rest = [step for step in steps if step != rule]
        place = rest.index(to) + behind
        return [*rest[:place], rule, *rest[place:]]

    return _steps(move)


def knob(name: str, change: Callable[[Tensor], Tensor]) -> Changed:
    """A parameter's value changed at every row."""
    return _more("knobs", (name, change))


def times(by: float) -> Callable[[Tensor], Tensor]:
    """A value scaled."""
    return lambda value: value * by


def _whole(c: Counted) -> tuple[int, ...]:
    return (*c.output, *c.path)


COUNTS: tuple[tuple[str, Count], ...] = (  # what penalties count
    ("count the prompt as output", lambda c: (c.prompt, (*c.prompt, *_whole(c)))),
    ("count each token of the output once", lambda c: (c.prompt, tuple(set(_whole(c))))),
    ("count only the last token of each step", lambda c: (c.prompt, (*c.final, *c.path))),
    ("do not count the drafted tokens on the path", lambda c: (c.prompt, c.output)),
    ("count the drafted tokens on the path twice", lambda c: (c.prompt, (*_whole(c), *c.path))),
    ("count accepted tokens twice", lambda c: (c.prompt, (*_whole(c), *c.accepted))),
    ("count accepted tokens and the path twice", lambda c: (c.prompt, (*_whole(c), *c.accepted, *c.path))),
    ("do not count the last committed token", lambda c: (c.prompt, (*c.output[:-1], *c.path))),
    ("do not count the last token before the row", lambda c: (c.prompt, _whole(c)[:-1])),
    ("count only the drafted tokens on the path", lambda c: (c.prompt, c.path)),
    ("do not count the prompt", lambda c: ((), _whole(c))),
    ("do not count the output", lambda c: (c.prompt, ())),
)


def _together(active: Sequence[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Rules that may go wrong together: in words, the operation, and they themselves."""
    penalties, cuts = ([rule for rule in active if rule in group] for group in (PENALTIES, CUTS))
    for rule in active:
        yield rule, rule, (rule,)
    if len(penalties) > 1:
        yield "the penalties", "penalties", tuple(penalties)
    if penalties and BIAS in active:
        yield "the logit bias and the penalties", "penalties", (BIAS, *penalties)
    if len(cuts) > 1:
        yield ", ".join(cuts), cuts[-1], tuple(cuts)


def _left_out_or_doubled(active: Sequence[str]) -> Iterator[RuleChange]:
    for words, operation, rules in _together(active):
        yield RuleChange(f"{words} left out", operation, _without(*rules))
    cuts = [rule for rule in active if rule in CUTS]
    if cuts and TEMPERATURE in active:
        yield RuleChange("the temperature and what follows left out", TEMPERATURE, _without(TEMPERATURE, *CUTS))
    if len(active) > 1:
        yield RuleChange("all rules left out", "rules", _without(*ORDER))
    for words, operation, rules in _together(active):
        yield RuleChange(f"{words} applied twice", operation, _twice(*rules))
    if cuts:
        yield RuleChange(
            f"{', '.join(cuts)} applied before the temperature and again after it",
            cuts[-1],
            _steps(lambda steps: [x for step in steps for x in ((*cuts, step) if step == TEMPERATURE else (step,))]),
        )


def _reordered(active: Sequence[str]) -> Iterator[RuleChange]:
    """Each rule at each other place among those that are active."""
    seen = {tuple(rule for rule in ORDER if rule in active)}
    if len(cuts := [rule for rule in active if rule in CUTS]) > 1 and TEMPERATURE in active:
        name = f"{', '.join(cuts)} before the temperature"
        yield RuleChange(name, cuts[-1], _moved(TEMPERATURE, cuts[-1], behind=True))
        seen.add((*(rule for rule in ORDER if rule in active and rule not in (TEMPERATURE, *CUTS)), *cuts, TEMPERATURE))
    for rule in (*reversed(CUTS), *PENALTIES, BIAS, FORM, TEMPERATURE):
        own = ORDER.index(rule)
        for place, to in enumerate(ORDER) if rule in active else ():
            if to == rule or to not in active:
                continue
            change = _moved(rule, to, behind=place > own)
            order = tuple(step for step in change(RIGHT).steps if step in active)
            if order not in seen:
                seen.add(order)
                yield RuleChange(f"{rule} {'after' if place > own else 'before'} {to}", rule, change)


def _values(rows: RuledRows, active: Sequence[str]) -> Iterator[RuleChange]:
    """Parameters that are off, or another row's."""
    if TEMPERATURE in active:
        yield RuleChange("the inverse of the temperature", TEMPERATURE, knob("temperature", lambda t: 1 / t))
    if TOP_K in active:
        for words, by in (("one token more", 1), ("one token less", -1)):
            yield RuleChange(f"top-k with {words}", TOP_K, knob("top_k", _shifted(by)))
    if TOP_P in active:
        yield RuleChange("top-p without the token that reaches it", TOP_P, _set(exclusive=True))
    for relation in (FIRST, ROOT_ROW, PARENT, *OF_REQUESTS[:2], BEFORE) if MIN_P in active else ():
        yield RuleChange(f"min-p by the largest p of {relation.name}", MIN_P, _set(largest_of=relation))
    names = [name for name, values in rows.knobs.items() if bool((values != values[0]).any())]
    for relation in OF_REQUESTS if names else ():
        every = _more("knobs_of", *((name, relation) for name in names))
        yield RuleChange(f"the parameters of {relation.name}", "parameters", every)
        for name in names if len(names) > 1 else ():
            words = name.replace("_p", "-p").replace("top_k", TOP_K).replace("_penalty", " penalty").replace("_", " ")
            yield RuleChange(f"the {words} of {relation.name}", words, _more("knobs_of", (name, relation)))


def _shifted(by: int) -> Callable[[Tensor], Tensor]:
    return lambda k: torch.where(k > 0, (k + by).clamp(min=1), k)


def changes(rows: RuledRows) -> list[RuleChange]:
    """All changes of one kind that can matter to these rows; the simplest first."""
    active = [] if rows.what.startswith("raw") else [rule for rule in ORDER if rows.active(rule)]
    made = [*_left_out_or_doubled(active), *_values(rows, active)]
    penalties = [rule for rule in active if rule in PENALTIES]
    for name, count in COUNTS if penalties or FORM in active else ():
        operation = penalties[0] if len(penalties) == 1 else "penalties"
        made.append(RuleChange(f"penalties that {name}", operation, _set(count=count)))
    made += _reordered(active)
    has_rules = bool(made)
    made += [RuleChange(f"the row of {relation.name}", ROWS, row=relation) for relation in OTHERS]
    for relation in OTHERS if has_rules else ():
        if relation is not CHILD:
            name = f"the logits of {relation.name} under its own rules"
            made.append(RuleChange(name, ROWS, _set(logits_of=relation)))
    words = {LOGITS: "the logits", "scores": "the scores before the softmax", SOFTMAX: "the softmax", "p": rows.what}
    for name, dtype in DTYPES.items():
        for what, named in words.items():
            operation = LOGITS if what == LOGITS else SOFTMAX
            made.append(RuleChange(f"{named} in {name}", operation, _more("rounded", (what, dtype))))
    return made


@dataclass(frozen=True)
class Dial:
    """A change with a number that is fitted to what was recorded."""

    words: str
    operation: str
    of: Callable[[float], Changed]
    values: Sequence[float]  # that are tried first, ascending

    def change(self, value: float) -> RuleChange:
        """It with a number."""
        return RuleChange(self.words.format(value), self.operation, self.of(value), fitted=True)


def cut(first: int) -> RuleChange:
    """A choice among the first tokens only."""
    return RuleChange(f"a choice among the first {first:,} tokens only", LOGITS, _set(first=first))


def _spaced(low: float, high: float, count: int) -> list[float]:
    return torch.logspace(torch.tensor(low).log10(), torch.tensor(high).log10(), count, dtype=torch.float64).tolist()


def dials(rows: RuledRows) -> list[Dial]:
    """What has a number in it. One temperature for all requests is another thing where these have several."""
    made = [
        Dial("the logits times {:.3g}", LOGITS, lambda x: _set(scale=x), _spaced(0.1, 10.0, 41)),
        Dial("a soft cap of {:.3g} on the logits", LOGITS, lambda x: _set(cap=x), _spaced(1.0, 100.0, 31)),
    ]
    if rows.what.startswith("raw"):
        return made
    heats = rows.knobs["temperature"]
    if bool((heats != heats[0]).any()):
        at: Callable[[float], Changed] = lambda x: knob("temperature", lambda t: torch.full_like(t, x))  # noqa: E731
        made.insert(0, Dial("a temperature of {:.3g}", TEMPERATURE, at, _spaced(0.05, 5.0, 41)))
    scaled: Callable[[float], Changed] = lambda x: knob("temperature", times(x))  # noqa: E731
    return [Dial("the temperature times {:.3g}", TEMPERATURE, scaled, _spaced(0.1, 10.0, 41)), *made]
