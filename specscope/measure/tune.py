"""What `specscope tune` runs: the capture's own prompts to measure costs, and others to check the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import length_hint
from typing import Any

from specscope.analyze.audit.options import Progress
from specscope.analyze.tune.judged import TreeRow
from specscope.analyze.tune.tuning import Recorded, Tuning, expected
from specscope.engine.engine import Engine
from specscope.engine.prompts import PromptSpec, read_prompts
from specscope.measure.prompts import PLAIN, unseen_prompts
from specscope.measure.step_costs import PLAIN as NO_DRAFTER
from specscope.measure.step_costs import Timed, Work, cost_lanes, in_turn, lanes, middle
from specscope.plans.costs import Costs
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import RequestInfo

PROMPTS = 16  # that costs are measured with
LONGEST = 512  # last tokens of a prompt that are used: a prefill is not measured
COST_TOKENS = 48  # that each request generates
CHECK_PROMPTS = 12
CHECK_TOKENS = 64
EVERY = 6  # rounds of the trees for each one of the costs


def work_of(data: Recorded, batch: int) -> list[Work]:
    """Evenly chosen prompts of the captures, with their parameters; other prompts where the captures have no text."""
    some = _evenly([info for info in _infos(data) if len(info.prompt_tokens)], max(PROMPTS, 2 * batch))
    if not some:
        return [(prompt, _until(params_of(data), COST_TOKENS)) for prompt in PLAIN]
    return [(info.prompt_tokens[-LONGEST:].tolist(), _until(info.params, COST_TOKENS)) for info in some]


def params_of(data: Recorded) -> SamplingParams:
    infos = _infos(data)
    return infos[0].params if infos else SamplingParams()


def _infos(data: Recorded) -> list[RequestInfo]:
    requests = (request for history in data.histories for request in history.requests.values())
    return [request.info for request in requests if request.info is not None]


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    return list(items) if len(items) <= count else [items[i * len(items) // count] for i in range(count)]


def _until(params: SamplingParams, tokens: int) -> SamplingParams:
    """These parameters with nothing that ends the output early, so that exactly `tokens` tokens are generated."""
    return replace(params, max_tokens=tokens, stop=(), ignore_eos=True)


def checked(
    tuning: Tuning, data: Recorded, engine: Engine, batch: int, nodes: int, prompts: str | None, progress: Progress
) -> Tuning:
    """The tuning with what its named trees really do on other prompts. Raises UserError."""
    params = _until(params_of(data), min(params_of(data).max_tokens, CHECK_TOKENS))
    if prompts is None:
        seen = [info.prompt for info in _infos(data)]
        texts = other_prompts(seen, max(CHECK_PROMPTS, 2 * batch))
        work: list[Work] = [
            (engine.turn(text), replace(params, seed=(params.seed + index) % 2**63)) for index, text in enumerate(texts)
        ]
        what = f"{len(work)} prompts that the capture lacks"
    else:
        specs = read_prompts(prompts, PromptSpec("", params))
        work = [(engine.encode(engine.turn(spec.prompt), spec.template)[1], spec.params) for spec in specs]
        what = prompts
    rows = {_name(row): row for row in tuning.rows if _is_checked(row)}
    trees = {name: {"tree": row.tree} if row.tree else dict(NO_DRAFTER) for name, row in rows.items()}
    measured, costs = measure_trees(engine, trees, work, batch, work_of(data, batch), nodes, progress)

    def told(row: TreeRow) -> TreeRow:
        if not _is_checked(row) or (found := measured.get(_name(row))) is None:
            return row
        due = expected(row, data.evidence, costs)
        return replace(row, expected=due, measured=found.tokens_per_s, measured_length=found.length)

    return replace(tuning, rows=tuple(map(told, tuning.rows)), checked={"prompts": what, "batch": batch})


def _name(row: TreeRow) -> str:
    return row.tree or "no drafting"


def _is_checked(row: TreeRow) -> bool:
    """The choice, the default, no drafting, and what was asked for; the recorded tree is large, and was run."""
    return row.names != ("recorded",) and (bool(row.names) or row.family == "asked")


@dataclass(frozen=True)
class MeasuredTree:
    """The figures of one engine over the steps in which a full batch decoded."""

    tokens_per_s: float
    length: float  # acceptance length of its drafts
    steps: int


def measure_trees(
    engine: Engine,
    trees: Mapping[str, Mapping[str, str | None]],
    work: Sequence[Work],
    batch: int,
    again: Sequence[Work],
    most_nodes: int,
    progress: Progress = lambda *_: None,
) -> tuple[dict[str, MeasuredTree], Costs]:
    """Run the same work with each tree, the engines stepping in turn. `trees`: what each changes of the engine.

    What a step costs is measured again in the same rounds, with the prompts `again`: a different load on the machine
    than when the costs were first measured is not an error of the prediction. Seconds are those of the rounds in which
    all engines had work.
    """
    with lanes(engine, trees, batch) as run, cost_lanes(engine, again, batch, most_nodes) as costing:
        for lane in run:
            lane.give(iter(work))
        for lane in costing.run:
            lane.every = EVERY
        count, total = len(run), len(work) * len(run)
        for rounds in in_turn([*run, *costing.run]):
            progress("measuring the trees", total - sum(length_hint(lane.work) for lane in run), total)
            if all(lane.done for lane in run):
                costs = costing.costs([steps[count:] for steps in rounds])
                break
    together = [steps[:count] for steps in rounds if all(steps[:count])] or [steps[:count] for steps in rounds]
    each = ([[step for step in steps if step] for steps in zip(*some, strict=True)] for some in (together, rounds))
    return {name: _measured(*both) for name, *both in zip(trees, *each, strict=False) if all(both)}, costs


def _measured(timed: Sequence[Timed], steps: Sequence[Timed]) -> MeasuredTree:
    """`timed`: those of the steps whose seconds count."""
    drafts = sum(step.drafts for step in steps)
    accepted = sum(step.accepted for step in steps)
    seconds = middle([step.seconds for step in timed])
    tokens = sum(step.tokens for step in steps) / len(steps)
    return MeasuredTree(tokens / seconds, 1 + accepted / drafts if drafts else 1.0, len(steps))


def other_prompts(seen: Sequence[str], count: int) -> list[str]:
    """Prompts that the default head was not trained on and that none of these texts contain, evenly over the kinds."""
    return _evenly([prompt for prompt in unseen_prompts() if not any(prompt in text for text in seen)], count)
