"""What a tuning chooses and says of captures that tell less; what is judged from records is what smaller trees do."""

import dataclasses
import itertools
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope import SamplingParams
from specscope.analyze.tune.candidates import best_shapes
from specscope.analyze.tune.evidence import evidence
from specscope.analyze.tune.judged import Judge, first
from specscope.analyze.tune.text import advice
from specscope.analyze.tune.tuning import lengths, over, recorded, tune
from specscope.errors import UserError
from specscope.live.again import SCRATCH, drafter_again
from specscope.plans.costs import CostPoint, Costs
from specscope.plans.plan import DynamicPlan, parse_plan
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context
from specscope.trace.history.history import History
from specscope.trace.history.stats import measure
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import drained
from tests.analyze.edits import rebuilt, sample
from tests.engines import tiny_engine
from tests.faults.models import DRAFT, HEAD, TARGET, story


def costs(plain=0.02, row=0.0, one_pass=0.002, base=0.02, drafter="eagle"):
    """A machine where rows cost so much each."""
    step = tuple(CostPoint(rows, s, s * 0.99, s * 1.01) for rows in (2, 8, 32) for s in [base + row * rows])
    passes = tuple(CostPoint(rows, one_pass, one_pass, one_pass) for rows in (1, 8))
    first = (CostPoint(1, one_pass, one_pass, one_pass),)
    steps = (CostPoint(1, plain, plain, plain), *step)
    return Costs({"drafter": drafter, "context": "50"}, steps, first, passes)


def judged(priced, name="eagle", most=16, **named):
    data = recorded([name], [sample(name)])
    return tune(data, {key: parse_plan(tree) for key, tree in named.items()}, most, priced)


def test_the_tree_follows_what_rows_and_passes_cost():
    """The largest where rows are free, a shallow one where passes cost, none where nothing pays."""
    found = judged(costs(row=0, one_pass=0))
    assert found.choice.nodes == 16
    speed = found.choice.length.value / 0.02
    assert found.choice.speed.value == pytest.approx(speed, rel=0.1)  # first steps draft nothing
    deep, shallow = (judged(costs(plain=0.05, row=0.0002, one_pass=seconds)) for seconds in (0.0005, 0.02))
    assert deep.choice.depth > shallow.choice.depth == 1
    nothing = judged(costs(row=0.02))
    assert nothing.choice.family == "plain"
    assert "--drafter none" in advice(nothing)


def test_the_choice_is_the_fastest_and_no_slower_than_the_default():
    found = judged(costs(row=0.001), default="dynamic:4,depth=2,top=4")
    told = [row for row in found.rows if row.untold <= 0.05]
    assert found.choice.speed.value == max(row.speed.value for row in told)
    assert found.choice.speed.value >= found.named("default").speed.value
    assert found.choice.speed.low < found.choice.speed.value < found.choice.speed.high
    assert found.choice.tree in advice(found)
    parse_plan(found.choice.tree)


def test_the_recorded_tree_has_the_length_that_the_run_had():
    found = judged(None)
    assert found.choice is None
    assert found.named("recorded").length.value == pytest.approx(found.recorded_length, rel=1e-6)
    assert found.recorded_length == sample("eagle").acceptance.tau


def test_sampled_drafts_tell_of_no_other_tree():
    with pytest.raises(UserError, match="the drafts were sampled: tune cannot tell"):
        judged(None, "sampled")


def test_another_engines_capture_tells_of_shorter_chains():
    history = rebuilt(sample("planted"), versions={"vllm": "0.32.0"})
    found = tune(recorded(["c"], [history]), {}, 16, None)
    assert {row.tree for row in found.family("static")} <= {"1", "2", "3", "4"}
    assert any("shorter chains" in note for note in found.notes)


def test_of_a_long_run_some_steps_are_judged(monkeypatch):
    whole = judged(None)
    monkeypatch.setattr("specscope.analyze.tune.evidence.MOST_STEPS", whole.steps // 2)
    half = judged(None)
    assert half.judged == whole.steps // 2
    assert any(f"of {whole.steps:,} were judged" in note for note in half.notes)
    assert half.named("recorded").length.value == pytest.approx(whole.recorded_length, rel=0.15)
    monkeypatch.setattr("specscope.analyze.tune.evidence.MOST_CANDIDATES", 1)
    assert judged(None).judged == 20


def test_the_interval_covers_as_often_as_it_says():
    """Requests drawn from a known population: the length's interval holds the true one in about 95 % of draws."""
    data = recorded(["a"], [sample("eagle")]).evidence
    drawn, inside = np.random.default_rng(3), 0
    for _ in range(200):
        rate = drawn.beta(4, 3, size=25)
        request = np.repeat(np.arange(25), 30)
        accepted = (drawn.random(750) < rate[request]).astype(float)
        some = dataclasses.replace(data, request=request, tokens=1 + accepted.astype(int), undrafted=np.zeros(25))
        (found,) = lengths(some, [accepted])
        inside += found.low <= 1 + 4 / 7 <= found.high
    assert 0.9 * 200 <= inside <= 0.99 * 200


def test_no_interval_holds_what_the_tree_cannot_give():
    """A request of which all is accepted beside two of which nothing is: the ends of lengths, and so of speeds."""
    history = sample("eagle")
    data = recorded(["a"], [history])
    told, priced = data.evidence, costs(base=0.06, one_pass=0.01)
    unlike = np.where((told.depth > 0) & (told.request[:, None] == 0), 1.0, 0.0) * (told.rank == 0)
    data = dataclasses.replace(data, evidence=dataclasses.replace(told, reach=unlike))
    found = tune(data, {"default": parse_plan("1")}, 16, priced)
    assert any(row.length.high == 1 + row.depth for row in found.rows if row.depth)
    for row in found.rows:
        assert 1 <= row.length.low <= row.length.value <= row.length.high <= 1 + row.depth
        assert 0 < row.speed.low <= row.speed.value <= row.speed.high
        if row.depth:
            least = priced.batch / max(row.step, priced.plain.seconds)
            most = priced.batch * (1 + row.depth) / min(row.step, priced.plain.seconds)
            assert least * math.exp(-priced.error) <= row.speed.low
            assert row.speed.high <= most * math.exp(priced.error)
    assert found.choice.over_default is None or found.choice.over_default.low > 0


def test_captures_of_different_trees_are_not_tuned_together():
    """Drafts of a small tree do not show what a larger one holds."""
    large = sample("eagle")
    small = History(dataclasses.replace(large.run, tree="3"))
    with pytest.raises(UserError, match="small has another tree than large: tune captures of one"):
        recorded(["large", "small"], [large, small])


def test_two_trees_are_compared_request_by_request():
    """What differs between requests goes: where one tree accepts a tenth more of each, the interval is narrow."""
    data = recorded(["a"], [sample("eagle")]).evidence
    drawn, inside, widths = np.random.default_rng(5), 0, []
    for _ in range(100):
        rate = 0.1 * drawn.integers(1, 9, size=40)
        request = np.repeat(np.arange(40), 30)
        accepted = (drawn.random((2, 1200)) < np.stack([1.1 * rate[request], rate[request]])).astype(float)
        tokens = np.full(1200, 2)
        some = dataclasses.replace(data, request=request, tokens=tokens, undrafted=np.zeros(40))
        found = over(some, *accepted)
        steps = [np.mean(1 / (1 + 0.1 * factor * np.arange(1, 9))) for factor in (1, 1.1)]
        inside += found.low <= steps[0] / steps[1] <= found.high
        relative = [(each.high - each.low) / each.value for each in (found, *lengths(some, accepted))]
        widths.append(relative[0] / math.hypot(*relative[1:]))
    assert inside >= 90
    assert np.median(widths) < 0.6


MOST = 6


@cache
def every_tree(nodes, width, depth):
    """All trees of so many nodes, closed under parents and elder siblings, as sets of rank paths."""
    if nodes == 0:
        return [frozenset()]
    found = set()
    for tree in every_tree(nodes - 1, width, depth):
        for above in [(), *tree]:
            rank = sum(path[:-1] == above and len(path) == len(above) + 1 for path in tree)
            if rank < width and len(above) < depth:
                found.add(tree | {(*above, rank)})
    return sorted(found, key=sorted)


def test_there_are_as_many_trees_as_catalan_says():
    assert [len(every_tree(n, MOST, MOST)) for n in range(1, MOST + 1)] == [1, 2, 5, 14, 42, 132]


@given(st.data())
def test_no_tree_is_better(data):
    """Also where a child's figure is above its parent's: noise can make it so."""
    width, depth = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    positions = [p for d in range(1, depth + 1) for p in itertools.product(range(width), repeat=d)]
    drawn = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    rho = dict(zip(positions, drawn.random(len(positions)), strict=True))
    found = best_shapes(rho, range(1, MOST + 1), depth)
    for nodes, (shape, value) in enumerate(found, 1):
        best = max(sum(rho[path] for path in tree) for tree in every_tree(nodes, width, depth))
        assert value == pytest.approx(best)
        assert len(shape) == nodes
        assert sum(rho[path] for path in shape.paths) == pytest.approx(value)
    assert len(found) == min(MOST, len(positions))


DATA = Path(__file__).parents[2] / "data" / "before_deletion"

DRAFTERS = {
    "model": {"drafter": "draft_model", "draft_model": str(DRAFT)},
    "eagle": {"drafter": "eagle", "draft_model": str(HEAD)},
}
LARGE = "dynamic:24,depth=4,top=5"
WIDE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]"


def engine(drafter, tree, **more):
    return tiny_engine(TARGET, kv_memory=0.02, max_batch=8, tree=tree, **DRAFTERS[drafter], **more)


@cache
def as_recorded(drafter, tree, temperature=0.0, prompts=16, rule="standard"):
    """The history of a run."""
    one = engine(drafter, tree, rule=rule)
    for number in range(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=40, seed=number, ignore_eos=True)
        one.add(story(7000 + number, 60), params, name=f"r{number}")
    history = drained(one)
    one.close()
    return history


def rank_paths(tree):
    """The paths of ranks of a drafted tree."""
    found = []
    for node, above in enumerate(tree.parent.tolist()):
        rank = sum(other == above for other in tree.parent[:node].tolist())
        found.append((*(found[above] if above >= 0 else ()), rank))
    return set(found)


def kept_paths(told, mask, row):
    found = {told.parent.shape[1]: ()}
    for column in np.flatnonzero(told.depth[row]).tolist():
        found[column] = (*found[int(told.parent[row, column])], int(told.rank[row, column]))
    return {found[column] for column in np.flatnonzero(mask[row]).tolist()}


def is_complete(judge, plan):
    """[S] whether the record holds everything that the drafter would have considered."""
    if isinstance(plan, DynamicPlan):
        return ~judge.search(plan.depth, plan.top)[1].any(1)
    return np.all([judge.position(path)[1] == 0 for path in plan.shape.paths], axis=0)


@pytest.mark.every(3)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "tree", ["dynamic:4,depth=2,top=4", "dynamic:8,depth=3,top=3", "dynamic:10,depth=4,top=4", LARGE]
)
def test_a_smaller_dynamic_tree_is_what_the_drafter_drafts(drafter, tree):
    """At the as_recorded contexts, from their tokens alone, with the smaller plan."""
    history = as_recorded(drafter, LARGE)
    told = evidence([history])
    judge, plan = Judge(told), parse_plan(tree)
    mask, complete = first(judge.search(plan.depth, plan.top)[0], plan.nodes), is_complete(judge, plan)
    small = engine(drafter, tree)
    parts = [
        (request, place, part)
        for request in history.requests.values()
        for place, part in enumerate(request.steps)
        if len(part.tree)
    ]
    assert len(parts) == len(told.request)
    assert complete.mean() > 0.8  # elsewhere the smaller search looks at what the larger one did not, and that is said
    for row in np.flatnonzero(complete)[::8]:
        request, place, part = parts[row]
        tokens = request.before(place, part.position + 1)
        context = Context(SCRATCH, tokens, len(request.info.prompt_tokens), request.info.params)
        draft = drafter_again(small, context, part.tree)
        assert kept_paths(told, mask, row) == rank_paths(draft.tree)


@pytest.mark.every(3)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "tree", ["3", "2x2", "[(0,), (1,), (0, 0), (0, 1)]", "dynamic:4,depth=2,top=4", "dynamic:9,depth=3,top=3"]
)
def test_greedy_it_accepts_at_each_place_what_is_judged(drafter, tree):
    """A run with the smaller tree, at the places where both runs begin a step."""
    history, small = as_recorded(drafter, LARGE), as_recorded(drafter, tree)
    told = evidence([history])
    judge, plan = Judge(told), parse_plan(tree)
    accepted, complete = judge.row(plan).accepted, is_complete(judge, plan)
    steps = [part for one in history.requests.values() for part in one.steps if len(part.tree)]
    began = {(part.request, part.position): row for row, part in enumerate(steps)}
    compared = 0
    for request in small.requests.values():
        assert [token for token, _ in request.output()] == [t for t, _ in history.requests[request.id].output()]
        for part in request.steps:
            row = began.get((part.request, part.position))
            if row is not None and len(part.tree) and complete[row]:
                assert part.verdict.accepted == accepted[row]
                compared += 1
    assert compared > 30


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("drafter", "large", "tree", "temperature", "rule"),
    [
        ("eagle", LARGE, "3", 0.0, "standard"),
        ("eagle", LARGE, "dynamic:4,depth=2,top=4", 0.0, "standard"),
        ("model", LARGE, "dynamic:6,depth=3,top=3", 0.8, "standard"),
        pytest.param("model", f"top:{WIDE}", "top:2x2", 0.8, "standard", marks=pytest.mark.slow),
        pytest.param("model", f"top:{WIDE}", "top:2x2", 0.8, "traversal", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_the_smaller_tree_has_the_length_that_is_judged(drafter, large, tree, temperature, rule):
    """Within four standard errors of both."""
    prompts = 40 if temperature else 16
    history = as_recorded(drafter, large, temperature, prompts, rule)
    told = evidence([history])
    (judged,) = lengths(told, [Judge(told).row(parse_plan(tree)).accepted])
    small = as_recorded(drafter, tree, temperature, prompts, rule)
    taus = [one.acceptance.tau for one in small.requests.values()]
    real = measure(part for one in small.requests.values() for part in one.steps).tau
    error = np.hypot(np.std(taus) / np.sqrt(len(taus)), (judged.high - judged.low) / 4)
    assert abs(judged.value - real) < 4 * error
    assert abs(judged.value - real) < 0.05 * real
    assert 1 + error < real  # else there would be nothing to be wrong about


def test_the_recorded_tree_is_judged_as_it_was():
    """Greedy: exactly. Sampled: within the coins' noise, and less noisy than the outcomes."""
    history = as_recorded("eagle", LARGE)
    judge = Judge(evidence([history]))
    judged = judge.row(parse_plan(LARGE))
    real = [part.verdict.accepted for one in history.requests.values() for part in one.steps if len(part.tree)]
    assert judged.accepted.tolist() == real
    assert is_complete(judge, judged.plan).all()
    warm = as_recorded("model", LARGE, 0.8)
    judged = Judge(evidence([warm])).row(parse_plan(LARGE))
    real = np.array([part.verdict.accepted for one in warm.requests.values() for part in one.steps if len(part.tree)])
    assert abs(judged.accepted.mean() - real.mean()) < 4 * (real - judged.accepted).std() / np.sqrt(len(real))
    assert judged.accepted.std() < 0.9 * real.std()


def test_what_tells_nothing_is_refused():
    history = History(engine("model", "2").run_info)
    with pytest.raises(UserError, match="has no drafts"):
        evidence([history])
    changes = Changes(outcomes={(position, 0): True for position in range(12)})
    forced = tiny_engine(TARGET, kv_memory=0.02, drafter="ngram", ngram_min=1, changes=changes)
    forced.add("anna", SamplingParams(max_tokens=8))
    with pytest.raises(UserError, match="lossy rule or forced"):
        evidence([drained(forced)])


def test_trees_of_two_sources_are_refused():
    """As older captures hold them."""
    with pytest.raises(UserError, match="from a text and a model"):
        evidence([read_capture(DATA / "combined.jsonl.gz").history])
