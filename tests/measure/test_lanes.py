"""Lanes that share one KV cache."""

import itertools
from dataclasses import replace

from specscope import Engine, SamplingParams
from specscope.measure.lanes import in_turn, lanes
from tests.faults.models import HEAD, TARGET, story

NONE = {"drafter": "none", "draft_model": None, "tree": None}


def test_each_engine_keeps_to_a_part_of_the_cache_as_requests_come_and_go():
    """Else an engine's contexts would lie between the others', and reading them would take longer than on its own."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    work = [(story(900 + i, 40), replace(params, seed=i, max_tokens=8 + 5 * (i % 3))) for i in range(7)]
    engine = Engine(target=str(TARGET), dtype="float32", kv_memory=0.05, drafter="eagle", draft_model=str(HEAD))
    pool = engine.runner.cache.pool
    width = pool.blocks // (3 * 4)  # three engines, four requests each
    seen = set()

    def more():
        for at, lane in enumerate(run):
            for request in lane.engine.requests.values():
                if blocks := request.table.blocks:
                    start, in_part = blocks[0], divmod(blocks[0], 4 * width)
                    assert blocks == [*range(start, start + len(blocks))]
                    assert in_part[0] == at
                    assert in_part[1] % width == 0
                    seen.add((at, request.id))
        return len(rounds) < 40

    rounds = []
    with lanes(engine, {"plain": NONE, "head": {}, "again": {"tree": "2"}}, 4) as run:
        for lane in run:
            lane.give(itertools.cycle(work))
        in_turn(run, rounds, more)
    assert len(seen) > 20
    assert pool.used == 0
    assert pool.take(1) == [0]
    assert pool.take(1) == [pool.blocks // engine.config.max_batch]  # apart again as the engine alone has it
