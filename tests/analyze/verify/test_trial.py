"""Trials as a whole: the samples, any record that can be read, any part of a run, and log-probabilities."""

import dataclasses
import gzip
import random
import tracemalloc
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings

from specscope import SamplingParams
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.verify.trial import IN_PART, judge, render_trial
from specscope.speculate import sampling
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.capture import line_json
from specscope.trace.wire.reading import read_capture
from specscope.trace.wire.spans import Encoder, resource_attributes
from tests.analyze.audit import runs as runs_of
from tests.analyze.audit.runs import RULES, drained, run
from tests.analyze.edits import TRACES, changed, check, edited, of, sample
from tests.analyze.histories import history as history_of
from tests.analyze.histories import write
from tests.analyze.texts import page
from tests.engines import HEAD, fresh, pressed
from tests.trace import strategies


@pytest.mark.parametrize("name", ["eagle", "ngram", "sampled", "planted"])
def test_the_sample_captures_are_consistent(name):
    """The planted bug among them: it is a drafter's, and a bad draft costs acceptance, not losslessness."""
    trial = judge(sample(name), source=name)
    assert trial.exit is Exit.CONSISTENT
    assert trial.failed == []
    assert sum(check.result is CheckResult.PASSED for check in trial.checks) > 20


@pytest.mark.parametrize("engine", ["draft tree", "eagle dynamic"])
def test_rows_that_miss_1_by_what_a_softmax_in_float32_may_are_consistent(bench, monkeypatch, engine):
    """As torch's does with many tokens, where one has nearly all: by another amount on each processor."""
    exact = sampling.softmax_
    monkeypatch.setattr(sampling, "softmax_", lambda rows, params: exact(rows, params).mul_(1 + 4e-4))
    fresh(bench.engine(engine), 60)
    trial = judge(runs_of.run(bench.engine(engine), {"temperature": 1.3}, 30), source="run")
    assert trial.failed == []


def test_the_text_names_each_check_and_how_to_see_it(runs):
    trial = judge(edited(runs["sampled"], of(verdict__final_p=0.0)), source="run.jsonl")
    assert trial.exit is Exit.INCONSISTENT
    text = page(render_trial, trial)
    assert all(check.name in text for check in trial.checks)
    assert f"specscope open 'run.jsonl#{trial.failed[0].example}'" in text


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(strategies.runs())
def test_any_run_that_can_be_read_is_judged(records):
    """Whatever the numbers are: an answer, never an error."""
    trial = judge(history_of(records), source="x")
    assert trial.exit in Exit
    assert orjson.loads(orjson.dumps(trial.to_dict()))["groups"]


def test_a_context_length_that_no_file_could_hold_takes_no_memory():
    history = read_capture(TRACES.parent / "tests" / "data" / "damaged" / "context-len.jsonl").history
    tracemalloc.start()
    trial = judge(history, source="damaged")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "tokens in the cache" in [check.name for check in trial.failed]
    assert peak < 20 * 2**20  # bytes; the file has 22 kB


# A run of 5301d291, whose engine had a prefix cache, and too few blocks: requests lose their KV and find some of it.
OLD = Path(__file__).parents[2] / "data" / "before_deletion" / "prefix_cache_crowded.jsonl.gz"
SHARES = {"half": 0.5, "most": 0.97, "all": 1.0}


@pytest.fixture(scope="module", params=["plain", "prefix cache"])
def spans(request, bench, tmp_path_factory):
    """The spans of a run in which requests lose their KV, and its resource."""
    if request.param == "prefix cache":
        path = tmp_path_factory.mktemp("old") / "run.jsonl"
        path.write_bytes(gzip.decompress(OLD.read_bytes()))
        history = read_capture(path).history
        assert any(part.found for record in history.steps for part in record.requests)
        return spans_of(history)
    engine = bench.engine("ngram")
    pressed(engine, 8)
    for i in range(6):
        engine.add(HEAD[: 20 + 7 * i], SamplingParams(max_tokens=40, temperature=0.8, seed=i, ignore_eos=True))
    return spans_of(drained(engine))


def spans_of(history):
    assert any(record.preempted for record in history.steps)
    encoder = Encoder(history.run, history.vocabulary)
    return [span for record in history.steps for span in encoder.encode(record)], resource_attributes(history.run)


def judged(folder, spans, resource):
    path = folder / "part.jsonl"
    path.write_bytes(b"".join(line_json(resource, part) for part in ([], *([span] for span in spans))))
    reader = read_capture(path)
    return judge(reader.history, source="a part", warnings=reader.warnings)


@pytest.mark.every(6)
@pytest.mark.parametrize("gone", [(), ("engine_step",), ("queue",), ("queue", "engine_step")], ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_no_part_of_it_is_convicted(tmp_path, spans, gone, share):
    every, resource = spans
    chance = random.Random(0)
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


NAME = "log-probabilities"


def ran(bench, name, rule, count=3):
    return bench.engine(name), run(bench.engine(name), {**RULES[rule], "logprobs": count}, tokens=12)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "rule", "count"),
    [("eagle dynamic", "greedy", 3), ("draft tree", "all", 1), ("eagle dynamic", "penalties", 0), ("ngram", "bias", 5)],
)
def test_a_healthy_run_passes_whatever_shapes_its_tokens(bench, tmp_path, name, rule, count):
    engine, history = ran(bench, name, rule, count)
    emitted = sum(part.emitted for record in history.steps for part in record.requests)
    for found in (check(history, NAME), bench.audit(engine, history).finding(NAME)):
        assert (found.result, found.tested, found.unit) == (CheckResult.PASSED, emitted, "token")
    found = check(nameless(history, tmp_path), NAME)
    assert (found.result, found.tested, found.note) == (CheckResult.PASSED, emitted, IN_PART[NAME])


def nameless(history, folder):
    """As it is read where it was recorded without token ids."""
    path = write(history, folder / "nameless.jsonl", dataclasses.replace(history.run, privacy=Privacy.NO_TOKENS))
    return read_capture(path).history


def test_a_run_that_asked_for_none_is_not_judged(runs):
    assert check(runs["greedy"], NAME).result is CheckResult.SKIPPED


def without_lists(logprobs):
    """None of the likeliest are handed out: only what was recorded beside can show a fault."""
    nothing = np.zeros((len(logprobs.logprob), 0))
    return dataclasses.replace(logprobs, top=nothing.astype(np.int32), top_logprob=nothing.astype(np.float32))


FAULTS = {
    "zeros": lambda x: dataclasses.replace(x, logprob=np.zeros_like(x.logprob)),
    "those of the token behind": lambda x: dataclasses.replace(x, logprob=np.roll(x.logprob, 1)),
    "at another temperature": lambda x: dataclasses.replace(x, logprob=x.logprob / 2, top_logprob=x.top_logprob / 2),
    "no number": lambda x: dataclasses.replace(x, logprob=np.full_like(x.logprob, np.nan)),
    "zeros, without lists": lambda x: without_lists(FAULTS["zeros"](x)),
}


@pytest.fixture(scope="module")
def sampled(bench):
    """An engine, and a run of it."""
    return ran(bench, "eagle dynamic", "temperature")


@pytest.mark.every(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_verify_and_by_audit_alone(bench, sampled, fault, tmp_path):
    engine, healthy = sampled
    history = changed(healthy, lambda part: dataclasses.replace(part, logprobs=FAULTS[fault](part.logprobs)))
    trial, audited = judge(history, source="run"), bench.audit(engine, history)
    assert [failed.name for failed in trial.failed] == [NAME]
    assert [finding.name for finding in audited.findings if finding.failed] == [NAME]
    for found in (examine(history), examine(healthy, audited=audited)):
        assert [suspect.cause for suspect in found.faults] == [Cause.LOGPROBS]
        assert not found.unexplained
    (failed,) = judge(nameless(history, tmp_path), source="run").failed
    assert (failed.name, "-1:" in failed.detail) == (NAME, False)
