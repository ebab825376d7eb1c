"""The codec: records -> spans -> records is exact, in any order of arrival, and loss is counted."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specscope.errors import UserError
from specscope.trace.record.notes import DraftNotes
from specscope.trace.record.records import FinalKind, FinishReason
from specscope.trace.record.tree import ROOT, DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.otlp_json import ReadSpan
from specscope.trace.wire.spans import Encoder, SpanLevel, resource_attributes
from specscope.trace.wire.unspan import Decoder, run_info
from tests.support import records as made
from tests.trace.strategies import RUN, runs, vocabularies

NOTES = ((1, np.float32), (1, np.float32), (0, np.int32), (0, np.int32), (0, np.float32))


def decode(spans):
    decoder = Decoder()
    records = [r for span in spans for r in decoder.feed(span)]
    return decoder, records + decoder.flush()


@given(runs(), vocabularies, st.randoms())
@settings(max_examples=60)
def test_records_survive_the_trip_in_any_order(records, vocabulary, chance):
    encoder = Encoder(RUN, vocabulary)
    spans = [span for record in records for span in encoder.encode(record)]
    assert decode(spans)[1] == records
    chance.shuffle(spans)
    decoder, back = decode(spans)
    assert back == records
    assert decoder.lost == 0
    for record in records:
        for part in record.requests:
            for token in part.tokens():
                assert decoder.vocabulary.pieces[token] == vocabulary.pieces[token]
                assert (token in decoder.vocabulary.special) == (token in vocabulary.special)


@pytest.mark.parametrize("rows", [10, 33, 430])
def test_what_a_long_prompt_fed_is_a_few_texts_that_no_store_cuts(rows):
    """Jaeger's page has a line for each value of an array, and the drawing stands below them."""
    numbers = np.linspace(-1.2345678e-30, 3e38, 3 * rows, dtype=np.float32).reshape(rows, 3)
    numbers[1, 2] = np.nan
    fed = {"fed_token": np.arange(rows, dtype=np.int32) + 2**30, "fed_position": np.arange(rows, dtype=np.int32)}
    tree = DraftTree.build([5], [ROOT])
    notes = DraftNotes(*(np.zeros(n, kind) for n, kind in NOTES), **fed, fed_norms=numbers)
    part = replace(made.part("r0", tree, made.verdict([1], [0], 7, FinalKind.BONUS), emitted=2), notes=notes)
    record = made.record(0, [part], during=made.phases(5))
    spans = Encoder(RUN, Vocabulary(dict.fromkeys((5, 7), b"["))).encode(record)
    [step] = [span for span in spans if span.name == "decode_step"]
    values = {name: value for name, value in step.attributes.items() if "fed_" in name}
    texts = [text for value in values.values() for text in value if isinstance(text, str)]
    assert all(len(text.encode()) <= 2000 for text in texts)
    assert all(len(value) <= 32 for value in values.values())
    lists = {name: value for name, value in step.attributes.items() if isinstance(value, list)}
    whole = {name: value for name, value in lists.items() if not any(each != each for each in value)}  # it loses NaN
    as_page = {name: json.dumps(value) for name, value in whole.items()}
    as_before = {"specscope.draft.fed_token": fed["fed_token"].tolist()}
    for attributes in (step.attributes, step.attributes | as_page, step.attributes | as_before):
        again = [ReadSpan(s.name, s.start_ns, s.end_ns, attributes if s is step else s.attributes) for s in spans]
        decoder, back = decode(again)
        assert (back, decoder.faults.lines()) == ([record], [])


def test_a_request_that_ended_while_it_waited_was_not_admitted():
    waited, ran = made.info("r0", "abc", [1, 2], arrived=5), made.info("r1", "abc", [1, 2], arrived=5, admitted=7)
    ends = (made.end(waited, reason=FinishReason.ERROR, finished=9, error="no room"), made.end(ran, [3], finished=9))
    record = made.record(0, [], during=made.phases(5), admitted=(ran,), finished=ends)
    spans = Encoder(RUN, Vocabulary()).encode(record)
    [queue] = [span for span in spans if span.attributes.get("specscope.request.admitted") is False]
    others = [span for span in spans if span is not queue]
    for place in range(len(others) + 1):
        [back] = decode([*others[:place], queue, *others[place:]])[1]
        assert [end.info for end in back.finished] == [waited, ran]
        assert back.admitted == (ran,)


def test_a_request_ends_as_it_was_admitted_on_that_branch():
    first, again = (
        made.info("r0", "abc", [1, 2], arrived=5, admitted=7),
        made.info("r0", "abc", [1, 2], arrived=5, admitted=20),
    )
    records = [
        made.record(0, [], during=made.phases(5), admitted=(first,)),
        made.record(1, [], during=made.phases(9), finished=(made.end(first, [3], finished=12),)),
        made.record(2, [], during=made.phases(19), admitted=(again,), branch=1, after=-1, rewound=True),
        made.record(3, [], during=made.phases(22), finished=(made.end(again, [4], finished=30),), branch=1),
    ]
    encoder = Encoder(RUN, Vocabulary())
    spans = [span for record in records for span in encoder.encode(record)]
    for seed in range(20):
        random.Random(seed).shuffle(spans)
        assert decode(spans)[1] == records


def test_the_resource_tells_the_run():
    assert run_info(resource_attributes(RUN)) == RUN
    sampled = replace(RUN, sampling="ratio 0.1, keep tau < 1.5")
    assert run_info(resource_attributes(sampled)) == sampled
    with pytest.raises(UserError, match=r"another program \(shop\)"):
        run_info({"service.name": "shop"})


@given(runs(max_steps=2), vocabularies)
@settings(max_examples=20)
def test_ids_links_and_parents_hang_together(records, vocabulary):
    spans = [span for record in records for span in Encoder(RUN, vocabulary).encode(record)]
    assert len({(s.trace, s.id) for s in spans}) == len(spans)
    by_id = {(s.trace, s.id): s for s in spans}
    for span in spans:
        if span.name in ("decode_step", "prefill"):
            assert by_id[span.links[0]].name == "engine_step"
            assert not [key for key in span.attributes if key.startswith("gen_ai")]
        if span.name == "engine_step":
            assert all(by_id[by_id[link].links[0]] is span for link in span.links)
        assert span.of_engine is (span.name == "engine_step")
        assert span.end_ns >= span.start_ns or span.name not in ("engine_step", "queue")


@given(runs(max_steps=2), vocabularies)
@settings(max_examples=20)
def test_levels_hold_less_and_less(records, vocabulary):
    def names(level):
        encoder = Encoder(RUN, vocabulary, level)
        return [s for record in records for s in encoder.encode(record)]

    trees, steps, requests, off = (
        names(level) for level in (SpanLevel.TREES, SpanLevel.STEPS, SpanLevel.REQUESTS, SpanLevel.OFF)
    )
    assert off == []
    assert {s.name for s in requests} <= {"chat a/model", "text_completion a/model"}
    assert len(requests) == sum(len(record.finished) for record in records)
    assert [s.name for s in steps] == [s.name for s in trees]
    assert not any(key.startswith(("specscope.tree", "specscope.verdict")) for s in steps for key in s.attributes)
