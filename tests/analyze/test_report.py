"""The figures of a report, on histories small enough to count by hand."""

from __future__ import annotations

import dataclasses

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.analyze import tables
from specscope.analyze.report import build_report, by_position
from specscope.analyze.table import told
from specscope.trace.history.history import History
from specscope.trace.history.stats import Acceptance, mean_tau
from specscope.trace.history.totals import Undrafted
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.records import Absent, FinishReason

from .histories import RUN, end, history, info, record, step

FORK = "[(0,),(1,),(0,0)]"  # nodes: 0 and 1 below the root, 2 below 0
A = info("a", "Say hello", {"kind": "chat"})
B = info("b", "def f(", {"kind": "code", "lang": "py"}, temperature=0.5, seed=3)


def small() -> History:
    """Two requests: a with steps without draft, rejected, a whole path; b with a whole chain, then one of three."""
    return history(
        [
            record(0, [step("a", prefill=True)], (1, 2, 10, 3, 4), admitted=(A, B), waiting=1),
            record(1, [step("a", final=40), step("b", "3", (0, 1, 2), (11, 12, 13), 14)], (3, 2, 20, 3, 4)),
            record(
                2,
                [step("a", "2", (), (21, 22), 23), step("b", "3", (0,), (31, 32, 33), 34, emitted=1)],
                (2, 2, 60, 3, 4),
                finished=(end(B, [11, 12, 13, 14, 31], FinishReason.STOP, stop="t13"),),
                blocks_used=25,
                blocks_free=75,
                preempted=("a",),
            ),
            record(
                3,
                [step("a", FORK, (0, 2), (41, 42, 43), 44)],
                (1, 2, 10, 3, 4),
                finished=(end(A, [40, 23, 41, 43, 44]),),
                speculation=False,
                speculation_off="batch above 8",
            ),
        ]
    )


def test_why_steps_drafted_nothing() -> None:
    report = build_report(small(), source="x")
    assert report.undrafted == {Undrafted.NO_MATCH: 1}
    assert report.to_dict()["undrafted"] == [{"reason": "no match", "steps": 1, "share": 1.0}]
    run = dataclasses.replace(RUN, drafter="suffix+eagle", costs="66d9d06db774")
    pays = dataclasses.replace(step("a"), sizing="no draft pays")
    off = record(2, [step("a")], speculation=False, speculation_off="set to off")
    told = build_report(history([record(0, [step("a", "2")]), record(1, [pays, pays]), off], run), source="x")
    shown = next(table for table in tables.tables(told) if table.title == "Steps that drafted nothing")
    assert shown.rows == [("no draft would pay", "2", "66.7%"), ("drafting was off", "1", "33.3%")]
    assert shown.note == "share: of 3 steps without drafts, which are 75.0% of 4 decode steps."


def test_output_in_loops_and_the_length_without_it() -> None:
    novel = [step("a", "2", (), (50, 51), at) for at in range(6)] + [step("b", "2", (0, 1), (60, 61), 62)]
    loop = [step("a", "3", (0, 1, 2), (7, 8, 7), 8)] * 3
    report = build_report(history([record(at, [part]) for at, part in enumerate([*novel, *loop])]), source="x")
    assert (report.loops.tokens, report.loops.looped) == (21, 12)
    assert (report.pooled.tau, report.loops.rest.tau) == (1 + 11 / 10, 1 + 2 / 7)
    assert report.loop_means == ((12 / 18 + 0) / 2, (1 + 3) / 2)
    assert report.to_dict()["loops"]["mean_acceptance_length_without"] == 1 + 2 / 7
    assert {one.id: one.loops.looped for one in report.requests} == {"a": 12, "b": 0}
    rows = tables.acceptance(report).rows
    assert rows[1] == ("τ without steps in loops", "1.29", "2.00")
    assert rows[2] == ("output tokens in loops", "57.1%", "33.3%")
    assert report.warnings[0].startswith("57.1% of 21 output tokens are in loops")
    assert report.warnings[0].endswith("without those steps τ is 1.29 over 7 drafts")
    plain = build_report(small(), source="x")
    assert not any("loops" in line for line in [*plain.warnings, *(row[0] for row in tables.acceptance(plain).rows)])


def test_preemptions_of_steps_whose_own_spans_are_missing_are_unknown() -> None:
    steps = small().steps
    for known, count in ((steps, 1), ([steps[0], dataclasses.replace(steps[1], absent=Absent(engine=True))], None)):
        report = build_report(history(known), source="x")
        assert report.engine.preempted == report.requests[0].preempted == count
        assert dict(tables.engine(report).rows)["preemptions"] == told(count)
        assert "preempted" not in tables.request_facts(report.requests[0]) or count


def test_requests_in_full_worst_acceptance_first() -> None:
    first, second = build_report(small(), source="x").requests
    assert (first.id, first.prompt, first.finish, first.preempted) == ("a", "Say hello", "length", 1)
    assert first.token_ids == [40, 23, 41, 43, 44]
    assert first.origins == ["target", "recovered", "accepted", "accepted", "bonus"]
    assert first.output == "t40 t23 t41 t43 t44 "
    assert first.figures.counts == [2, 1, 1]
    assert (first.queued_s, first.total_s) == (0.002, 3.0)
    assert first.prompt_token_ids == [5, 6, 7]
    assert (second.id, second.stop, second.labels) == ("b", "t13", {"kind": "code", "lang": "py"})
    assert second.token_ids == [11, 12, 13, 14, 31]
    assert second.origins == ["accepted"] * 3 + ["bonus", "accepted"]
    assert second.output == "t11 t12 "  # cut at the stop string
    assert second.pieces == ["t11 ", "t12 ", "t13 ", "t14 ", "t31 "]
    assert second.figures.counts == [2, 2, 1, 1]
    assert second.params == SamplingParams(temperature=0.5, seed=3).to_dict()


def test_runs_with_little_in_them() -> None:
    """No drafts, requests whose admission was dropped; and nothing at all."""
    report = build_report(history([record(0, [step("a"), step("b")])]), source="x")
    assert (report.pooled.tau, report.pooled.rate, report.means.tau, report.pooled.tokens_per_step) == (*[None] * 3, 1)
    assert by_position(report.pooled) == []
    one = report.requests[0]
    assert (one.prompt, one.params, one.queued_s, one.labels, one.prompt_token_ids) == (None, None, None, {}, [])
    report = build_report(History(), source="nothing.jsonl")
    assert report.pooled == Acceptance()
    assert report.engine.tokens_per_s is None
    assert (report.phases, report.requests, report.groups) == ([], [], {})
    assert report.means.tau is None
    assert report.run is None
    assert report.warnings == ["the run's header is missing: its model and settings are unknown"]
    assert orjson.loads(orjson.dumps(report.to_dict())) == report.to_dict()


def test_a_capture_that_was_cut() -> None:
    whole = small()
    whole.requests["a"].end = None
    whole.lost = 4
    report = build_report(whole, source="x", warnings=["the last line is torn"])
    assert report.warnings[0] == "the last line is torn"
    assert "4 records missing" in report.warnings[1]
    [a, _] = report.requests
    assert (a.finish, a.total_s, a.output) == (None, None, "t40 t23 t41 t43 t44 ")


def test_a_character_split_over_tokens_stands_where_it_was_completed() -> None:
    whole = history([record(0, [step("a", "2", (0, 1), (3, 4), 5)])], pieces={3: b"\xe4\xbd", 4: b"\xa0", 5: b"\xe5"})
    [one] = build_report(whole, source="x").requests
    assert one.pieces == ["", "\u4f60", "\ufffd"]
    assert one.output == "\u4f60\ufffd"


draws = st.lists(  # engine steps of (request, length of the chain, accepted)
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 4), st.integers(0, 4)), max_size=4, unique_by=lambda t: t[0]
    ),
    max_size=8,
)


@settings(max_examples=30, deadline=None)
@given(draws)
def test_the_parts_add_up(steps: list[list[tuple[str, int, int]]]) -> None:
    infos = tuple(info(name, "", {"kind": "left" if name in "ab" else "right"}) for name in "abcd")
    records = [
        record(
            n,
            [step(name, str(k) if k else None, range(min(k, took))) for name, k, took in parts],
            admitted=infos if n == 0 else (),
        )
        for n, parts in enumerate(steps)
    ]
    report = build_report(history(records), source="x")
    pooled = report.pooled
    for parts in ([g.figures for g in report.groups.get("kind", [])], [r.figures for r in report.requests]):
        total = Acceptance()
        for part in parts:
            total.merge(part)
        assert total == pooled
    assert report.means.tau == mean_tau([one.figures for one in report.requests])
    assert sum(p.accepted for p in by_position(report.pooled)) == pooled.accepted
    assert sum(len(one.token_ids) for one in report.requests) == pooled.emitted
    taus = [one.figures.tau for one in report.requests]
    known = [tau for tau in taus if tau is not None]
    assert taus == sorted(known) + [None] * (len(taus) - len(known))
    assert orjson.loads(orjson.dumps(report.to_dict())) == report.to_dict()
