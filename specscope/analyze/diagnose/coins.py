"""Causes in the randomness: coins that are used twice, or that follow from the wrong key."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np

from specscope.analyze.diagnose.case import Case, Step
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.diagnosis import CERTAIN, CONDITION, Suspect
from specscope.trace.coins import Stream, coins
from specscope.trace.tree import Doubles
from specscope.trace.wording import plural

LOOKED_AT = 4000  # steps whose coins are computed again
Key = Callable[[Step], tuple[int, Stream, int]]  # seed, stream, position


def coins_shared(case: Case) -> Suspect | None:
    """The same coin twice within a step, or at two positions of a request."""
    within, across, steps, example = 0, 0, 0, None
    seen: dict[str, dict[float, int]] = defaultdict(dict)
    for step in case.tossed:
        nodes = [coin for coin in step.verdict.coin.tolist() if coin]  # 0: none was tossed
        if not nodes:
            continue
        steps += 1
        twice = len(set(nodes)) < len(nodes)
        first = seen[step.request].setdefault(nodes[0], step.part.position)
        again = first != step.part.position
        within, across = within + twice, across + again
        if twice or again:
            example = example or step.reference()
    if max(within, across) <= max(2, 0.02 * steps):
        return None
    said = []
    if within > 2:
        said.append(f"two nodes of a tree have the same coin in {within:,} of {plural(steps, 'step')}")
    if across > 2:
        said.append(f"a request's step has the coin of an earlier position in {across:,} of {plural(steps, 'step')}")
    return Suspect(Cause.COINS_SHARED, CERTAIN - 0.01, tuple(said), example=example)


def wrong_key(case: Case) -> Suspect | None:
    """Coins computed again from seed and position, where the run is ours; else compared between requests."""
    run = case.history.run
    if run is None or not run.is_ours:
        return _alike_by_row(case)
    looked = [step for step in case.tossed if step.params is not None][:LOOKED_AT]
    wrong = [step for step in looked if not _fits(step, _right)]
    if len(wrong) <= max(2, 0.01 * len(looked)):
        return None
    said = f"the coins are not those of seed and position in {len(wrong):,} of {plural(len(looked), 'step')}"
    first = next((s.params.seed for s in looked if s.params is not None), 0)
    keys: dict[str, tuple[Cause, Key]] = {
        "those of the request's step before": (Cause.VERDICT_LATE, _before),
        "those of its row in the batch as seed": (Cause.COINS_BY_BATCH, lambda s: (s.visit.row, *_right(s)[1:])),
        "those of its seed plus its row": (
            Cause.COINS_BY_BATCH,
            lambda s: (_right(s)[0] + s.visit.row, *_right(s)[1:]),
        ),
        "those of its position plus its row": (
            Cause.COINS_BY_BATCH,
            lambda s: (*_right(s)[:2], s.part.position + s.visit.row),
        ),
        "those of the engine's step": (Cause.COINS_BY_BATCH, lambda s: (*_right(s)[:2], s.visit.record.step)),
        "those of the request's step": (Cause.COINS_BY_BATCH, lambda s: (*_right(s)[:2], s.part.index)),
        "those that drew the drafts": (Cause.NOISE_SHARED, lambda s: (_right(s)[0], Stream.DRAFT, s.part.position)),
        "those of seed 0": (Cause.COINS_SHARED, lambda s: (0, *_right(s)[1:])),
        "those of the first request's seed": (Cause.COINS_SHARED, lambda s: (first, *_right(s)[1:])),
        "those of the seed at another place": (Cause.COINS_SHARED, lambda s: (*_right(s)[:2], 0)),
    }
    for name, (cause, key) in keys.items():
        fits = sum(_fits(step, key) for step in wrong)
        if fits > 0.6 * len(wrong):
            lines = (said, f"they are {name} in {fits:,} of these")
            score = CERTAIN if cause is not Cause.COINS_SHARED else CERTAIN - 0.05
            return Suspect(cause, score, lines, example=wrong[0].reference())
    rows = Counter(step.visit.row > 0 for step in wrong)
    crowd = Counter(step.visit.record.batch > 1 for step in wrong)
    alike = _alike_by_row(case)
    lines = (said, f"{rows[True]:,} of these are not in the first row, {crowd[True]:,} in a batch of two or more")
    score = CERTAIN - 0.05 if alike else CONDITION if crowd[False] == 0 or rows[False] == 0 else 0.5
    extra = () if alike is None else alike.for_
    return Suspect(Cause.COINS_BY_BATCH, score, (*lines, *extra), example=wrong[0].reference())


def _right(step: Step) -> tuple[int, Stream, int]:
    assert step.params is not None
    return step.params.seed, Stream.VERIFY, step.part.position


def _before(step: Step) -> tuple[int, Stream, int]:
    seed, stream, position = _right(step)
    return seed, stream, position if step.last is None else step.last.part.position


def _fits(step: Step, key: Key) -> bool:
    """Whether the step's coins are those of a key."""
    own: Doubles = np.array([step.verdict.final_coin, *step.verdict.coin])
    return np.array_equal(coins(*key(step), len(own)), own)


def _alike_by_row(case: Case) -> Suspect | None:
    """Different requests with the same coins in the same row, more often than in different rows."""
    seeds = {step.request: None if step.params is None else step.params.seed for step in case.steps}
    seen: dict[float, tuple[str, int]] = {}
    same_row, other_row, example = 0, 0, None
    for step in case.tossed:
        coin = step.verdict.final_coin
        request, row = seen.setdefault(coin, (step.request, step.visit.row))
        if request == step.request or (seeds[request] is not None and seeds[request] == seeds[step.request]):
            continue
        same_row, other_row = same_row + (row == step.visit.row), other_row + (row != step.visit.row)
        example = example or step.reference()
    if same_row + other_row <= max(2, 0.01 * len(case.steps)) or same_row <= 3 * other_row:
        return None
    said = f"requests of other seeds have the same coins in the same row of the batch, {same_row:,} times"
    return Suspect(Cause.COINS_BY_BATCH, CERTAIN - 0.05, (said,), example=example)
