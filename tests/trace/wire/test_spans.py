"""The codec: records -> spans -> records is exact in any order; a request's own span, and the resource of a run."""

import dataclasses
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from specscope.errors import UserError
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS, digest, lacks_draft_tokens, pack
from specscope.trace.record.notes import DraftNotes
from specscope.trace.record.params import SamplingParams
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import FinalKind, FinishReason
from specscope.trace.record.tree import ROOT, DraftTree
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.capture import span_json
from specscope.trace.wire.otlp_json import ReadSpan
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.schema import is_ours
from specscope.trace.wire.sending import SpanSink, readable
from specscope.trace.wire.spans import INTERNAL, MESSAGE, SERVER, SpanLevel, brief, engine_resource, resource_attributes
from specscope.trace.wire.unspan import run_info
from tests.support import records as made
from tests.trace.samples import NS, decode, encoded, records, verdict, written
from tests.trace.samples import record as sample
from tests.trace.strategies import RUN, runs, vocabularies

NOTES = ((1, np.float32), (1, np.float32), (0, np.int32), (0, np.int32), (0, np.float32))


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
    spans = encoded([record], RUN, Vocabulary(dict.fromkeys((5, 7), b"[")))
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
    spans = encoded([record])
    [queue] = [span for span in spans if span.attributes.get("specscope.request.admitted") is False]
    others = [span for span in spans if span is not queue]
    for place in range(len(others) + 1):
        [back] = decode([*others[:place], queue, *others[place:]])[1]
        assert [end.info for end in back.finished] == [waited, ran]
        assert back.admitted == (ran,)


@given(runs(max_steps=2), vocabularies)
@settings(max_examples=10)
def test_ids_links_and_parents_hang_together(records, vocabulary):
    spans = encoded(records, RUN, vocabulary)
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
@settings(max_examples=10)
def test_levels_hold_less_and_less(records, vocabulary):
    trees, steps, requests, off = (
        encoded(records, RUN, vocabulary, level)
        for level in (SpanLevel.TREES, SpanLevel.STEPS, SpanLevel.REQUESTS, SpanLevel.OFF)
    )
    assert off == []
    assert {s.name for s in requests} <= {"chat a/model", "text_completion a/model"}
    assert len(requests) == sum(len(record.finished) for record in records)
    assert [s.name for s in steps] == [s.name for s in trees]
    assert not any(key.startswith(("specscope.tree", "specscope.verdict")) for s in steps for key in s.attributes)


VOCABULARY = Vocabulary({i: b"x%d " % i for i in range(60000)})


def root(finished=None, run=RUN, level=SpanLevel.TREES, **info):
    """The root span of the sample run, of which the end and the request may be changed."""
    first, *middle, last = records()
    about = dataclasses.replace(first.admitted[0], **info)
    end = dataclasses.replace(last.finished[0], info=about, **(finished or {}))
    told = [dataclasses.replace(first, admitted=(about,)), *middle, dataclasses.replace(last, finished=(end,))]
    return encoded(told, run, VOCABULARY, level)[-1]


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
    run = dataclasses.replace(RUN, privacy=Privacy.NO_TEXT, target="Qwen3-30B-A3B-Instruct")
    spans = encoded(deep(300, depth), run, VOCABULARY, SpanLevel.REQUESTS)
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
    assert (failed.error, failed.attributes["error.type"]) == ("the form allows nothing", "_OTHER")
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
    spans = encoded(records(), RUN, VOCABULARY)
    [of_request] = [span for span in spans if "specscope.bonus" in span.attributes]
    for name in ("specscope.steps", "specscope.bonus"):
        del of_request.attributes[name]
    assert [end.figures for record in decode(spans)[1] for end in record.finished] == [None]


KNOWN = np.sort(np.random.default_rng(0).choice(128_000, 32_000, replace=False))  # as EAGLE-3 heads have
HEAD = dataclasses.replace(RUN, draft_vocab=len(KNOWN), draft_tokens=pack(KNOWN))


def parts(path):
    """(resource, spans) of each part of each line."""
    for line in path.read_text().splitlines():
        for part in json.loads(line)["resourceSpans"]:
            resource = {each["key"]: each["value"].get("stringValue") for each in part["resource"]["attributes"]}
            yield resource, part["scopeSpans"][0]["spans"]


def sent(run=RUN, level=SpanLevel.TREES, **more):
    """What goes to an endpoint."""
    spans = []
    sender = SimpleNamespace(put=spans.extend, lost=Counter(), close=lambda: None)
    sink = SpanSink(sender, run, Vocabulary(), level, **more)
    for record in records():
        sink(record)
    sink.close()
    return spans


@pytest.mark.parametrize(
    ("name", "service", "attributes", "expected"),
    [
        ("", "", "", "specscope"),
        ("", "", "service.name=shop%20llm,k8s.pod.name=p-1", "shop llm"),
        ("", "chat", "service.name=shop,k8s.pod.name=p-1", "chat"),
        ("given", "chat", "service.name=shop", "given"),
    ],
)
def test_requests_and_engine_steps_are_under_two_services(monkeypatch, tmp_path, name, service, attributes, expected):
    monkeypatch.setenv("OTEL_SERVICE_NAME", service)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", attributes)
    by_service = {}
    for resource, spans in parts(written(tmp_path / "run.jsonl", service=name)):
        assert resource.get("k8s.pod.name") == ("p-1" if "p-1" in attributes else None)
        by_service.setdefault(resource["service.name"], set()).update(span["name"] for span in spans)
    assert by_service == {
        expected: {"queue", "prefill", "decode_step", "text_completion a/model"},
        f"{expected} engine": {"engine_step"},
    }
    over_otlp = {}
    for span in sent(service=name):
        over_otlp.setdefault(span.resource.attributes["service.name"], set()).add(span.name)
        mine = Resource(brief(resource_attributes(RUN, name)))
        told = Resource(engine_resource(mine.attributes)) if span.name == "engine_step" else mine
        assert span.resource.attributes == told.attributes
    assert over_otlp == by_service


def test_the_environment_is_read_as_the_sdk_reads_it(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "a=b%2Cc, d = e ,broken,service.instance.id=p,specscope.run.id=x")
    told = resource_attributes(RUN)
    detected = dict(OTELResourceDetector().detect().attributes)
    assert {name: told[name] for name in ("a", "d", "service.instance.id", "service.name")} == {
        name: detected[name] for name in ("a", "d", "service.instance.id", "service.name")
    }
    assert told["specscope.run.id"] == RUN.run_id
    assert run_info(told) == run_info(engine_resource(told)) == RUN
    assert is_ours(told)
    assert is_ours({"service.name": "specscope engine"})  # damaged, and not another service's
    assert not is_ours({"service.name": "vllm"})
    sampled = dataclasses.replace(RUN, sampling="ratio 0.1, keep tau < 1.5")
    assert run_info(resource_attributes(sampled)) == sampled
    with pytest.raises(UserError, match=r"another program \(shop\)"):
        run_info({"service.name": "shop"})


def test_the_resource_of_a_run_with_a_head_has_at_most_1500_bytes():
    run = read_capture(Path(__file__).parents[3] / "traces" / "eagle.jsonl").history.run
    assert run.draft_tokens
    digests = {"target_digest": "0123456789abcdef" * 2, "draft_digest": "0123456789abcdef" * 2}
    paths = {"target_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "draft_path": "specscope/heads/SmolLM2-135M"}
    more = {"costs": "0123456789abcdef", "sampling": "ratio 0.01, keep tau < 1.5 or error"}
    parts = encode_spans(sent(dataclasses.replace(run, **digests, **paths, **more))).resource_spans
    assert len(parts) == 2
    assert max(part.resource.ByteSize() for part in parts) <= 1500


def test_a_file_has_the_draft_vocabulary_once_and_is_read_from_any_line_on(tmp_path):
    path = written(tmp_path / "run.jsonl", run=HEAD)
    assert path.read_text().count(HEAD.draft_tokens) == 1
    assert [resource[DRAFT_TOKENS] for resource, _ in parts(path)][1:] == [digest(HEAD.draft_tokens)] * 2
    whole = read_capture(path)
    assert whole.history.run == HEAD
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*others, first]))
    assert read_capture(path).history.run == HEAD
    path.write_bytes(b"".join(others))
    alone = read_capture(path)
    assert alone.history.run == dataclasses.replace(HEAD, draft_tokens=digest(HEAD.draft_tokens))
    assert lacks_draft_tokens(alone.history.run)
    assert alone.history.steps == whole.history.steps
    other = dataclasses.replace(HEAD, draft_tokens=pack(KNOWN[1:]), draft_vocab=len(KNOWN) - 1)
    wrong = first.replace(HEAD.draft_tokens.encode(), other.draft_tokens.encode())
    path.write_bytes(b"".join([*others, wrong]))
    assert lacks_draft_tokens(read_capture(path).history.run)  # another run's


def test_over_otlp_it_is_in_the_first_span_alone():
    told = [span.attributes.get(DRAFT_TOKENS) for span in sent(HEAD)]
    assert told[0] == HEAD.draft_tokens
    assert not any(told[1:])
    assert {span.resource.attributes[DRAFT_TOKENS] for span in sent(HEAD)} == {digest(HEAD.draft_tokens)}
    assert not any(DRAFT_TOKENS in span.attributes for span in sent(HEAD, SpanLevel.REQUESTS))
    assert not any(DRAFT_TOKENS in span.attributes for span in sent(RUN))
