"""Spans are decoded many at once, in any order, with any of them left out: what is there is read, and damage named."""

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from typing_extensions import TypeAliasType

from specscope.analyze.verify.trial import judge
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import Absent
from specscope.trace.wire import unspan
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.codec import unaliased
from specscope.trace.wire.otlp_json import ReadSpan, all_elements, elements
from specscope.trace.wire.otlp_proto import read_request
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.schema import read_engine
from specscope.trace.wire.spans import resource_attributes
from specscope.trace.wire.unspan import Decoder
from tests.trace.samples import decode, encoded, records
from tests.trace.strategies import RUN, runs, vocabularies

SPECIAL = {math.inf: "Infinity", -math.inf: "-Infinity"}


def array(values):
    """An array as the official exporter writes it."""
    each = [
        {"intValue": str(value)}
        if isinstance(value, int)
        else {"doubleValue": value if math.isfinite(value) else SPECIAL.get(value, "NaN")}
        for value in values
    ]
    return Raw(json.dumps({"values": each}, separators=(",", ":")).encode())


@given(st.lists(st.lists(st.floats()) | st.none(), max_size=5), st.lists(st.lists(st.integers(0, 9)), max_size=5))
def test_arrays_that_are_read_together_are_what_each_is(floats, ints):
    for is_float, arrays in ((True, floats), (False, ints)):
        raws = [None if each is None else array(each) for each in arrays if each != []]
        values, counts = all_elements(raws, floats=is_float)
        alone = [[] if raw is None else elements(raw) for raw in raws]
        assert counts.tolist() == list(map(len, alone))
        assert json.dumps(values) == json.dumps([value for each in alone for value in each])  # NaN is NaN


@pytest.mark.parametrize("values", [[1, 2], [0.5, float("inf")], [0.5, 1], ["0.5"], [0.5, "a"], [True, None]])
def test_an_array_of_protobuf_may_hold_values_of_one_kind_or_of_several(values):
    name = {float: "double_value", int: "int_value", str: "string_value", bool: "bool_value"}
    sent = [AnyValue(**({} if value is None else {name[type(value)]: value})) for value in values]
    pair = KeyValue(key="a", value=AnyValue(array_value=ArrayValue(values=sent)))
    span = Span(name="decode_step", attributes=[pair]).SerializeToString()
    request = TracesData(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[Span.FromString(span)])])])
    [(_, [read])] = read_request(request.SerializeToString())
    assert read.attributes == {"a": values}


@pytest.mark.parametrize(
    "text",
    [
        '{"values":[{"doubleValue":{"doubleValue":1}}]}',
        '{"values":[{"doubleValue":1},{"intValue":"2"}]}',
        '{"values":[{"doubleValue":"much"}]}',
        '{"values":[{"doubleValue":1},{"doubleValue":null}]}',
        '{"values":[ {"doubleValue":1}]}',
        '{"values":[{"stringValue":"1"}]}',
        "{}",
    ],
)
def test_an_array_in_another_form_is_left_to_the_one_that_reads_any(text):
    assert all_elements([array([0.5]), Raw(text.encode())], floats=True) is None


@pytest.mark.parametrize("nameless", [False, True])
def test_what_is_damaged_among_many_is_named_and_the_others_are_read(nameless):
    """Three of forty steps are damaged, each in another way; what stands beside them is as it was sent."""
    change = {
        7: {"specscope.verdict.p": [0.5]},
        8: {"specscope.accepted": 9},
        30: {"specscope.parents": '{"node":[7]}'},
    }
    sent = next(record for record in records() if record.requests and len(record.requests[0].tree) == 2)
    spans = [each for each in encoded([sent]) if each.name == "decode_step"]
    many = [
        ReadSpan("decode_step", 0, 1, spans[0].attributes | {"specscope.request.id": f"r{i}"} | change.get(i, {}))
        for i in range(40)
    ]
    decoder = Decoder(Privacy.NO_TOKENS if nameless else Privacy.EVERYTHING)
    [record] = [*decoder.feed(*many), *decoder.flush()]
    assert [part.request for part in record.requests] == [f"r{i}" for i in range(40) if i not in change]
    assert decoder.faults.total == 3
    alone = []
    for i in change:
        other = Decoder(decoder.privacy)
        other.feed(many[i])
        alone += other.faults.lines()
    assert sorted(decoder.faults.lines()) == sorted(alone)
    for part in record.requests:
        assert part.verdict.coin.tolist() == sent.requests[0].verdict.coin.tolist()
        assert (part.tokens() == sent.requests[0].tokens()) is not nameless


Scalar = TypeVar("Scalar", bound=np.generic)
AsOfNumpy25 = TypeAliasType("AsOfNumpy25", np.ndarray[tuple[Any, ...], np.dtype[Scalar]], type_params=(Scalar,))


def test_an_array_is_one_where_numpy_declares_it_as_an_alias_and_other_types_stay_what_they_are():
    for dtype in (np.int32, np.float32, np.bool_):
        assert unaliased(AsOfNumpy25[dtype]) == np.ndarray[tuple[Any, ...], np.dtype[dtype]]
    for kind in (int, str | None, tuple[int, ...], np.ndarray, np.ndarray[tuple[Any, ...], np.dtype[np.int32]]):
        assert unaliased(kind) == kind


TRACES = Path(__file__).parents[3] / "traces"


HEALTHY = ("eagle", "evidence", "ngram", "sampled")


def read_back(folder, run, spans):
    path = folder / "part.jsonl"
    resource = resource_attributes(run)
    path.write_bytes(line_json(resource, []) + b"".join(line_json(resource, [span]) for span in spans))
    return read_capture(path)


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
@settings(max_examples=10, suppress_health_check=SLOW, deadline=None)
def test_every_step_that_is_there_is_read_and_none_is_invented(
    tmp_path, monkeypatch, records, vocabulary, chance, share, behind
):
    """`behind`: with 1, most files are read twice; with 64, none is."""
    monkeypatch.setattr(unspan, "STEPS_BEHIND", behind)
    spans = encoded(records, RUN, vocabulary)
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


def test_a_step_of_which_spans_are_lost_is_given_once_it_is_overdue_and_those_behind_it_too():
    run = records()
    spans = [span for span in encoded(run) if span.attributes.get("specscope.step") != run[1].step]
    decoder, begun = Decoder(), time.monotonic()
    given = [record.step for span in spans for record in decoder.feed(span)]
    assert given == [run[0].step]
    assert decoder.overdue(begun) == []
    assert [record.step for record in decoder.overdue(time.monotonic())] == [record.step for record in run[2:]]
    assert decoder.missing["whole engine step"] == 1


@given(runs(max_steps=3), vocabularies)
@settings(max_examples=15)
def test_requests_alone_tell_what_the_engine_did(records, vocabulary):
    spans = encoded(records, RUN, vocabulary)
    _, back = decode([span for span in spans if span.name in ("decode_step", "prefill")])
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


@pytest.mark.every(2)
@pytest.mark.parametrize("older", [False, True], ids=["now", "older"])
@pytest.mark.parametrize("name", HEALTHY)
def test_verify_convicts_no_healthy_run_of_which_traces_are_missing(tmp_path, name, older):
    history = read_capture(TRACES / f"{name}.jsonl").history
    spans = encoded(history.steps, history.run, history.vocabulary)
    if older:
        for span in spans:
            span.attributes.pop("specscope.engine", None)
    for seed in range(3):
        chance = random.Random(seed)
        traces = {trace for trace in dict.fromkeys(span.trace for span in spans) if chance.random() < 0.75}
        kept = [span for span in spans if span.trace in traces and chance.random() < (0.95, 1.0, 0.8)[seed]]
        chance.shuffle(kept)
        reader = read_back(tmp_path, history.run, kept)
        assert parts(reader.history.steps).keys() == sent_parts(kept)
        assert reader.history.in_part
        trial = judge(reader.history, source=name, warnings=reader.warnings)
        assert not [(check.name, check.detail, check.note) for check in trial.failed]
        chances = [check for check in trial.groups[-1][1] if check.p_value is not None]
        assert not [check for check in trial.checks if check.p_value is None and "part of the run" in check.note]
        assert [check.name for check in chances if "part of the run" not in check.note] == []
