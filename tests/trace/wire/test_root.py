"""A request's own span: its figures, the GenAI conventions, its labels, and that it is small."""

import dataclasses
import json

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinishReason
from specscope.trace.record.tree import DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import span_json
from specscope.trace.wire.sending import readable
from specscope.trace.wire.spans import INTERNAL, MESSAGE, SERVER, Encoder, SpanLevel
from tests.support import records as made
from tests.trace.samples import NS, records, verdict
from tests.trace.samples import record as sample
from tests.trace.strategies import RUN
from tests.trace.wire.test_spans import decode

VOCABULARY = Vocabulary({i: b"x%d " % i for i in range(60000)})


def root(finished=None, run=RUN, level=SpanLevel.TREES, **info):
    """The root span of the sample run, of which the end and the request may be changed."""
    first, *middle, last = records()
    about = dataclasses.replace(first.admitted[0], **info)
    end = dataclasses.replace(last.finished[0], info=about, **(finished or {}))
    encoder = Encoder(run, VOCABULARY, level)
    told = [dataclasses.replace(first, admitted=(about,)), *middle, dataclasses.replace(last, finished=(end,))]
    return [span for record in told for span in encoder.encode(record)][-1]


def size(span):
    """Bytes of a span as the official exporters send it."""
    request = encode_spans([readable(span, Resource({}))])
    return request.resource_spans[0].scope_spans[0].spans[0].ByteSize()


def test_it_tells_what_the_request_came_to():
    told = root().attributes
    figures = {
        "specscope.steps": 3,
        "specscope.drafts": 2,
        "specscope.drafted": 5,
        "specscope.accepted": 3,
        "specscope.emitted": 6,
        "specscope.tau": 2.5,
        "specscope.acceptance_rate": 0.6,
        "specscope.bonus": 1,
        "specscope.recovered": 1,
        "specscope.accepted_by_depth": [2, 1],
        "specscope.drafted_by_depth": [2, 2],
        "specscope.tried_by_depth": [2, 2],
        "gen_ai.latency.time_in_queue": 0.001,
        "gen_ai.latency.e2e": 1.001,
    }
    assert {name: told[name] for name in figures} == figures
    assert json.loads(told["specscope.undrafted"]) == {"no match": 1}
    assert told["gen_ai.latency.time_to_first_token"] == (records()[1].end_ns - NS + 10**6) / 1e9


def deep(steps, depth):
    """Records of a request whose drafts are this deep."""
    params = SamplingParams(temperature=0.7, top_k=50, top_p=0.95, seed=2**62, stop=("\n\n",))
    labels, caller = {"kind": "code", "tenant": "a" * 36}, f"00-{2**127:032x}-{2**63:016x}-01"
    more = {"title": "title", "traceparent": caller, "chat": True, "served": True, "params": params}
    name, prompt = "chatcmpl-0123456789abcdef0123456789abcdef", "p" * 10000
    info = made.info(name, prompt, np.arange(5000), labels, arrived=NS, admitted=NS + 10**9, **more)
    tree = DraftTree.build(list(range(depth)), list(range(-1, depth - 1)))
    bonus = verdict(tree, [1] * depth, list(range(depth)), 7, "bonus")
    part = made.part(info.id, tree, bonus, emitted=depth + 1, index=0, context=5, prefill=0, drafter="ngram")
    end = made.end(info, list(range(40000, 40000 + 4000)), finished=NS + 10**11)
    told = [sample(step, (part,)) for step in range(steps - 1)]
    return [*told, sample(steps - 1, (part,), finished=(end,))]


@pytest.mark.parametrize("depth", [1, 8, 40])
def test_without_text_it_has_at_most_1500_bytes(depth):
    encoder = Encoder(dataclasses.replace(RUN, privacy=Privacy.NO_TEXT, target="Qwen3-30B-A3B-Instruct"), VOCABULARY)
    encoder.level = SpanLevel.REQUESTS
    spans = [span for record in deep(300, depth) for span in encoder.encode(record)]
    assert len(spans) == 1
    assert spans[0].attributes["specscope.drafted"] == 300 * depth
    assert len(spans[0].attributes["specscope.accepted_by_depth"]) == min(depth, 8)
    assert size(spans[0]) <= 1500


def test_a_label_is_an_attribute_of_its_own_that_can_be_searched_for():
    told = root(labels={"kind": "code", "long": "x" * 201, "": "no name"}).attributes
    assert {name: v for name, v in told.items() if name.startswith("specscope.label.")} == {
        "specscope.label.kind": "code"
    }
    assert json.loads(told["specscope.request.labels"])["long"] == "x" * 201
    many = root(labels={f"k{i}": "v" for i in range(100)}).attributes
    assert sum(name.startswith("specscope.label.") for name in many) == 16
    private = root(run=dataclasses.replace(RUN, privacy=Privacy.NO_TEXT), labels={"kind": "code"}).attributes
    assert not [name for name in private if name.startswith("specscope.label.")]


def test_it_is_named_by_what_was_asked_and_served_where_it_came_over_http():
    assert (root().name, root().kind) == ("text_completion a/model", INTERNAL)
    chat = root(chat=True, served=True)
    assert (chat.name, chat.kind) == ("chat a/model", SERVER)
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    private = root(run=dataclasses.replace(RUN, privacy=Privacy.NO_TOKENS), chat=True, title="the question")
    assert private.name == "chat a/model"


def test_a_request_that_failed_has_status_error_and_why():
    failed = root({"reason": FinishReason.ERROR, "error": "the form allows nothing"})
    assert failed.error == "the form allows nothing"
    assert failed.attributes["error.type"] == "_OTHER"
    assert span_json(failed)["status"] == {"code": 2, "message": "the form allows nothing"}
    assert root({"reason": FinishReason.CANCELLED}).error is None
    assert span_json(root())["status"] == {}


def test_messages_are_the_conventions_and_bounded():
    told = root(chat=True, title="What is this?").attributes
    assert json.loads(told["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "What is this?"}]}
    ]
    output = {"role": "assistant", "parts": [{"type": "text", "content": "x19 x20 x22 x31 x32 x33 "}]}
    assert json.loads(told["gen_ai.output.messages"]) == [output | {"finish_reason": "length"}]
    asked = json.loads(root(prompt="p" * MESSAGE + "end").attributes["gen_ai.input.messages"])[0]["parts"][0]["content"]
    assert asked == "…" + ("p" * MESSAGE + "end")[-MESSAGE:]
    ids = json.loads(root(prompt="").attributes["gen_ai.input.messages"])[0]["parts"][0]["content"]
    assert ids == "x11 x12 x13 "
    long = {"output": np.full(3000, 7, np.int32), "reason": FinishReason.EOS}
    answer = json.loads(root(long).attributes["gen_ai.output.messages"])[0]
    assert answer["parts"][0]["content"] == ("x7 " * 3000)[:MESSAGE] + "…"
    assert answer["finish_reason"] == "stop"
    for privacy in (Privacy.NO_TEXT, Privacy.NO_TOKENS):
        private = root(run=dataclasses.replace(RUN, privacy=privacy)).attributes
        assert not [name for name in private if name.endswith("messages")]


def test_captures_of_before_have_no_figures_and_are_read():
    encoder = Encoder(RUN, VOCABULARY)
    spans = [span for record in records() for span in encoder.encode(record)]
    [of_request] = [span for span in spans if "specscope.bonus" in span.attributes]
    for name in ("specscope.steps", "specscope.bonus"):
        del of_request.attributes[name]
    assert [end.figures for record in decode(spans)[1] for end in record.finished] == [None]
