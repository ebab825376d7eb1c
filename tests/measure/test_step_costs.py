"""Costs and trees measured in turn; and `--trainer`: what differs between two heads is named by its key."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from specscope import SamplingParams
from specscope.analyze.findings import Exit
from specscope.measure import step_costs
from specscope.measure.step_costs import Lane, in_turn, lanes, measure_costs
from specscope.measure.tune import measure_trees
from specscope.trace.history.stats import measure
from tests.engines import tiny_engine
from tests.faults.models import HEAD, TARGET, story
from tests.heads import head_tensors, write_parallel_head
from tests.measure.head_runs import compared, head_copy, served
from tests.tools.conftest import data, target  # noqa: F401
from tests.waiting import HANG_SECONDS

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
ROW_SECONDS = 0.01
WORK = [(story(900 + i, 50), replace(PARAMS, seed=i)) for i in range(4)]


@pytest.fixture(scope="module")
def eagle():
    return tiny_engine(TARGET, kv_memory=0.05, max_batch=2, drafter="eagle", draft_model=str(HEAD))


def test_costs_of_a_drafter_that_is_a_model(eagle, monkeypatch):
    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    done, batch = [], 2
    costs = measure_costs(eagle, WORK, batch, 8, lambda what, now, of: done.append((now, of)))
    assert [one.rows for one in costs.step[1:]] == [batch * rows for rows in (2, 4, 6, 8, 12, 16, 24, 32)]
    assert [one.rows for one in costs.passes] == [batch * rows for rows in (1, 2, 4, 6, 8)]
    assert costs.plain.rows == batch == costs.batch
    seconds = [one.seconds for one in costs.step[1:]]
    assert seconds == sorted(seconds)
    assert 0 < costs.plain.seconds < HANG_SECONDS
    assert costs.first[0].seconds > 0
    about = costs.about
    assert (about["target"], about["drafter"], about["draft model"]) == ("target", "eagle", "head")
    assert done[-1] == (26, 26)
    assert eagle.runner.cache.pool.used == 0  # what the lanes took is free


def test_costs_of_prompt_lookup_are_rows_alone(monkeypatch):
    monkeypatch.setattr(step_costs, "SECONDS", 0.0)
    one = tiny_engine(TARGET, kv_memory=0.05, drafter="ngram", tree="3x4")
    costs = measure_costs(one, WORK, 1, 8, lambda *_: None)
    assert [point.rows for point in costs.step[1:]] == [nodes + 1 for nodes in step_costs.SIZES]
    assert costs.first == costs.passes == ()


def test_a_tree_is_measured_as_it_runs(eagle, monkeypatch):
    """The same acceptance length as a run of its own, prefill aside; its costs are of the same rounds.

    By a clock of the test's own, on which a step takes 10 ms a row and drafting nothing: how far two real measurements
    of one thing differ depends on the machine's load.
    """
    timed = Lane._timed

    def by_rows(lane, record, _):
        step = timed(lane, record, ROW_SECONDS * sum(1 + len(part.tree) for part in record.requests))
        return step and replace(step, drafting=0.0)

    monkeypatch.setattr(Lane, "_timed", by_rows)
    tree = "dynamic:4,depth=2,top=3"
    trees = {"plain": step_costs.PLAIN, tree: {"tree": tree}}
    found, costs = measure_trees(eagle, trees, WORK, 1, WORK, 8)
    own = tiny_engine(TARGET, kv_memory=0.05, drafter="eagle", draft_model=str(HEAD), tree=tree)
    results = [own.generate(*one)[0] for one in WORK]
    total = measure(step for result in results for step in result.steps)
    assert (found[tree].length, found["plain"].length) == (pytest.approx(total.tau), 1.0)
    assert found["plain"].steps == len(WORK) * (PARAMS.max_tokens - 1)  # prefill's step gives one
    assert found["plain"].tokens_per_s == pytest.approx(1 / ROW_SECONDS)
    assert 0.2 / ROW_SECONDS < found[tree].tokens_per_s <= total.tau / ROW_SECONDS / 2  # 2 to 5 rows, 1 token at least
    assert costs.plain.seconds == pytest.approx(ROW_SECONDS)
    assert [point.seconds for point in costs.step] == pytest.approx([ROW_SECONDS * point.rows for point in costs.step])


@pytest.mark.parametrize("count", [24, 100])
def test_a_cost_lies_within_its_interval_which_covers_as_often_as_it_says(count):
    """Also on a machine that is busy in some steps: `tune` gave 30.7 tokens/s between 31.2 and 34.4."""
    drawn = np.random.default_rng(7)
    steps = np.where(drawn.random(50_000) < 0.7, drawn.normal(1, 0.02, 50_000), drawn.normal(1.4, 0.1, 50_000))
    points = [step_costs._point(rows, drawn.choice(steps, count).tolist()) for rows in range(1, 301)]
    true = step_costs.middle(steps.tolist())
    assert 0.9 * 300 <= sum(point.low <= true <= point.high for point in points) <= 0.98 * 300
    fitted = step_costs.rising(points[:20])
    assert fitted != tuple(points[:20])
    assert all(point.low <= point.seconds <= point.high for point in (*points, *fitted))


def test_each_engine_keeps_to_a_part_of_the_cache_as_requests_come_and_go():
    """Else an engine's contexts would lie between the others', and reading them would take longer than on its own."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    work = [(story(900 + i, 40), replace(params, seed=i, max_tokens=8 + 5 * (i % 3))) for i in range(7)]
    engine = tiny_engine(TARGET, kv_memory=0.05, drafter="eagle", draft_model=str(HEAD))
    pool = engine.runner.cache.pool
    width = pool.blocks // (3 * 4)  # three engines, four requests each
    seen = set()
    with lanes(engine, {"plain": step_costs.PLAIN, "head": {}, "again": {"tree": "2"}}, 4) as run:
        for lane in run:
            lane.give(itertools.cycle(work))
        for _ in itertools.islice(in_turn(run), 40):
            for at, lane in enumerate(run):
                for request in lane.engine.requests.values():
                    if blocks := request.table.blocks:
                        start, in_part = blocks[0], divmod(blocks[0], 4 * width)
                        assert blocks == [*range(start, start + len(blocks))]
                        assert (in_part[0], in_part[1] % width) == (at, 0)
                        seen.add((at, request.id))
    assert len(seen) > 20
    assert (pool.used, pool.take(1)) == (0, [0])
    assert pool.take(1) == [pool.blocks // engine.config.max_batch]  # apart again as the engine alone has it


def nudged(tensors):
    up = tensors["midlayer.mlp.up_proj.weight"].float()
    noise = torch.randn(up.shape, generator=torch.Generator().manual_seed(0))
    return {**tensors, "midlayer.mlp.up_proj.weight": (up + 0.02 * up.std() * noise).bfloat16()}


def with_an_embedding(tensors):
    own = torch.randn(300, 48, generator=torch.Generator().manual_seed(1)) * 0.2
    return {**tensors, "embed_tokens.weight": own.bfloat16()}


def swapped(tensors):
    """The first two draft tokens are each other's."""
    offsets = tensors["d2t"].clone()
    offsets[0], offsets[1] = tensors["d2t"][1] + 1, tensors["d2t"][0] - 1
    return {**tensors, "d2t": offsets}


@dataclass(frozen=True)
class Folders:
    """The keys that differ; what is set in the trainer's and in the served config, what is made of their tensors."""

    keys: tuple[str, ...]
    trained: Mapping = field(default_factory=dict)
    serving: Mapping = field(default_factory=dict)
    of_trainer: Callable | None = None
    of_served: Callable | None = None
    says: str = "The served head is not the trained one"


ROPE = {"rope_theta": 300.0}
LAYERS = "eagle_aux_hidden_state_layer_ids"
CASES = {
    "healthy": Folders((), says="settings compared, none differs"),
    "rope base": Folders(("config: rope_theta",), serving=ROPE),
    "norm before residual": Folders(("config: norm_before_residual",), serving={"norm_before_residual": True}),
    "layers one lower": Folders((f"config: {LAYERS}",), serving={LAYERS: [1, 2, 3]}),
    "norm_output ignored": Folders(("config: norm_output",), {"norm_output": True}),
    "sliding window": Folders(
        ("config: sliding_window",), serving={"layer_types": ["sliding_attention"], "sliding_window": 16}
    ),
    "a weight, first of all": Folders(
        ("weights: midlayer.mlp.up_proj.weight", "config: rope_theta"),
        serving=ROPE,
        of_served=nudged,
        says="midlayer.mlp.up_proj.weight differs (relative 0.02), and 1 other difference",
    ),
    "an embedding of its own that was not exported": Folders(
        ("weights: embed_tokens.weight",), of_trainer=with_an_embedding
    ),
    "a map of another vocabulary": Folders(("weights: d2t",), of_served=swapped, says="d2t differs at 2 of"),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_what_differs_is_named_by_its_key(name, tmp_path):
    case = CASES[name]
    trainer = head_copy(tmp_path / "trainer", case.trained, case.of_trainer)
    head = head_copy(tmp_path / "head", case.serving, case.of_served)
    audit = compared(served(tmp_path / "run.jsonl", head, requests=1, tokens=4), trainer)
    assert audit.exit is (Exit.INCONSISTENT if case.keys else Exit.CONSISTENT)
    assert tuple(each.key for each in audit.differences) == case.keys
    assert case.says in audit.verdict
    assert min(audit.tensors, audit.settings) > 10


def test_a_one_pass_head(tmp_path):
    tensors = head_tensors(parallel=True, draft=300)
    trainer = write_parallel_head(tmp_path / "trainer", tensors, depths=3)
    path = served(tmp_path / "run.jsonl", trainer, requests=1, tokens=4)
    assert compared(path, trainer).exit is Exit.CONSISTENT
    other = write_parallel_head(tmp_path / "head", tensors, mask_token=9, depths=3)
    (found,) = compared(served(tmp_path / "other.jsonl", other, requests=1, tokens=4), trainer).differences
    assert found.key == "config: mask_token_id"
