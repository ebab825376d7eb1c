"""A side holds each request's decode steps, from one capture or several, and figures agree with the report."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest

from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.figures import clustered, figures
from specscope.analyze.compare.side import from_history, read_side, read_sides
from specscope.analyze.compare.tables import details
from specscope.analyze.table import NONE
from specscope.errors import UserError
from specscope.trace.history.history import History
from specscope.trace.wire.reading import read_capture

from .runs import Made, make, write

TRACES = Path(__file__).parents[3] / "traces"
CAPTURES = [TRACES / f"{name}.jsonl" for name in ("eagle", "ngram", "sampled", "planted")]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_requests_are_read_one_by_one_and_figures_agree_with_the_report(path):
    one, history = read_side(str(path)), read_capture(path).history
    assert [request.id for request in one.requests] == list(history.requests)
    for request, known in zip(one.requests, history.requests.values(), strict=True):
        steps = [step for step in known.steps if step.verdict is not None]
        assert one.steps(request) == steps
        assert one.tokens(request).tolist() == [token for token, _ in known.output()]
        begins = [sum(step.emitted for step in steps[:number]) for number in range(len(steps))]
        assert one.place[one.rows(request)].tolist() == begins
        mine = one.columns.depth_reached[one.rows(request)]
        assert (request.info, int(mine.sum())) == (known.info, known.acceptance.accepted)
    told = {figure.name: figure.a for figure in figures(*clustered(one, one, []))}
    total = history.acceptance
    assert (told["tau"], told["rate"]) == pytest.approx((total.tau, total.rate))
    assert told["tokens per step"] == pytest.approx(total.emitted / total.steps)
    for depth, (rate, proposed) in enumerate(zip(total.per_position_corrected, total.proposed_at, strict=True), 1):
        if proposed >= 30:
            assert told[f"depth {depth} rate"] == pytest.approx(rate)


def test_large_captures_are_read_in_processes_of_their_own(tmp_path, monkeypatch):
    from specscope.analyze.compare import side

    paths = [tmp_path / f"{seed}.jsonl" for seed in (1, 2, 3)]
    for seed, path in enumerate(paths, 1):
        write(make(Made(seed=seed, requests=4)), path)
    names = [str(path) for path in paths]
    here = read_sides(names[:2], names[2:])
    monkeypatch.setattr(side, "LARGE", 0)
    shares: list[float] = []
    apart = read_sides(names[:2], names[2:], shares.append)
    for one, other in zip(here, apart, strict=True):
        assert one.columns.parts == other.columns.parts
        assert len(pickle.dumps(one)) < len(pickle.dumps(one.columns.parts))  # it is sent as its columns lie
        assert np.array_equal(one.batch, other.batch)
        assert [capture.source for capture in one.captures] == [capture.source for capture in other.captures]
        assert one.vocabulary.pieces == other.vocabulary.pieces
    (tmp_path / "2.jsonl").write_text("nothing\n")
    with pytest.raises(UserError, match="not a capture"):
        read_sides(names[:2], names[2:])


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
