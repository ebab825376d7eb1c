"""The sampling parameters once more under named mistakes: p, or q, made of the model's true logits in a wrong way.

First another row is tried: of the same engine step, or of the request's step before. Then each mistake in the
parameters: whether it gives what was recorded, and how many drafted tokens it leaves wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import RERUN, Suspect
from specscope.analyze.diagnose.rerun.match import slack
from specscope.analyze.diagnose.rerun.rows import Asked, Rows, around, differing
from specscope.analyze.findings import Reference
from specscope.trace.history.wording import plural
from specscope.trace.record.limits import unknown_limits
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.tree import ROOT, Drawn

STEPS = 24  # that differ, and as many others
GAIN = 0.5  # of the nodes that differ, how many a mistake must explain
EVERY = 0.9  # the same for a temperature, of which some value fits part of anything
ENOUGH = 3  # nodes
TELLING = 0.98  # a probability below this fits another row by no chance: a small one within a few per cent
ALIKE = 0.02  # of a small probability, on the scale of logs
Node = tuple[str, int, int]  # request, step, node
Change = Callable[[SamplingParams], SamplingParams]
Output = Callable[[Step, Sequence[int], Sequence[int], int], Sequence[int]]  # of prompt, output, drafted tokens of it


@dataclass(frozen=True)
class RuleMistake:
    """How probabilities are made of logits, by mistake or as they should be."""

    name: str
    cause: Cause = Cause.RULES_WRONG
    params: Change = lambda params: params
    below: bool = False  # whether the changed parameters hold below the root alone
    cut_first: bool = False  # whether top-k, top-p and min-p come before the temperature
    output: Output = field(default=lambda step, prompt, output, drafted: output)  # what penalties count
    row: Callable[[Asked, int], int] = field(default=lambda asked, node: node)


def _with(**values: float) -> Change:
    return lambda params: replace(params, **values)  # type: ignore[arg-type]


def _these(params: SamplingParams) -> Change:
    return lambda _: params


def _temperature(change: Callable[[float], float]) -> Change:
    return lambda params: params if params.greedy else replace(params, temperature=change(params.temperature))


def _above(asked: Asked, node: int) -> int:
    return node if node == ROOT else int(asked.step.tree.parent[node])


def _last_of_each_step(step: Step, prompt: Sequence[int], output: Sequence[int], drafted: int) -> Sequence[int]:
    """Only the final token of each earlier step, and the drafted tokens."""
    ends, made = [], 0
    for part in step.visit.request.steps:
        made += part.emitted
        if part.emitted and made <= len(output) - drafted:
            ends.append(made - 1)
    return [*(output[end] for end in ends), *output[len(output) - drafted :]]


OFF_PATH, OTHER = Cause.RULES_OFF_PATH, Cause.P_OTHER_ROW
RIGHT = RuleMistake("as it should be")
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
SHARED = (  # mistakes in p and in q alike
    RuleMistake("the temperature applied twice", params=_temperature(lambda t: t * t)),
    RuleMistake("temperature 1", params=_temperature(lambda t: 1.0)),
    RuleMistake("the inverse of the temperature", params=_temperature(lambda t: 1 / t)),
    RuleMistake("top-k, top-p and min-p before the temperature", cut_first=True),
    RuleMistake("no top-p", params=_with(top_p=1.0)),
    RuleMistake("no top-k", params=_with(top_k=0)),
    RuleMistake("no min-p", params=_with(min_p=0.0)),
    RuleMistake("no logit bias", params=lambda params: replace(params, logit_bias={})),
    RuleMistake("no repetition penalty", params=_with(repetition_penalty=1.0)),
    RuleMistake("no presence penalty", params=_with(presence_penalty=0.0)),
    RuleMistake("no frequency penalty", params=_with(frequency_penalty=0.0)),
    RuleMistake("no penalties", params=_with(**NO_PENALTIES)),
    RuleMistake(
        "no penalties and no logit bias",
        params=lambda params: replace(params, logit_bias={}, **NO_PENALTIES),  # type: ignore[arg-type]
    ),
)
OF_P = (
    RuleMistake("p of the node's grandparent", OTHER, row=_above),
    RuleMistake("p of the root for all nodes", OTHER, row=lambda asked, node: ROOT),
    *SHARED,
    RuleMistake(
        "penalties that count the prompt as output", output=lambda step, prompt, output, drafted: [*prompt, *output]
    ),
    RuleMistake(
        "penalties that count each token of the output once",
        output=lambda step, prompt, output, drafted: [*set(output)],
    ),
    RuleMistake("penalties that count only the last token of each step", output=_last_of_each_step),
    RuleMistake(
        "penalties that do not count the drafted tokens on the path",
        OFF_PATH,
        output=lambda step, prompt, output, drafted: output[: len(output) - drafted],
    ),
    RuleMistake("no top-p below the root", OFF_PATH, params=_with(top_p=1.0), below=True),
    RuleMistake("no top-k below the root", OFF_PATH, params=_with(top_k=0), below=True),
    RuleMistake("no min-p below the root", OFF_PATH, params=_with(min_p=0.0), below=True),
    RuleMistake("temperature 1 below the root", OFF_PATH, params=_temperature(lambda t: 1.0), below=True),
)
OF_Q = (
    RuleMistake("q of the node's grandparent", Cause.Q_OTHER_ROW, row=_above),
    RuleMistake("q of the root for all nodes", Cause.Q_OTHER_ROW, row=lambda asked, node: ROOT),
    *(replace(mistake, cause=Cause.Q_TEMPERATURE) for mistake in SHARED[:3]),
    *(replace(mistake, cause=Cause.RULES_WRONG) for mistake in SHARED[3:]),
)
TEMPERATURES = tuple(np.exp(np.linspace(np.log(0.2), np.log(5.0), 81)).tolist())  # 4 % apart


def _always(value: float) -> Change:
    return _temperature(lambda _: value)


AT_EACH = tuple(
    RuleMistake(f"temperature {value:.2g}", Cause.Q_TEMPERATURE, params=_always(value)) for value in TEMPERATURES
)


@dataclass(frozen=True)
class JudgedTokens:
    """What was recorded of drafted tokens, and what the model's rows make of it."""

    what: str  # p, q
    asked: Sequence[Asked]
    allowed: float

    def nodes(self) -> Iterator[tuple[Asked, int, int, float]]:
        """(a step with the model's rows, a parent, its child, what was recorded of the child)."""
        for asked in self.asked:
            tree, verdict = asked.step.tree, asked.step.verdict
            for parent in asked.logits:
                for child in tree.children(parent):
                    if self.what == "p":
                        yield asked, parent, child, float(verdict.p[child])
                    elif tree.drawn[child] != Drawn.DETERMINISTIC:
                        yield asked, parent, child, float(tree.q[child])

    def fits(self, mistake: RuleMistake) -> dict[Node, bool]:
        """Whether the mistake gives what was recorded of each drafted token."""
        results: dict[Node, bool] = {}
        rows: dict[tuple[int, int], Tensor] = {}
        for asked, parent, child, recorded in self.nodes():
            row = mistake.row(asked, parent)
            if row not in asked.logits:
                continue
            key = id(asked), parent
            if key not in rows:
                rows[key] = probabilities(asked, row, mistake, below=parent != ROOT, what=self.what)
            off = abs(float(rows[key][int(asked.step.tree.token[child])]) - recorded)
            results[(*asked.step.key, child)] = off <= self.allowed
        return results


def rule_mistakes(case: Case, audit: Audit, rows: Rows, *, drafter: bool = False) -> list[Suspect]:
    """Other rows or mistakes that give the recorded p, or q, of drafted tokens."""
    what = "q" if drafter else "p"
    keys = differing(audit, ["draft p" if drafter else "target p"], STEPS)
    wrong = set(keys)
    free = [step for step in case.drafting if step.params is not None and not _is_limited(step)]
    others = [step for step in free if step.key not in wrong]
    steps = [*(step for step in free if step.key in wrong), *_some(others)]
    asked = rows(case, steps)
    judged = JudgedTokens(what, asked, slack(case.dtype))
    right = judged.fits(RIGHT)
    bad = {key for key, fits in right.items() if not fits}
    if not bad:
        return []
    if suspect := _another_row(case, judged, bad, rows):
        return [suspect]
    # An intermittent mistake spoils steps in which it was not at work: so it is also tried on those that differ alone
    at_work = {key[:2] for key in bad}
    alone = replace(judged, asked=[rows_of_step for rows_of_step in asked if rows_of_step.step.key in at_work])
    right_there = {key: fits for key, fits in right.items() if key[:2] in at_work}
    for some, as_it_is in ((judged, right), (alone, right_there)):
        suspects = _best(some, as_it_is, bad, OF_Q if drafter else OF_P)
        if suspects := suspects or (_temperatures(some, as_it_is, bad) if drafter else []):
            return suspects
    return []


def _is_limited(step: Step) -> bool:
    """Whether a grammar, or a limit that cannot be computed again, decides which tokens the request may have."""
    info = step.visit.request.info
    return info is not None and (info.params.limited or bool(unknown_limits(info.params, info.labels)))


def _some(steps: Sequence[Step]) -> Sequence[Step]:
    return steps[:: max(1, len(steps) // STEPS)][:STEPS]


def _best(
    judged: JudgedTokens, right: dict[Node, bool], bad: set[Node], mistakes: Sequence[RuleMistake]
) -> list[Suspect]:
    """The mistake that explains the most nodes that differ, less those that it spoils of the others."""
    suspects, best = list[Suspect](), 0.0
    for mistake in mistakes:
        fits = judged.fits(mistake)
        spoiled = sum(right[key] and not yes for key, yes in fits.items())
        explained = sum(fits.get(key, False) for key in bad)
        gain = (explained - spoiled) / len(bad)
        if gain <= (EVERY if mistake.cause is Cause.Q_TEMPERATURE else GAIN) or gain < best + 1e-9:
            continue  # of several that explain equally much the first is the simplest
        best = gain
        others = len(right) - len(bad)
        line = (
            f"{judged.what} comes out with {mistake.name} at {explained:,} of the {len(bad):,} drafted tokens whose "
            f"{judged.what} is wrong, and stays right at {others - spoiled:,} of {others:,} others"
        )
        example = _first(judged, bad)
        suspects = [Suspect(mistake.cause, RERUN + 0.1 * gain, (line,), example=example, rerun=True)]
    return suspects


def _temperatures(judged: JudgedTokens, right: dict[Node, bool], bad: set[Node]) -> list[Suspect]:
    """One temperature that gives the recorded q."""
    wide = replace(judged, allowed=max(judged.allowed, 0.02))  # the grid is 4 % wide
    return _best(wide, right, bad, AT_EACH)


def _another_row(case: Case, judged: JudgedTokens, bad: set[Node], rows: Rows) -> Suspect | None:
    """Whether what was recorded is what another row gives: of another request, another node, or the step before."""
    places = sorted({(request, step) for request, step, _ in bad})
    beside = rows(case, around(case, places))
    counts = {"another request of the same step": 0, "another node of the same tree": 0, "the request's step before": 0}
    known, example = 0, None
    for asked, parent, child, recorded in judged.nodes():
        step = asked.step
        if (*step.key, child) not in bad or not _is_telling(recorded, step.params):
            continue
        known += 1
        where = _where(asked, parent, child, recorded, beside, judged)
        if where:
            counts[where] += 1
            example = example or step.reference(child)
    if judged.what == "p":
        known += _finals_elsewhere(judged, beside, counts)
    name, count = max(counts.items(), key=lambda item: item[1])
    if known < ENOUGH or sum(counts.values()) <= GAIN * known:
        return None
    p_cause = Cause.ROWS_SWAPPED if name == "another request of the same step" else Cause.P_OTHER_ROW
    cause = p_cause if judged.what == "p" else Cause.Q_OTHER_ROW
    lines = (
        f"{judged.what} is not that of its own row at {plural(len(bad), 'node')}; {known:,} of them tell whose it is",
        f"it is that of {name} at {count:,} of these",
    )
    return Suspect(cause, RERUN + 0.1 * count / known, lines, example=example, rerun=True)


def _finals_elsewhere(judged: JudgedTokens, beside: Sequence[Asked], counts: dict[str, int]) -> int:
    """Count whose choice greedy final tokens are that are not their own row's; return how many such there are."""
    known = 0
    for asked in judged.asked:
        step, leaf = asked.step, asked.judged.leaf
        if step.params is None or not step.params.greedy or leaf not in asked.logits:
            continue
        token = step.verdict.token
        if _choice(asked, leaf) == token:
            continue
        known += 1
        rows = [(asked, node, "another node of the same tree") for node in asked.logits if node != leaf]
        for other in beside:
            if other.step.visit.record.step == step.visit.record.step and other.step.request != step.request:
                rows += [(other, node, "another request of the same step") for node in other.logits]
            elif step.last is not None and other.step.part is step.last.part:
                rows += [(other, node, "the request's step before") for node in other.logits]
        name = next((name for other, node, name in rows if _choice(other, node) == token), "")
        if name:
            counts[name] += 1
    return known


def _choice(asked: Asked, node: int) -> int:
    return int(probabilities(asked, node, RIGHT, below=node != ROOT).argmax())


def _is_telling(recorded: float, params: SamplingParams | None) -> bool:
    """Whether a match with another row would be no chance: a middling probability; where greedy, the choice itself."""
    if params is not None and params.greedy:
        return recorded == 1
    return 1e-12 < recorded < TELLING


def _alike(p: float, recorded: float, allowed: float) -> bool:
    """Whether two probabilities are the same: small ones are compared by their ratio, as all small ones are close."""
    if recorded > 100 * allowed:
        return abs(p - recorded) <= allowed
    return p > 0 and abs(math.log(p / recorded)) < ALIKE


def _where(
    asked: Asked, parent: int, child: int, recorded: float, beside: Sequence[Asked], judged: JudgedTokens
) -> str:
    """Whose row gives the recorded probability of a node; "" for none."""
    step, token = asked.step, int(asked.step.tree.token[child])
    candidates = [(asked, node, "another node of the same tree") for node in asked.logits if node != parent]
    for other in beside:
        if other.step.visit.record.step == step.visit.record.step and other.step.request != step.request:
            candidates += [(other, node, "another request of the same step") for node in other.logits]
        elif step.last is not None and other.step.part is step.last.part:
            candidates += [(other, node, "the request's step before") for node in other.logits]
    for other, node, name in candidates:
        own_params, other_params = params_of(asked, judged.what), params_of(other, judged.what)
        for params in (own_params,) if own_params == other_params else (own_params, other_params):
            mistake = replace(RIGHT, params=_these(params))
            p = probabilities(other, node, mistake, below=node != ROOT, what=judged.what)
            if token < len(p) and _alike(float(p[token]), recorded, judged.allowed):
                return name
    return ""


def params_of(asked: Asked, what: str) -> SamplingParams:
    """The parameters by which p, or q, is made of logits; for q they depend on the engine."""
    return asked.contexts.drafter_params if what == "q" else asked.contexts.params


def _first(judged: JudgedTokens, bad: set[Node]) -> Reference | None:
    """Where the first of these nodes is."""
    for asked, _, child, _ in judged.nodes():
        if (*asked.step.key, child) in bad:
            return asked.step.reference(child)
    return None


def probabilities(asked: Asked, node: int, mistake: RuleMistake, *, below: bool, what: str = "p") -> Tensor:
    """[V] the distribution from which the token after a node is sampled."""
    contexts, given = asked.contexts, params_of(asked, what)
    params = given if mistake.below and not below else mistake.params(given)
    prompt, output = contexts.text[: contexts.prompt_len], contexts.output(asked.judged.rows[node])
    drafted = 0 if node == ROOT else int(asked.step.tree.depth[node])
    counted = mistake.output(asked.step, prompt, output, drafted)
    rules = Rules(params, prompt)
    shaped = rules.shaped(asked.logits[node][None], [counted] if params.penalised else ())
    if params.greedy:
        p = shaped[0].new_zeros(shaped.shape[1])
        p[int(shaped[0].argmax())] = 1
        return p
    if mistake.cut_first:
        cut = Rules(replace(params, temperature=1.0), prompt).scores(shaped)
        return Rules(replace(params, top_k=0, top_p=1.0, min_p=0.0), prompt).scores(cut).softmax(-1)[0]
    return rules.scores(shaped).softmax(-1)[0]
