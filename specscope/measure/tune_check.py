"""`specscope tune --check`: the trees that were judged, measured in turn on prompts that the capture does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specscope.engine.engine import Engine
from specscope.measure.lanes import Rounds, Timed, Work, in_turn, lanes, middle, pace, scaled
from specscope.measure.prompts import unseen_prompts
from specscope.measure.step_costs import cost_lanes
from specscope.plans.costs import Costs

EVERY = 6  # rounds of the trees for each one of the costs
Progress = Callable[[str, int, int], None]


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
    than when the costs were first measured is not an error of the prediction. An engine that ends early leaves rounds
    to the others, so all figures are at the pace of the median round.
    """
    rounds: Rounds = []
    with lanes(engine, trees, batch) as run, cost_lanes(engine, again, batch, most_nodes) as costing:
        left = dict.fromkeys(trees, len(work))
        for lane in run:
            lane.give(_counting(work, left, lane.name))
        for lane in costing.run:
            lane.every = EVERY

        def more() -> bool:
            total = len(work) * len(run)
            progress("measuring the trees", total - sum(left.values()), total)
            return not all(lane.done for lane in run)

        in_turn([*run, *costing.run], rounds, more)
        count = len(run)
        rounds = [
            [*round_steps[:count], *also]
            for round_steps, also in zip(rounds, costing.counted([r[count:] for r in rounds]), strict=True)
        ]
        rounds = [round_steps for round_steps in rounds if any(step is not None for step in round_steps)]
        paces = pace(rounds)
        costs = costing.costs([round_steps[count:] for round_steps in rounds], paces)
    each = [scaled(steps, paces) for steps in zip(*(round_steps[:count] for round_steps in rounds), strict=True)]
    return {name: _measured(steps) for name, steps in zip(trees, each, strict=True) if steps}, costs


def _counting(work: Sequence[Work], left: dict[str, int], name: str) -> Iterator[Work]:
    """The work, counted down as it is taken."""
    for item in work:
        left[name] -= 1
        yield item


def _measured(steps: Sequence[Timed]) -> MeasuredTree:
    drafts = sum(step.drafts for step in steps)
    accepted = sum(step.accepted for step in steps)
    seconds = middle([step.seconds for step in steps])
    tokens = sum(step.tokens for step in steps) / len(steps)
    return MeasuredTree(tokens / seconds, 1 + accepted / drafts if drafts else 1.0, len(steps))


def other_prompts(seen: Sequence[str], count: int) -> list[str]:
    """Prompts that the default head was not trained on and that none of these texts contain, evenly over the kinds."""
    new = [prompt for prompt in unseen_prompts() if not any(prompt in text for text in seen)]
    return new if len(new) <= count else [new[i * len(new) // count] for i in range(count)]
