"""The ways of sampling that are searched: one change of the rules each, and at which tokens it is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specscope.analyze.audit.model.rules import PENALTIES
from specscope.analyze.locate.model.other_rows import (
    BEFORE,
    CHILD,
    FIRST,
    OF_REQUESTS,
    OTHERS,
    PARENT,
    ROOT_ROW,
    Relation,
)
from specscope.analyze.locate.model.sampling import (
    BIAS,
    CUTS,
    FORM,
    LOGITS,
    MIN_P,
    ORDER,
    RIGHT,
    SOFTMAX,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Count,
    Counted,
    RuledRows,
    RuleRecipe,
)
from specscope.trace.record.tree import ROOT

ROWS = "rows"  # the operation of taking another row
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NODE, BONUS, RECOVERED, TARGET = "node", "bonus", "recovered", "target"  # kinds of items


@dataclass(frozen=True)
class RuleChange:
    """One change of the rules."""

    name: str  # "top-p left out"
    operation: str  # "top-p"
    of: Callable[[RuleRecipe], RuleRecipe] = lambda recipe: recipe
    row: Relation | None = None  # whose p it is
    off_path: bool = False  # whether it forgets the tokens on a node's path
    fitted: bool = False  # whether a number in it was fitted: then it must explain nearly all


@dataclass(frozen=True)
class Scope:
    """At which tokens a change is at work."""

    name: str  # "below the root alone"; "" for everywhere
    holds: Callable[[str, int], bool]  # of a kind of item, and the node of its row


EVERYWHERE = Scope("", lambda kind, node: True)
BELOW = Scope("below the root alone", lambda kind, node: node != ROOT)
SCOPES = (
    EVERYWHERE,
    Scope("for the bonus token alone", lambda kind, node: kind == BONUS),
    Scope("for the recovered token alone", lambda kind, node: kind == RECOVERED),
    Scope("for final tokens alone", lambda kind, node: kind != NODE),
    Scope("for drafted tokens alone", lambda kind, node: kind == NODE),
    BELOW,
    Scope("at the root alone", lambda kind, node: node == ROOT),
)


def _steps(change: Callable[[Sequence[str]], Sequence[str]]) -> Callable[[RuleRecipe], RuleRecipe]:
    return lambda recipe: replace(recipe, steps=tuple(change(recipe.steps)))


def _without(*rules: str) -> Callable[[RuleRecipe], RuleRecipe]:
    return _steps(lambda steps: [step for step in steps if step not in rules])


def _twice(*rules: str) -> Callable[[RuleRecipe], RuleRecipe]:
    """The rules again, all of them behind the last one."""

    def again(steps: Sequence[str]) -> Sequence[str]:
        places = [place for place, step in enumerate(steps) if step in rules]
        end = places[-1] + 1 if places else 0
        return [*steps[:end], *(steps[place] for place in places), *steps[end:]]

    return _steps(again)


def _moved(rule: str, to: str, *, behind: bool) -> Callable[[RuleRecipe], RuleRecipe]:
    """A rule moved to before another, or behind it."""

    def move(steps: Sequence[str]) -> Sequence[str]:
        if rule not in steps or to not in steps:
            return steps
        rest = [step for step in steps if step != rule]
        place = rest.index(to) + behind
        return [*rest[:place], rule, *rest[place:]]

    return _steps(move)


def _counting(count: Count) -> Callable[[RuleRecipe], RuleRecipe]:
    return lambda recipe: replace(recipe, count=count)


def knob(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[RuleRecipe], RuleRecipe]:
    """A parameter's value changed at every row."""
    return lambda recipe: replace(recipe, knobs=(*recipe.knobs, (name, change)))


def _knobs_of(relation: Relation, *names: str) -> Callable[[RuleRecipe], RuleRecipe]:
    return lambda recipe: replace(recipe, knobs_of=(*recipe.knobs_of, *((name, relation) for name in names)))


def _rounded(what: str, dtype: torch.dtype) -> Callable[[RuleRecipe], RuleRecipe]:
    return lambda recipe: replace(recipe, rounded=(*recipe.rounded, (what, dtype)))


def _whole(c: Counted) -> tuple[int, ...]:
    return (*c.output, *c.path)


COUNTS: tuple[tuple[str, Count, bool], ...] = (  # and whether it forgets the path
    ("that count the prompt as output", lambda c: (c.prompt, (*c.prompt, *_whole(c))), False),
    ("that count each token of the output once", lambda c: (c.prompt, tuple(set(_whole(c)))), False),
    ("that count only the last token of each step", lambda c: (c.prompt, (*c.final, *c.path)), False),
    ("that do not count the drafted tokens on the path", lambda c: (c.prompt, c.output), True),
    ("that count the drafted tokens on the path twice", lambda c: (c.prompt, (*_whole(c), *c.path)), False),
    ("that count accepted tokens twice", lambda c: (c.prompt, (*_whole(c), *c.accepted)), False),
    ("that count accepted tokens and the path twice", lambda c: (c.prompt, (*_whole(c), *c.accepted, *c.path)), False),
    ("that do not count the last committed token", lambda c: (c.prompt, (*c.output[:-1], *c.path)), False),
    ("that do not count the last token before the row", lambda c: (c.prompt, _whole(c)[:-1]), False),
    ("that count only the drafted tokens on the path", lambda c: (c.prompt, c.path), False),
    ("that do not count the prompt", lambda c: ((), _whole(c)), False),
    ("that do not count the output", lambda c: (c.prompt, ()), False),
)


def _left_out(active: Sequence[str]) -> Iterator[RuleChange]:
    for rule in active:
        yield RuleChange(f"{rule} left out", rule, _without(rule))
    penalties, cuts = ([rule for rule in active if rule in group] for group in (PENALTIES, CUTS))
    if len(penalties) > 1:
        yield RuleChange("the penalties left out", "penalties", _without(*penalties))
    if penalties and BIAS in active:
        yield RuleChange("the penalties and the logit bias left out", "penalties", _without(BIAS, *penalties))
    if len(cuts) > 1:
        yield RuleChange(f"{', '.join(cuts)} left out", cuts[-1], _without(*cuts))
    if cuts and TEMPERATURE in active:
        yield RuleChange("the temperature and what follows left out", TEMPERATURE, _without(TEMPERATURE, *CUTS))
    if len(active) > 1:
        yield RuleChange("all rules left out", "rules", _without(*ORDER))


def _doubled(active: Sequence[str]) -> Iterator[RuleChange]:
    for rule in active:
        yield RuleChange(f"{rule} applied twice", rule, _twice(rule))
    if len(penalties := [rule for rule in active if rule in PENALTIES]) > 1:
        yield RuleChange("the penalties applied twice", "penalties", _twice(*penalties))
    if penalties and BIAS in active:
        yield RuleChange("the logit bias and the penalties applied twice", "penalties", _twice(BIAS, *penalties))
    if cuts := [rule for rule in active if rule in CUTS]:
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
        yield RuleChange("top-p without the token that reaches it", TOP_P, lambda r: replace(r, exclusive=True))
    if MIN_P in active:
        for relation in (FIRST, ROOT_ROW, PARENT, *OF_REQUESTS[:2], BEFORE):
            yield RuleChange(f"min-p by the largest p of {relation.name}", MIN_P, _largest_of(relation))
    names = [name for name, values in rows.knobs.items() if bool((values != values[0]).any())]
    for relation in OF_REQUESTS if names else ():
        yield RuleChange(f"the parameters of {relation.name}", "parameters", _knobs_of(relation, *names))
        for name in names if len(names) > 1 else ():
            words = name.replace("_p", "-p").replace("top_k", TOP_K).replace("_penalty", " penalty").replace("_", " ")
            yield RuleChange(f"the {words} of {relation.name}", words, _knobs_of(relation, name))


def _shifted(by: int) -> Callable[[Tensor], Tensor]:
    return lambda k: torch.where(k > 0, (k + by).clamp(min=1), k)


def _largest_of(relation: Relation) -> Callable[[RuleRecipe], RuleRecipe]:
    return lambda recipe: replace(recipe, largest_of=relation)


def _logits_of(relation: Relation) -> Callable[[RuleRecipe], RuleRecipe]:
    return lambda recipe: replace(recipe, logits_of=relation)


def _counted(active: Sequence[str]) -> Iterator[RuleChange]:
    penalties = [rule for rule in active if rule in PENALTIES]
    if not penalties and FORM not in active:
        return
    what, operation = ("penalties", "penalties") if len(penalties) != 1 else (f"a {penalties[0]}", penalties[0])
    for name, count, off_path in COUNTS:
        verb = (
            name
            if len(penalties) != 1
            else name.replace("count", "counts", 1).replace("do not counts", "does not count")
        )
        yield RuleChange(f"{what} {verb}", operation, _counting(count), off_path=off_path)


def changes(rows: RuledRows) -> list[RuleChange]:
    """All changes of one kind that can matter to these rows; the simplest first."""
    active = [] if rows.what.startswith("raw") else [rule for rule in ORDER if rows.active(rule)]
    of_rules = [*_left_out(active), *_doubled(active), *_values(rows, active), *_counted(active), *_reordered(active)]
    others = [RuleChange(f"the row of {relation.name}", ROWS, row=relation) for relation in OTHERS]
    if of_rules:
        others += [
            RuleChange(f"the logits of {relation.name} under its own rules", ROWS, _logits_of(relation))
            for relation in OTHERS
            if relation is not CHILD
        ]
    return [*of_rules, *others, *_of_dtypes(rows)]


def _of_dtypes(rows: RuledRows) -> Iterator[RuleChange]:
    words = {LOGITS: "the logits", "scores": "the scores before the softmax", SOFTMAX: "the softmax", "p": rows.what}
    for name, dtype in DTYPES.items():
        for what, named in words.items():
            operation = LOGITS if what == LOGITS else SOFTMAX
            yield RuleChange(f"{named} in {name}", operation, _rounded(what, dtype))


@dataclass(frozen=True)
class Dial:
    """A change with a number that is fitted to what was recorded."""

    operation: str
    change: Callable[[float], RuleChange]
    values: Sequence[float]  # that are tried first, ascending
    fine: bool = True  # whether values between them make sense


def _scaled(factor: float) -> RuleChange:
    return RuleChange(
        f"the logits times {factor:.3g}", LOGITS, lambda recipe: replace(recipe, scale=factor), fitted=True
    )


def _heated(factor: float) -> RuleChange:
    name = f"the temperature times {factor:.3g}"
    return RuleChange(name, TEMPERATURE, knob("temperature", lambda t: t * factor), fitted=True)


def _at(value: float) -> RuleChange:
    name = f"a temperature of {value:.3g}"
    return RuleChange(name, TEMPERATURE, knob("temperature", lambda t: torch.full_like(t, value)), fitted=True)


def _capped(cap: float) -> RuleChange:
    return RuleChange(
        f"a soft cap of {cap:.3g} on the logits", LOGITS, lambda recipe: replace(recipe, cap=cap), fitted=True
    )


def cut(first: int) -> RuleChange:
    """A choice among the first tokens only."""
    name = f"a choice among the first {first:,} tokens only"
    return RuleChange(name, LOGITS, lambda recipe: replace(recipe, first=first))


def _spaced(low: float, high: float, count: int) -> list[float]:
    return torch.logspace(torch.tensor(low).log10(), torch.tensor(high).log10(), count, dtype=torch.float64).tolist()


def dials(rows: RuledRows) -> list[Dial]:
    """What has a number in it. One temperature for all requests is another thing where these have several."""
    raw = Dial(LOGITS, _scaled, _spaced(0.1, 10.0, 41)), Dial(LOGITS, _capped, _spaced(1.0, 100.0, 31))
    if rows.what.startswith("raw"):
        return [*raw]
    warm = bool((rows.knobs["temperature"] != rows.knobs["temperature"][0]).any())
    heats = [Dial(TEMPERATURE, _heated, _spaced(0.1, 10.0, 41))]
    return [*heats, *([Dial(TEMPERATURE, _at, _spaced(0.05, 5.0, 41))] if warm else []), *raw]
