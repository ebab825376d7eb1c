"""Any part of a healthy run: requests that lost their KV, whose beginnings or engine steps are not in the file."""

import gzip
import random
from pathlib import Path

import pytest

from specscope import SamplingParams
from specscope.analyze.verify.trial import judge
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder, resource_attributes
from tests.engines import HEAD, pressed

# A run of 5301d291, whose engine had a prefix cache, and too few blocks: requests lose their KV and find some of it.
OLD = Path(__file__).parents[2] / "data" / "before_deletion" / "prefix_cache_crowded.jsonl.gz"
SHARES = {"half": 0.5, "most": 0.97, "all": 1.0}


@pytest.fixture(scope="module", params=["plain", "prefix cache"])
def spans(request, engines, tmp_path_factory):
    """The spans of a run in which requests lose their KV, and its resource."""
    if request.param == "prefix cache":
        path = tmp_path_factory.mktemp("old") / "run.jsonl"
        path.write_bytes(gzip.decompress(OLD.read_bytes()))
        history = read_capture(path).history
        assert any(part.found for record in history.steps for part in record.requests)
        return spans_of(history.run, history.vocabulary, history.steps)
    engine = engines["ngram"]
    pressed(engine, 8)
    for i in range(6):
        engine.add(HEAD[: 20 + 7 * i], SamplingParams(max_tokens=40, temperature=0.8, seed=i, ignore_eos=True))
    records = []
    while engine.busy:
        records.append(engine.step())
    return spans_of(engine.run_info, engine.vocabulary, records)


def spans_of(run, vocabulary, records):
    assert any(record.preempted for record in records)
    encoder = Encoder(run, vocabulary)
    return [span for record in records for span in encoder.encode(record)], resource_attributes(run)


def judged(folder, spans, resource):
    path = folder / "part.jsonl"
    path.write_bytes(b"".join(line_json(resource, part) for part in ([], *([span] for span in spans))))
    reader = read_capture(path)
    return judge(reader.history, source="a part", warnings=reader.warnings)


@pytest.mark.every(3)
@pytest.mark.parametrize("gone", [(), ("engine_step",), ("queue",), ("queue", "engine_step")], ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_no_part_of_it_is_convicted(tmp_path, spans, gone, share):
    every, resource = spans
    for seed in range(3):
        chance = random.Random(seed)
        part = [span for span in every if span.name not in gone and chance.random() < SHARES[share]]
        chance.shuffle(part)
        trial = judged(tmp_path, part, resource)
        assert not [(check.name, check.detail) for check in trial.failed]
        assert trial.steps


def test_of_each_request_alone(tmp_path, spans):
    every, resource = spans
    for trace in {span.trace for span in every if span.name == "decode_step"}:
        trial = judged(tmp_path, [span for span in every if span.trace == trace], resource)
        assert not [(check.name, check.detail) for check in trial.failed]
