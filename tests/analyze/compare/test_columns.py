"""Columns hold what the records held: steps come back, and figures agree with trace/history/stats.py."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from specscope.analyze.compare.collect import from_history
from specscope.analyze.compare.columns import joined
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.distributions import clustered, figures
from specscope.analyze.compare.reading import read_side, read_sides
from specscope.analyze.compare.tables import details
from specscope.analyze.evidence.arrays import places
from specscope.analyze.table import NONE
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.history.place import at, draft_ps, end
from specscope.trace.history.stats import measure
from specscope.trace.run.packed import slices
from specscope.trace.wire.reading import read_capture

from .runs import Made, make, side

TRACES = Path(__file__).parents[3] / "traces"
CAPTURES = [TRACES / f"{name}.jsonl" for name in ("eagle", "ngram", "sampled", "planted")]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_every_step_comes_back(path):
    one, history = read_side(str(path)), read_capture(path).history
    assert [request.id for request in one.requests] == list(history.requests)
    for request, known in zip(one.requests, history.requests.values(), strict=True):
        rows = one.rows(request)
        assert one.tokens(request).tolist() == [token for token, _ in known.output()]
        assert (request.info, request.reason) == (known.info, known.end and known.end.reason)
        for row, step in zip(range(rows.start, rows.stop), known.steps, strict=True):
            back = one.part(row)
            assert back.preceded is not None or step.verdict is None
            if step.verdict is not None:
                raw_ps = ([at(of, node).raw_p for node in range(len(step.tree))] for of in (back, step))
                assert (next(raw_ps), draft_ps(back)) == (next(raw_ps), draft_ps(step))
                assert end(back).choice == end(step).choice
                assert end(back).likeliest == end(step).likeliest[:1]
                assert end(back).drafters_likeliest == end(step).drafters_likeliest[:1]
            bare = {"notes": None, "parents": None, "sizing": "", "preceded": None, "method": None}
            empty = np.zeros(0, np.int32)
            forced = {} if step.verdict is None else {"verdict": dataclasses.replace(step.verdict, forced=empty)}
            first = dataclasses.replace(step, blocks=empty, moved=empty, **bare, **forced)
            assert dataclasses.replace(back, **bare) == first


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_depths_siblings_and_places_are_those_of_the_trees(path):
    one = read_side(str(path))
    for request in one.requests:
        done = 0
        for row in range(one.rows(request).start, one.rows(request).stop):
            step, begin = one.part(row), int(one.steps["first_node"][row])
            span = slice(begin, begin + len(step.tree))
            assert one.depth[span].tolist() == step.tree.depth.tolist()
            assert one.tree_depth[row] == step.tree.max_depth
            ranks = [step.tree.children(int(above)).index(node) for node, above in enumerate(step.tree.parent)]
            assert one.sibling[span].tolist() == ranks
            assert one.place[row] == done
            done += step.emitted


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_figures_agree_with_the_report(path):
    one, history = read_side(str(path)), read_capture(path).history
    told = {figure.name: figure.a for figure in figures(*clustered(one, one, []))}
    total = history.acceptance
    if total.drafts:
        assert told["tau"] == pytest.approx(total.tau)
        assert told["rate"] == pytest.approx(total.rate)
    assert told["tokens per step"] == pytest.approx(total.emitted / total.steps)
    for depth, (rate, proposed) in enumerate(zip(total.per_position_corrected, total.proposed_at, strict=True), 1):
        if proposed >= 30:
            assert told[f"depth {depth} rate"] == pytest.approx(rate)


def test_interleaved_requests_come_out_one_by_one():
    history = make(Made(requests=7, batch=3))
    one = from_history(history, "made")
    for request in one.requests:
        steps = history.requests[request.id].steps
        assert one.steps["index"][one.rows(request)].tolist() == [step.index for step in steps]
        total = measure(steps)
        mine = one.steps[one.rows(request)]
        assert (int(mine["accepted"].sum()), int(mine["nodes"].sum())) == (total.accepted, total.drafted)


def test_joined_sides_keep_every_row():
    parts = [side(seed=seed, requests=5) for seed in (1, 2, 3)]
    whole = joined(parts)
    assert len(whole) == sum(map(len, parts))
    at = 0
    for part in parts:
        for request in part.requests:
            mine = whole.requests[at]
            assert whole.tokens(mine).tolist() == part.tokens(request).tolist()
            for row in range(request.count):
                assert whole.part(mine.first + row) == part.part(request.first + row)
            at += 1


def test_an_edited_run_is_read_along_its_last_branch(tmp_path):
    history = make(Made(requests=3))
    first = history.steps
    changed = dataclasses.replace(first[3], step=len(first), branch=1, after=2)
    history.append(changed)
    path = tmp_path / "edited.jsonl"
    write(history, path)
    one = read_side(str(path))
    assert len(one) == sum(len(step.requests) for step in (*first[:3], changed))


def test_large_captures_are_read_in_processes_of_their_own(tmp_path, monkeypatch):
    from specscope.analyze.compare import reading

    paths = [tmp_path / f"{seed}.jsonl" for seed in (1, 2, 3)]
    for seed, path in enumerate(paths, 1):
        write(make(Made(seed=seed, requests=4)), path)
    names = [str(path) for path in paths]
    here = read_sides(names[:2], names[2:])
    monkeypatch.setattr(reading, "LARGE", 0)
    shares: list[float] = []
    apart = read_sides(names[:2], names[2:], shares.append)
    for one, other in zip(here, apart, strict=True):
        assert one.steps.tobytes() == other.steps.tobytes()  # some are NaN
        assert np.array_equal(one.output, other.output)
        assert [capture.source for capture in one.captures] == [capture.source for capture in other.captures]
        assert one.vocabulary.pieces == other.vocabulary.pieces
    (tmp_path / "2.jsonl").write_text("nothing\n")
    with pytest.raises(UserError, match="not a capture"):
        read_sides(names[:2], names[2:])


def write(history, path):
    """The capture of a history."""
    from specscope.trace.wire.capture import CaptureWriter

    writer = CaptureWriter(path, history.run, history.vocabulary)
    for record in sorted(history._known.values(), key=lambda record: record.step):
        writer(record)
    writer.close()


def test_places_and_spans():
    assert places(np.array([5, 5, 5, 2, 7, 7])).tolist() == [0, 1, 2, 0, 0, 1]
    assert slices(np.array([10, 3, 0]), np.array([2, 0, 3])).tolist() == [10, 11, 0, 1, 2]


def test_where_greedy_outputs_part_the_decisions_show_raw_p_and_no_coin():
    """The same capture with another final token after r2's first rejection."""
    a, other = (read_capture(TRACES / "eagle.jsonl").history for _ in range(2))
    request = other.requests["r2"]
    place = next(i for i, step in enumerate(request.steps) if step.verdict and step.verdict.kind.value == "recovered")
    step, at = request.steps[place], request.engine_steps[place]
    changed = dataclasses.replace(step, verdict=dataclasses.replace(step.verdict, token=step.verdict.token + 1))
    record = other.steps[at]
    parts = tuple(changed if part == step else part for part in record.requests)
    b = History(run=other.run, vocabulary=other.vocabulary)
    for position, one in enumerate(other.steps):
        b.append(dataclasses.replace(record, requests=parts) if position == at else one)
    compared = compare(from_history(a, "a"), from_history(b, "b"))
    detail = next(table for table in details(compared) if table.title.startswith("r2 "))
    rows = [dict(zip(detail.columns, row, strict=True)) for row in detail.rows]
    assert {row["what"] for row in rows} == {"rejected", "recovered"}
    tried = [node for node in range(len(step.tree)) if step.verdict.outcome[node]]
    shown = [(f"{step.parents.raw_p[node]:.4f}", f"{step.notes.prob[node]:.4f}") for node in tried]
    assert [(row["raw p"], row["draft p"]) for row in rows if row["what"] == "rejected"][: len(tried)] == shown
    assert {row[name] for row in rows for name in ("p", "coin", "a")} == {NONE}
