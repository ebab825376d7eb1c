"""The sampling parameters once more under named mistakes: p from the target's true logits, applied otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from specscope.analyze.audit.audit import Audit
from specscope.analyze.audit.model.causal import Causal
from specscope.analyze.audit.model.rules import Rules
from specscope.analyze.diagnose.case import Case
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import RERUN, Suspect
from specscope.analyze.diagnose.rerun.match import slack
from specscope.analyze.diagnose.rerun.rows import Asked, ask, differing
from specscope.analyze.findings import Reference
from specscope.trace.params import SamplingParams
from specscope.trace.tree import ROOT

STEPS = 24  # that differ, and as many others
GAIN = 0.5  # of the nodes that differ a mistake must explain so many
Node = tuple[str, int, int]  # request, step, node
Change = Callable[[SamplingParams], SamplingParams]


@dataclass(frozen=True)
class Mistake:
    """How p is made of logits."""

    name: str
    cause: Cause = Cause.RULES_WRONG
    params: Change = lambda params: params
    below: bool = False  # whether the changed parameters hold below the root alone
    cut_first: bool = False  # whether top-k, top-p and min-p come before the temperature
    output: Callable[[Sequence[int], Sequence[int], int], Sequence[int]] = field(
        default=lambda prompt, output, drafted: output
    )
    row: Callable[[Asked, int], int] = field(default=lambda asked, node: node)


def _with(**values: float) -> Change:
    return lambda params: replace(params, **values)  # type: ignore[arg-type]


def _temperature(change: Callable[[float], float]) -> Change:
    return lambda params: params if params.greedy else replace(params, temperature=change(params.temperature))


def _above(asked: Asked, node: int) -> int:
    return node if node == ROOT else int(asked.step.tree.parent[node])


OFF_PATH, OTHER = Cause.RULES_OFF_PATH, Cause.P_OTHER_ROW
RIGHT = Mistake("as it should be")
MISTAKES = (
    Mistake("p of the node's grandparent", OTHER, row=_above),
    Mistake("p of the root for all nodes", OTHER, row=lambda asked, node: ROOT),
    Mistake("the temperature applied twice", params=_temperature(lambda t: t * t)),
    Mistake("temperature 1", params=_temperature(lambda t: 1.0)),
    Mistake("the inverse of the temperature", params=_temperature(lambda t: 1 / t)),
    Mistake("top-k, top-p and min-p before the temperature", cut_first=True),
    Mistake("no top-p", params=_with(top_p=1.0)),
    Mistake("no top-k", params=_with(top_k=0)),
    Mistake("no min-p", params=_with(min_p=0.0)),
    Mistake("no logit bias", params=lambda params: replace(params, logit_bias={})),
    Mistake("no repetition penalty", params=_with(repetition_penalty=1.0)),
    Mistake("no presence penalty", params=_with(presence_penalty=0.0)),
    Mistake("no frequency penalty", params=_with(frequency_penalty=0.0)),
    Mistake("no penalties", params=_with(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)),
    Mistake("penalties that count the prompt as output", output=lambda prompt, output, drafted: [*prompt, *output]),
    Mistake(
        "penalties that count each token of the output once", output=lambda prompt, output, drafted: [*set(output)]
    ),
    Mistake(
        "penalties that do not count the drafted tokens on the path",
        OFF_PATH,
        output=lambda prompt, output, drafted: output[: len(output) - drafted],
    ),
    Mistake("no top-p below the root", OFF_PATH, params=_with(top_p=1.0), below=True),
    Mistake("no top-k below the root", OFF_PATH, params=_with(top_k=0), below=True),
    Mistake("no min-p below the root", OFF_PATH, params=_with(min_p=0.0), below=True),
    Mistake("temperature 1 below the root", OFF_PATH, params=_temperature(lambda t: 1.0), below=True),
)


def rule_mistakes(case: Case, audit: Audit, model: Causal) -> list[Suspect]:
    """Mistakes under which the recorded p of drafted tokens comes out."""
    wrong = set(differing(audit, ["target p"], STEPS))
    free = [step for step in case.drafting if step.params is not None and not step.params.limited]  # of forms
    others = [step for step in free if (step.request, step.part.index) not in wrong]
    steps = [step for step in free if (step.request, step.part.index) in wrong]
    asked = ask(model, case, [*steps, *others[:: max(1, len(others) // STEPS)][:STEPS]])
    allowed = slack("" if case.history.run is None else case.history.run.dtype)
    right = _fits(asked, RIGHT, allowed)
    bad = {key for key, fits in right.items() if not fits}
    if not bad:
        return []
    found, best = [], 0.0
    example = _first(asked, bad)
    for mistake in MISTAKES:
        fits = _fits(asked, mistake, allowed)
        spoiled = sum(right[key] and not yes for key, yes in fits.items())
        explained = sum(fits[key] for key in bad)
        gain = (explained - spoiled) / len(bad)
        if gain <= GAIN or gain < best + 1e-9:
            continue  # of several that explain as much the first is the simplest
        best = gain
        said = (
            f"p comes out with {mistake.name} at {explained:,} of the {len(bad):,} drafted tokens whose p is wrong, "
            f"and stays right at {len(right) - len(bad) - spoiled:,} of {len(right) - len(bad):,} others"
        )
        found = [Suspect(mistake.cause, RERUN + 0.1 * gain, (said,), example=example)]
    return found


def _first(asked: Sequence[Asked], bad: set[Node]) -> Reference | None:
    """Where the first of them is."""
    nodes = ((one.step, node) for one in asked for node in range(len(one.step.tree)))
    return next((s.reference(n) for s, n in nodes if (s.request, s.part.index, n) in bad), None)


def _fits(asked: Sequence[Asked], mistake: Mistake, allowed: float) -> dict[Node, bool]:
    """Of each drafted token (request, step, node) whether its recorded p is what the mistake makes it."""
    found = {}
    for one in asked:
        tree, verdict = one.step.tree, one.step.verdict
        for parent in one.logits:
            children = tree.children(parent)
            row = mistake.row(one, parent)
            if not children or row not in one.logits:
                continue
            p = _p(one, row, mistake, below=parent != ROOT)
            for child in children:
                off = abs(float(p[int(tree.token[child])]) - float(verdict.p[child]))
                found[one.step.request, one.step.part.index, child] = off <= allowed
    return found


def _p(one: Asked, node: int, mistake: Mistake, *, below: bool) -> Tensor:
    """[V] what is sampled from behind a node."""
    contexts = one.contexts
    params = contexts.params if mistake.below and not below else mistake.params(contexts.params)
    prompt, output = contexts.text[: contexts.prompt_len], contexts.output(one.judged.rows[node])
    counted = mistake.output(prompt, output, 0 if node == ROOT else int(one.step.tree.depth[node]))
    rules = Rules(params, prompt)
    shaped = rules.shaped(one.logits[node][None], [counted] if params.penalised else ())
    if params.greedy:
        p = shaped[0].new_zeros(shaped.shape[1])
        p[int(shaped[0].argmax())] = 1
        return p
    if mistake.cut_first:
        cut = Rules(replace(params, temperature=1.0), prompt).scores(shaped)
        return Rules(replace(params, top_k=0, top_p=1.0, min_p=0.0), prompt).scores(cut).softmax(-1)[0]
    return rules.scores(shaped).softmax(-1)[0]
