"""What is kept of a run that goes on, within bounds; request steps in columns; text that loops, by its definition."""

import dataclasses
import gc
import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specscope.trace.history.history import History, RecentSteps, weight
from specscope.trace.history.loops import LONGEST, TIMES, in_loops, loops_of, together
from specscope.trace.history.stats import measure
from specscope.trace.record.declared import same
from specscope.trace.record.notes import Logprobs
from specscope.trace.run import packed as module
from specscope.trace.run.packed import HELD, PackedParts, PartStore, PartViews
from specscope.trace.wire.reading import read_capture
from tests.analyze.histories import step
from tests.trace.samples import records


def steps(count):
    """Records of which each weighs much the same: with the log-probabilities of a thousand tokens."""
    first = next(record for record in records() if record.requests)
    many = Logprobs(np.zeros(1000, np.float32), np.zeros((1000, 20), np.int32), np.zeros((1000, 20), np.float32))
    part = dataclasses.replace(first.requests[0], logprobs=many)
    plain = dataclasses.replace(first, admitted=(), finished=(), preempted=(), requests=(part,))
    return [dataclasses.replace(plain, step=step) for step in range(count)]


@pytest.mark.parametrize("name", ["evidence", "eagle", "sampled", "ngram"])
def test_real_evidence_takes_about_what_it_weighs(name):
    made = [dataclasses.replace(r, finished=()) for r in read_capture(f"traces/{name}.jsonl").history.steps]
    weighs, packed = sum(map(weight, made)), pickle.dumps(made)
    gc.collect()
    tracemalloc.start()
    try:
        again = pickle.loads(packed)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(again) == len(made)
    assert 0.7 * weighs < taken < 1.3 * weighs


@pytest.mark.parametrize("room", [1, 7])
def test_the_newest_records_within_bytes(room):
    made = steps(30)
    recent = RecentSteps(1000, room * weight(made[0]) + 1)
    for record in made:
        recent.append(record)
    assert [record.step for record in recent] == list(range(30 - room, 30))
    few = RecentSteps(2, 10**12)
    for record in made:
        few.append(record)
    assert [record.step for record in few] == [28, 29]
    assert [record.step for record in few.take()] == [28, 29]
    assert list(few) == []


def test_a_history_with_a_limit_is_within_bytes_too():
    made = steps(200)
    assert weight(made[0]) > 1000 * 20 * 8  # its log-probabilities
    history, all_of_it = History(limit=1000, limit_bytes=20 * weight(made[0])), History()
    for record in made:
        history.append(record)
        all_of_it.append(record)
        assert history.nbytes <= 20 * weight(made[0])
    assert history.steps[-1] == made[-1]
    assert len(history.steps) + history.gone == 200
    assert (len(all_of_it.steps), all_of_it.gone) == (200, 0)


def test_steps_come_out_as_they_went_in_and_what_is_forgotten_goes_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    steps = [part for record in records() for part in record.requests] * 4
    store = PartStore()
    rows = [store.append(part) for part in steps]
    views = PartViews(store, rows)
    assert views == steps
    assert views[1:] == steps[1:]
    assert pickle.loads(pickle.dumps(views)) == tuple(steps)
    for row, part in zip(rows, steps, strict=True):
        assert {name: getattr(store[row], name) for name in HELD if name} == {
            name: getattr(part, name) for name in HELD if name
        }
        assert store[row].emitted == part.emitted
        assert same(store[row].told("verdict", "path"), None if part.verdict is None else part.verdict.path)
    before = store.nbytes
    store.forget(rows[5])
    assert store.nbytes < before
    assert store[rows[5]] == steps[5]
    with pytest.raises(LookupError, match="was forgotten"):
        store[rows[0]]
    assert PackedParts.of(steps).nbytes > 0


def by_definition(tokens):
    """Every stretch that is one cycle, three times."""
    inside = [False] * len(tokens)
    for period in range(1, LONGEST + 1):
        for start in range(len(tokens) - TIMES * period + 1):
            if tokens[start : start + period] * TIMES == tokens[start : start + TIMES * period]:
                inside[start : start + TIMES * period] = [True] * (TIMES * period)
    return inside


pieces = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=35), st.integers(1, 5))
outputs = st.lists(pieces, max_size=4).map(lambda found: [token for cycle, times in found for token in cycle * times])


@settings(max_examples=100, deadline=None)
@given(st.lists(outputs, max_size=4))
@example([])
@example([[1, 1], [1, 1, 1]])
@example([list(range(32)) * 3, list(range(33)) * 3])
@example([[0, 1] * 3 + [0]])  # the half cycle at its end is part of another one, [1, 0]
def test_a_token_lies_in_a_loop_of_its_text_as_the_definition_says(texts):
    tokens = np.array([token for text in texts for token in text], np.int64)
    of = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    assert in_loops(tokens, of).tolist() == [inside for text in texts for inside in by_definition(text)]
    for text in texts:
        assert in_loops(np.array(text, np.int64)).tolist() == by_definition(text)


def chain(index, tokens, accepted):
    """A draft of two tokens, of which so many are accepted; then the final token."""
    return replace(step(tree="2", path=range(accepted), tokens=tokens[:2], final=tokens[accepted]), index=index)


def test_the_length_without_steps_whose_output_lies_in_loops():
    novel = [chain(0, (1, 2, 3), 0), chain(1, (4, 5, 6), 1)]  # 1, then 4 5
    loop = [chain(at, (7, 8, 7) if at % 2 else (8, 7, 8), 2) for at in range(3, 7)]  # 787 878 787 878
    both = chain(2, (6, 8, 8), 1)  # 6, then 8 which begins the loop: it is counted
    found = [loops_of([*novel, both, *loop]), loops_of(novel)]
    assert [(one.tokens, one.looped) for one in found] == [(17, 13), (3, 0)]
    assert (found[0].share, found[0].rest) == (13 / 17, measure([*novel, both]))
    assert found[0].rest.tau == 1 + 2 / 3
    whole = together(found)
    assert (whole.tokens, whole.looped, whole.rest.drafts) == (20, 13, 5)
