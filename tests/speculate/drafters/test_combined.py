"""Combined drafters: both trees merged by their paths, ranked by what was accepted before, and the model fed right."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope import Engine, SamplingParams
from specscope.engine.config import COMBINED, EngineConfig
from specscope.errors import UserError
from specscope.speculate.drafters.base import NO_DRAFT, Draft
from specscope.speculate.drafters.candidates import WORTH, Candidates
from specscope.speculate.drafters.combined import model_of
from specscope.speculate.sizing.acceptance import CandidateHistory
from specscope.trace.costs import CostPoint
from specscope.trace.record.method import BOTH, MODEL, TEXT, MethodNotes
from specscope.trace.record.records import DraftNotes
from specscope.trace.record.tree import ROOT, DraftTree
from tests.engines import COSTS
from tests.heads import head_tensors, write_head

ints = lambda values: np.array(values, np.int32)  # noqa: E731
floats = lambda values: np.array(values, np.float32)  # noqa: E731


def text(tokens, parents, shares, match=6):
    method = MethodNotes(confidence=floats(shares), match_length=match, match_count=1, match_source="the prompt")
    return Draft(DraftTree.build(tokens, parents), method=method)


def model(tokens, parents, prob):
    empty = DraftNotes(floats(prob), floats(np.zeros(len(prob))), ints([]), ints([]), floats([]))
    return Draft(DraftTree.build(tokens, parents), notes=empty)


TEXT_TREE = text([5, 6, 7], [-1, 0, 1], [1.0, 1.0, 1.0])
MODEL_TREE = model([5, 8, 9, 6], [-1, -1, 0, 0], [0.3, 0.6, 0.3, 0.95])


def paths(tree):
    return [tuple(tree.token[i].item() for i in tree.path_to(node)) for node in range(len(tree))]


def test_what_both_propose_is_one_node():
    found = Candidates.merge(TEXT_TREE, MODEL_TREE, CandidateHistory())
    draft, behind = found.draft(found.best(min(found.worthy(), 9)), TEXT_TREE, MODEL_TREE)
    source = dict(zip(paths(draft.tree), draft.method.source.tolist(), strict=True))
    assert source[(5,)] == source[(5, 6)] == BOTH
    assert source[(5, 6, 7)] == TEXT
    assert source[(8,)] == MODEL
    at = dict(zip(paths(draft.tree), behind.tolist(), strict=True))
    assert (at[(5,)], at[(5, 6)], at[(5, 6, 7)], at[(8,)]) == (0, 3, -1, 1)
    assert draft.notes.prob[paths(draft.tree).index((5, 6, 7))] == 0
    assert draft.method.match_length == 6
    np.testing.assert_allclose(np.exp(draft.notes.score), draft.method.confidence, rtol=1e-5)


def test_what_is_left_out_is_told():
    found = Candidates.merge(TEXT_TREE, MODEL_TREE, CandidateHistory())
    draft, _ = found.draft(found.best(min(found.worthy(), 2)), TEXT_TREE, MODEL_TREE)
    assert paths(draft.tree) == [(5,), (5, 6)]
    notes = draft.notes
    parents, tokens = [-1, 0, *notes.dropped_parent.tolist()], [5, 6, *notes.dropped_token.tolist()]
    path = lambda node: () if node == ROOT else (*path(parents[node]), tokens[node])  # noqa: E731
    assert {path(node) for node in range(2, len(tokens))} == {(5, 6, 7), (8,), (5, 9)}


trees = st.lists(st.tuples(st.integers(-1, 8), st.integers(0, 3), st.floats(0.01, 1)), min_size=1, max_size=9)


def _tree(nodes):
    """A tree of distinct siblings from what hypothesis drew."""
    seen, tokens, parents, values = set(), [], [], []
    for above, token, value in nodes:
        parent = min(above, len(tokens) - 1)
        if (parent, token) not in seen:
            seen.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            values.append(value * (values[parent] if parent >= 0 else 1.0))
    return tokens, parents, values


@settings(max_examples=200)
@given(trees, trees, st.integers(1, 12))
def test_the_best_candidates_are_a_tree_and_the_likeliest(a, b, count):
    one, other = text(*_tree(a)), model(*_tree(b))
    found = Candidates.merge(one, other, CandidateHistory())
    assert {tuple(p) for p in paths(DraftTree.build(found.token, found.parent))} == {
        *paths(one.tree),
        *paths(other.tree),
    }
    kept = found.best(min(found.worthy(), count))
    assert len(kept) <= count
    for place, node in enumerate(kept):
        assert found.parent[node] == ROOT or found.parent[node] in kept[:place]
    left = set(range(len(found.token))) - set(kept)
    worst = min((found.chance[node] for node in kept), default=1.0)
    assert all(found.chance[node] <= worst or found.chance[node] < WORTH for node in left)
    if len(kept) < count:
        assert all(found.chance[node] < WORTH for node in left)


def test_outcomes_are_told_by_the_tokens_that_came_verified_or_not():
    found = Candidates.merge(TEXT_TREE, MODEL_TREE, CandidateHistory())
    where = {path: node for node, path in enumerate(paths(DraftTree.build(found.token, found.parent)))}
    found.came([5, 9])
    kinds = [found.kind[where[path]] for path in ((5,), (5, 6), (8,), (5, 9))]
    assert sorted(found.outcomes) == sorted(zip(kinds, [True, False, False, True], strict=True))


def test_where_no_token_came_nothing_is_told_of_candidates():
    found = Candidates.merge(TEXT_TREE, MODEL_TREE, CandidateHistory())
    found.came([])
    assert found.outcomes == []


def test_a_source_that_fails_is_left_out_after_a_while():
    known = CandidateHistory()
    for position in range(200):
        found = Candidates.merge(TEXT_TREE, NO_DRAFT, known)
        found.came([99])
        known.learn(position, found.outcomes)
    assert not found.worthy()
    assert Candidates.merge(NO_DRAFT, MODEL_TREE, known).worthy()


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return str(write_head(tmp_path_factory.mktemp("head"), head_tensors()))


@pytest.mark.every(3)
@pytest.mark.parametrize("drafter", COMBINED)
@pytest.mark.parametrize("batch", [1, 4])
def test_output_is_that_of_plain_decoding(deep, head, drafter, batch):
    how = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01, "max_batch": batch}
    prompts = [[1, 2, 3, 4] * 4, [9, 8, 7, 9, 8, 7, 9], [5]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    plain = Engine(drafter="none", **how).generate(prompts, params)
    draft = head if drafter.endswith("eagle") else "self:4"
    engine = Engine(drafter=drafter, draft_model=draft, tree="dynamic:8,depth=2,top=2", **how)
    found = engine.generate(prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    steps = [step for one in found for step in one.steps if len(step.tree)]
    sources = {source for step in steps for source in step.method.source.tolist()}
    assert {TEXT, MODEL} <= sources
    assert any(step.notes is None for step in steps)  # the text was enough
    assert any(step.notes is not None for step in steps)
    assert not engine.drafter.model.states
    assert engine.drafter.model.cache.pool.used == 0


@pytest.mark.parametrize("drafter", ["suffix+eagle", "suffix+draft_model"])
def test_the_model_is_fed_right_where_it_was_left_out(deep, head, drafter):
    """After each step its KV is that of the committed tokens, computed afresh."""
    from specscope.live.check_kv import check_kv

    draft = head if drafter.endswith("eagle") else "self:2"
    engine = Engine(
        target=str(deep), dtype="float32", kv_memory=0.01, drafter=drafter, draft_model=draft, tree="dynamic:8,depth=2"
    )
    engine.add([1, 2, 3, 4] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    moved, kinds = 0, set()
    while engine.busy:
        record = engine.step()
        for part in record.requests:
            moved += part.verdict is not None and len(part.verdict.path) > 0
            kinds.add(part.notes is None)
        for name in engine.requests:
            for one in check_kv(engine, name).compared:
                assert not one.differ, (record.step, one.model, one.differ[:2])
    assert moved
    assert kinds == {True, False}


def test_trees_do_not_depend_on_who_else_runs_or_ran(deep, head):
    how = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01, "draft_model": head, "tree": "dynamic:8,depth=2"}
    engine = Engine(drafter="suffix+eagle", **how)
    prompts = [[1, 2, 3, 4] * 4, [9, 8, 7, 9, 8, 7, 9], [3, 3, 4, 3, 3]]
    params = SamplingParams(max_tokens=30, temperature=0.8, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0] for prompt in prompts]
    engine.add([1, 2, 3, 4] * 4, params, name="r0")  # a request whose name comes again
    while engine.busy:
        engine.step()
    together = engine.generate(prompts, params)
    trees_of = lambda result: [(step.tree.token.tolist(), step.tree.parent.tolist()) for step in result.steps]  # noqa: E731
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert [tree for tree in trees_of(one) if tree[0]] == [tree for tree in trees_of(other) if tree[0]]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"drafter": "suffix+eagle", "tree": "4"}, "takes a tree like dynamic"),
        ({"drafter": "ngram+eagle", "tree": "top:3x3"}, "takes a tree like dynamic"),
        ({"drafter": "eagle+suffix"}, "unknown drafter"),
        ({"drafter": "suffix+eagle", "target": "x"}, "suffix.eagle needs --draft-model"),
        ({"drafter": "ngram+draft_model"}, "ngram.draft_model needs --draft-model"),
    ],
)
def test_what_does_not_fit_is_refused(how, said):
    with pytest.raises(UserError, match=said):
        EngineConfig(**how)


def test_model_of():
    from specscope.speculate.drafters.base import NoDrafter

    assert model_of(NoDrafter()) is None


@pytest.mark.parametrize("drafter", ["suffix+eagle", "ngram+draft_model"])
def test_a_fork_draws_the_trees_of_the_run_it_left(deep, head, drafter):
    """What was counted before the step goes with the request."""
    from specscope.live.fork import forked
    from specscope.trace.changes import Changes

    how = {"draft_model": head if drafter.endswith("eagle") else "self:2", "tree": "dynamic:8,depth=2"}
    engine = Engine(target=str(deep), dtype="float32", kv_memory=0.01, drafter=drafter, **how)
    engine.keep_timeline()
    name = engine.add([1, 2, 3, 4] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    request, records = engine.requests[name], []
    while engine.busy and len(records) < 12:
        records.append(engine.step())
    step = next(part for part in records[8].requests if part.request == name)
    with forked(engine, request, step, Changes()) as beside:
        found = []
        while len(found) < 3:
            found += [part for part in beside.step().requests if part.verdict is not None]
    wanted = [part for record in records[8:11] for part in record.requests]
    assert [paths(part.tree) for part in found] == [paths(part.tree) for part in wanted]


def test_going_back_to_steps_that_looked_nowhere_brings_the_same_trees_and_counts(deep, head):
    """Where no draft pays the text is looked into less often, and learns in between all the same."""
    how = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01, "draft_model": head, "costs": COSTS}
    engine = Engine(drafter="suffix+eagle", tree="dynamic:8,depth=2", adaptive=True, **how)
    dear = (CostPoint(1, 9.0, 9.0, 9.0),)  # so that the head never drafts
    engine.sizer.costs = replace(engine.sizer.costs, first=dear)
    engine.keep_timeline()
    engine.add([1, 2, 3, 4, 9, 8, 1, 2], SamplingParams(max_tokens=60, temperature=1.0, seed=2), name="r")

    def run():
        found = {}
        while engine.busy:
            record = engine.step()
            known = engine.drafter._requests["r"].acceptance if record.step > 1 else None
            recent = engine.sizer.learned.recent.get("r")
            for part in record.requests:
                told = part.tree.token.tolist(), part.sizing, known and bytes(known._tried)
                found[record.step] = *told, 0 if recent is None else recent.pause
        return found

    first = run()
    assert any(tree for tree, *_ in first.values())
    assert all(sizing.startswith("the head's draft would not pay: ") for _, sizing, *_ in list(first.values())[2:])
    assert max(pause for *_, pause in first.values()) > 1
    for step in range(len(first) - 1, 1, -7):
        engine.rewind(step)
        assert run() == {at: one for at, one in first.items() if at >= step}


def test_what_the_model_draws_alone_has_the_model_for_its_source(deep, head):
    """So that `break reject if source == "model"` stops there, though nothing is ranked with a text."""
    how = {"target": str(deep), "dtype": "float32", "kv_memory": 0.01, "draft_model": head, "costs": COSTS}
    engine = Engine(drafter="suffix+eagle", tree="dynamic:8,depth=2", adaptive=True, **how)
    parts = []
    for temperature in (1.0, 0.0):
        engine.add([1, 2, 3, 4, 9, 8], SamplingParams(max_tokens=30, temperature=temperature, seed=2))
        while engine.busy:
            parts += [part for part in engine.step().requests if len(part.tree)]
    drawn = [part for part in parts if part.tree.is_sampled]
    ranked = [part for part in parts if not part.tree.is_sampled]
    assert drawn
    assert ranked
    for part in drawn:
        assert [part.method.source_of(node) for node in range(len(part.tree))] == ["model"] * len(part.tree)
        assert not part.is_ranked_with_text
    assert all(part.is_ranked_with_text for part in ranked)
