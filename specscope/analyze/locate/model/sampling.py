"""Logits to p or q under a variant of the sampling rules: each rule a step, in an order, over the rows of some places.

The rules are audit's; what is changed is which of them, in what order, with whose parameters and over which tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from specscope.analyze.audit.contexts import Contexts
from specscope.analyze.audit.model.form import RequestForms
from specscope.analyze.audit.model.rules import PENALTIES, biased, first_k, first_p, least_p, penalised
from specscope.analyze.diagnose.rerun.rows import Asked
from specscope.analyze.locate.model.other_rows import Places, Relation, RowPlace
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT

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
        self.params = [_params(place.asked, place.plain, what) for place in places.every]
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


def _params(asked: Asked, plain: bool, what: str) -> SamplingParams:
    """The parameters by which a row is shaped. `plain`: it is thought of, not drawn from."""
    if what.startswith("raw"):
        return SamplingParams(temperature=1.0)
    contexts: Contexts = asked.contexts
    params = contexts.drafter_params if what == "q" else contexts.params
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
