"""What a trace store or a collector keeps of a run: any order, any traces and spans left out. What is there is read."""

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specscope.analyze.verify.trial import judge
from specscope.trace.record.records import Absent
from specscope.trace.wire import unspan
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.schema import read_engine
from specscope.trace.wire.spans import Encoder, resource_attributes
from tests.trace.strategies import RUN, runs, vocabularies

TRACES = Path(__file__).parents[3] / "traces"
HEALTHY = ("eagle", "evidence", "ngram", "sampled")


def encoded(run, vocabulary, records):
    encoder = Encoder(run, vocabulary)
    return [span for record in records for span in encoder.encode(record)]


def read_back(folder, run, spans):
    path = folder / "part.jsonl"
    resource = resource_attributes(run)
    path.write_bytes(line_json(resource, []) + b"".join(line_json(resource, [span]) for span in spans))
    return read_capture(path)


def by_trace(spans):
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace].append(span)
    return list(traces.values())


def parts(records):
    return {(record.step, part.request): part for record in records for part in record.requests}


def sent_parts(spans):
    """Which parts of requests in steps are among the spans."""
    steps = [span for span in spans if span.name in ("decode_step", "prefill")]
    return {
        (span.attributes["specscope.step"], span.attributes["specscope.request.id"])
        for span in steps
        if span.attributes.get("specscope.prefill.reaches_root") is not True
    }


shares = st.sampled_from([0.5, 0.9, 1.0])
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]  # a busy machine draws few runs in a second


@given(runs(max_steps=6), vocabularies, st.randoms(use_true_random=False), shares, st.sampled_from([1, 64]))
@settings(max_examples=50, suppress_health_check=SLOW, deadline=None)
def test_every_step_that_is_there_is_read_and_none_is_invented(
    tmp_path, monkeypatch, records, vocabulary, chance, share, behind
):
    """`behind`: with 1, most files are read twice; with 64, none is."""
    monkeypatch.setattr(unspan, "STEPS_BEHIND", behind)
    spans = encoded(RUN, vocabulary, records)
    kept = [span for span in spans if chance.random() < share]
    chance.shuffle(kept)
    reader = read_back(tmp_path, RUN, kept)
    back = reader.history
    known = [back.knows(record.step) for record in records]
    known = [record for record in known if record is not None]
    came, sent = parts(known), parts(records)
    assert came.keys() == sent_parts(kept)
    assert all(part == sent[place] for place, part in came.items())
    assert {end.info.id for record in known for end in record.finished} == {
        span.attributes["specscope.request.id"] for span in kept if span.name.endswith(f" {RUN.target}")
    }
    for record in known:
        whole = records[record.step]
        if record.absent is None:
            assert replace(record, finished=()) == replace(whole, finished=(), after=record.after)
        elif record.is_timed:
            assert record.batch == whole.batch
            assert (record.phases, record.waiting) == (whole.phases, whole.waiting)
        if record.absent is not None and not record.absent.engine:
            assert {*record.absent.names} == {p.request for p in whole.requests} - {p.request for p in record.requests}
    absent = [record.absent for record in known]
    steps = any(r.requests or r.admitted or r.absent is None or not r.absent.engine for r in known)
    assert back.in_part == (steps and any(what is not None for what in absent))  # requests' own spans alone are no part
    assert not back.in_part or len(kept) < len(spans)


@given(runs(max_steps=3), vocabularies)
@settings(max_examples=60)
def test_requests_alone_tell_what_the_engine_did(records, vocabulary):
    spans = encoded(RUN, vocabulary, records)
    decoder = unspan.Decoder()
    alone = [span for span in spans if span.name in ("decode_step", "prefill")]
    back = [r for s in alone for r in decoder.feed(s)] + decoder.flush()
    with_parts = [record for record in records if record.requests]
    assert [record.step for record in back] == [record.step for record in with_parts]
    for record, sent in zip(back, with_parts, strict=True):
        gone = 0 if sent.left_out is None else sent.left_out.requests
        assert record.absent == Absent(gone, engine=True, steps=record.absent.steps)
        told = {"preempted": (), "admitted": (), "finished": (), "passes": (), "device_ns": (), "flight": None}
        told |= {"left_out": None, "aggregate": None, "absent": record.absent, "after": record.after}
        off = {} if not sent.speculation else {"speculation_off": ""}
        assert record == replace(sent, **told, **off)


@given(st.text(max_size=60))
def test_any_other_text_is_damage(text):
    with pytest.raises(unspan.DamagedError, match=r"specscope\.engine"):
        read_engine(text)


@pytest.mark.parametrize("older", [False, True], ids=["now", "older"])
@pytest.mark.parametrize("name", HEALTHY)
def test_verify_convicts_no_healthy_run_of_which_traces_are_missing(tmp_path, name, older):
    history = read_capture(TRACES / f"{name}.jsonl").history
    spans = encoded(history.run, history.vocabulary, history.steps)
    if older:
        spans = [span._replace(attributes=without(span.attributes, "specscope.engine")) for span in spans]
    for seed in range(3):
        chance = random.Random(seed)
        traces = [trace for trace in by_trace(spans) if chance.random() < 0.75]
        kept = [span for trace in traces for span in trace if chance.random() < (0.95, 1.0, 0.8)[seed]]
        chance.shuffle(kept)
        reader = read_back(tmp_path, history.run, kept)
        assert parts(reader.history.steps).keys() == sent_parts(kept)
        assert reader.history.in_part
        trial = judge(reader.history, source=name, warnings=reader.warnings)
        assert not [(check.name, check.detail, check.note) for check in trial.failed]
        chances = [check for check in trial.groups[-1].checks if check.p_value is not None]
        assert not [check for check in trial.checks if check.p_value is None and "part of its run" in check.note]
        assert [check.name for check in chances if "part of its run" not in check.note] == []


def without(attributes, name):
    return {key: value for key, value in attributes.items() if key != name}
