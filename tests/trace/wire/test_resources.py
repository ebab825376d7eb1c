"""The resource: two services, what the environment adds, and a draft vocabulary that is told once."""

import dataclasses
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from specscope.errors import UserError
from specscope.trace.record.draft_vocabulary import DRAFT_TOKENS, digest, lacks_draft_tokens, pack
from specscope.trace.record.vocabulary import Vocabulary
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.schema import is_ours
from specscope.trace.wire.sending import SpanSink
from specscope.trace.wire.spans import SpanLevel, brief, engine_resource, resource_attributes
from specscope.trace.wire.unspan import run_info
from tests.trace.samples import records, written
from tests.trace.strategies import RUN

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
