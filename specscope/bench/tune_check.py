"""`specscope tune --check`: the trees that were judged, measured in turn on prompts that the capture does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from specscope.bench.cpu import unseen_prompts
from specscope.bench.lanes import Rounds, Timed, Work, in_turn, lanes, pace, scaled
from specscope.engine.engine import Engine

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Measured:
    """What one engine did in the steps in which a full batch decoded."""

    tokens_per_s: float
    length: float  # acceptance length of its drafts
    steps: int


def measure_trees(
    engine: Engine,
    trees: Mapping[str, Mapping[str, str | None]],
    work: Sequence[Work],
    batch: int,
    progress: Progress = lambda *_: None,
) -> dict[str, Measured]:
    """Run the same work with each tree, the engines stepping in turn. `trees`: what each changes of the engine.

    One that ends early leaves rounds to the others: all figures are at the pace of the median round.
    """
    rounds: Rounds = []
    with lanes(engine, trees, batch) as run:
        left = dict.fromkeys(trees, len(work))
        for lane in run:
            lane.give(_counting(work, left, lane.name))

        def more() -> bool:
            total = len(work) * len(run)
            progress("measuring the trees", total - sum(left.values()), total)
            return not all(lane.done for lane in run)

        in_turn(run, rounds, more)
    rounds = [one for one in rounds if any(step is not None for step in one)]
    paces = pace(rounds)
    each = [scaled(steps, paces) for steps in zip(*rounds, strict=True)]
    return {name: _measured(steps) for name, steps in zip(trees, each, strict=True) if steps}


def _counting(work: Sequence[Work], left: dict[str, int], name: str) -> Iterator[Work]:
    """The work, counted down as it is taken."""
    for one in work:
        left[name] -= 1
        yield one


def _measured(steps: Sequence[Timed]) -> Measured:
    drafts = sum(step.drafts for step in steps)
    accepted = sum(step.accepted for step in steps)
    seconds = sum(step.seconds for step in steps)
    return Measured(sum(step.tokens for step in steps) / seconds, 1 + accepted / drafts if drafts else 1.0, len(steps))


def other_prompts(seen: Sequence[str], count: int) -> list[str]:
    """Prompts that the default head was not trained on, and that none of these texts hold: of every kind alike."""
    new = [prompt for prompt in unseen_prompts() if not any(prompt in text for text in seen)]
    return new if len(new) <= count else [new[i * len(new) // count] for i in range(count)]
