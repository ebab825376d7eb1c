"""The ways of sampling that are searched: one change of the rules each, and at which tokens it is at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
