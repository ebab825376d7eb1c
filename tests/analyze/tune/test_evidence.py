"""What is judged from records is what smaller trees do: exactly where it is exact, and in the mean where coins fall."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from specscope import Engine, SamplingParams
from specscope.analyze.tune.evidence import evidence
from specscope.analyze.tune.judged import Judge, first
from specscope.analyze.tune.tuning import lengths
from specscope.errors import UserError
from specscope.live.again import SCRATCH, drafter_again
from specscope.plans.plan import DynamicPlan, parse_plan
from specscope.speculate.changes import Changes
from specscope.speculate.drafters.base import Context
from specscope.trace.history.history import History
from specscope.trace.history.stats import measure
from specscope.trace.wire.reading import read_capture
from tests.analyze.audit.runs import drained
from tests.faults.models import DRAFT, HEAD, TARGET, story

DATA = Path(__file__).parents[2] / "data" / "before_deletion"

DRAFTERS = {
    "model": {"drafter": "draft_model", "draft_model": str(DRAFT)},
    "eagle": {"drafter": "eagle", "draft_model": str(HEAD)},
}
LARGE = "dynamic:24,depth=4,top=5"
WIDE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0)]"


def engine(drafter, tree, **more):
    return Engine(
        target=str(TARGET), dtype="float32", kv_memory=0.02, max_batch=8, tree=tree, **DRAFTERS[drafter], **more
    )


@cache
def recorded(drafter, tree, temperature=0.0, prompts=16, rule="standard"):
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
    """At the recorded contexts, from their tokens alone, with the smaller plan."""
    history = recorded(drafter, LARGE)
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
    history, small = recorded(drafter, LARGE), recorded(drafter, tree)
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
        ("model", f"top:{WIDE}", "top:2x2", 0.8, "standard"),
        pytest.param("model", f"top:{WIDE}", "top:2x2", 0.8, "traversal", marks=pytest.mark.slow),
    ],
)
def test_a_run_with_the_smaller_tree_has_the_length_that_is_judged(drafter, large, tree, temperature, rule):
    """Within four standard errors of both."""
    prompts = 40 if temperature else 16
    history = recorded(drafter, large, temperature, prompts, rule)
    told = evidence([history])
    (judged,) = lengths(told, [Judge(told).row(parse_plan(tree)).accepted])
    small = recorded(drafter, tree, temperature, prompts, rule)
    taus = [one.acceptance.tau for one in small.requests.values()]
    real = measure(part for one in small.requests.values() for part in one.steps).tau
    error = np.hypot(np.std(taus) / np.sqrt(len(taus)), (judged.high - judged.low) / 4)
    assert abs(judged.value - real) < 4 * error
    assert abs(judged.value - real) < 0.05 * real
    assert 1 + error < real  # else there would be nothing to be wrong about


def test_the_recorded_tree_is_judged_as_it_was():
    """Greedy: exactly. Sampled: within the coins' noise, and less noisy than the outcomes."""
    history = recorded("eagle", LARGE)
    judge = Judge(evidence([history]))
    judged = judge.row(parse_plan(LARGE))
    real = [part.verdict.accepted for one in history.requests.values() for part in one.steps if len(part.tree)]
    assert judged.accepted.tolist() == real
    assert is_complete(judge, judged.plan).all()
    warm = recorded("model", LARGE, 0.8)
    judged = Judge(evidence([warm])).row(parse_plan(LARGE))
    real = np.array([part.verdict.accepted for one in warm.requests.values() for part in one.steps if len(part.tree)])
    assert abs(judged.accepted.mean() - real.mean()) < 4 * (real - judged.accepted).std() / np.sqrt(len(real))
    assert judged.accepted.std() < 0.9 * real.std()


def test_what_tells_nothing_is_refused():
    history = History(engine("model", "2").run_info)
    with pytest.raises(UserError, match="has no drafts"):
        evidence([history])
    changes = Changes(outcomes={(position, 0): True for position in range(12)})
    forced = Engine(target=str(TARGET), dtype="float32", kv_memory=0.02, drafter="ngram", ngram_min=1, changes=changes)
    forced.add("anna", SamplingParams(max_tokens=8))
    with pytest.raises(UserError, match="lossy rule or forced"):
        evidence([drained(forced)])


def test_trees_of_two_sources_are_refused():
    """As older captures hold them."""
    with pytest.raises(UserError, match="from a text and a model"):
        evidence([read_capture(DATA / "combined.jsonl.gz").history])
