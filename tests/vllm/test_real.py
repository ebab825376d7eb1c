"""The real vLLM, in an environment of its own: SPECSCOPE_VLLM_PYTHON names its interpreter, with the plugin installed.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real.py

An engine runs all that is planned for it (planted.py) when the first of its runs is asked for. V2's runner is run by
Triton's interpreter (interpreted.py).
"""

import dataclasses
import json

import numpy as np
import pytest

from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.verify.trial import judge
from specscope.measure.judges import audit_options
from specscope.trace.record.tree import Drawn
from specscope.trace.wire.reading import read_capture
from tests.vllm.faults import FAULTS
from tests.vllm.planted import ENGINES, FAULTY, GATHERED, HEALTHY, RUNS, file_name
from tests.vllm.record import record, run_inside
from tests.vllm.served import PYTHON
from tests.vllm.test_real_locate import PLANTED
from tests.vllm.test_recording import assert_same

slow = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
real = lambda test: slow[0](slow[1](test))  # noqa: E731
CHECKED = ("blocks written", "tokens in the cache", "outputs")
SHAPED = {"structured_outputs", "allowed_token_ids", "bad_words", "min_tokens"}  # what audit knows no more of


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """Gives a run's capture and what vLLM gave; `plugin`: or what it gives without the plugin."""
    done = {}

    def of(run, *, plugin=True):
        if (run.engine, plugin) not in done:
            folder = done[run.engine, plugin] = tmp_path_factory.mktemp("runs")
            runs = [other for other in (RUNS if plugin else HEALTHY) if other.engine == run.engine]
            record(folder, runs, PYTHON, plugin=plugin)
        path = done[run.engine, plugin] / f"{file_name(run)}.json"
        return path.with_suffix(".jsonl"), json.loads(path.read_text())

    return of


def diagnosed(run, capture):
    reader = read_capture(capture)
    assert not [line for line in reader.warnings if "left out" in line]
    options = audit_options(reader.history, str(run.target), None if run.draft is None else str(run.draft), 1000)
    return examine(reader.history, "run", options, warnings=reader.warnings)


def test_every_fault_is_run_and_every_name_is_one():
    """What is planned, before any vLLM is started."""
    planned = {fault for run in RUNS for fault in run.faults}
    assert planned | {fault for fault, *_ in PLANTED} == set(FAULTS)
    assert len({file_name(run) for run in RUNS}) == len(RUNS)


@real
@pytest.mark.parametrize("run", FAULTY, ids=file_name)
def test_a_fault_in_vllm_is_named_first(ran, run):
    found = diagnosed(run, ran(run)[0])
    labels = [suspect.cause.label for suspect in found.suspects]
    if run.subtle:
        assert set(labels[:1]) <= set(run.right)  # not seen, or rightly named
        return
    assert found.exit is Exit.INCONSISTENT
    if run.right:  # for some there is no name yet, and they are seen all the same
        assert labels, found.unexplained
        assert labels[0] in run.right


@real
@pytest.mark.parametrize("run", HEALTHY, ids=file_name)
def test_a_healthy_capture_is_what_vllm_says_and_stands_every_trial(ran, run):
    capture, given = ran(run)
    assert given["outputs"] == ran(run, plugin=False)[1]["outputs"] or run.faults
    history = read_capture(capture).history
    requests = sorted(history.requests.values(), key=lambda request: int(request.id.split("-")[0]))
    for request, output, (accepted, drafted) in zip(requests, given["outputs"], given["steps"], strict=True):
        assert [token for token, _ in request.output()] == output
        judged = [part for part in request.steps if part.verdict is not None and len(part.tree)]
        assert [part.verdict.accepted for part in judged] == accepted
        assert [len(part.tree) for part in judged] == drafted
        for part in judged:
            assert len(part.blocks)
            sampled = "draft_sample_method" in ENGINES[run.engine].speculation and "temperature" in run.params
            assert bool((part.tree.drawn == Drawn.DETERMINISTIC).all()) is not sampled
            assert (part.notes is None) is (run.draft is None)  # the drafter's scores, of greedy drafts too
            if part.notes is not None:
                assert 0 < np.min(part.notes.prob) <= np.max(part.notes.prob) <= 1
    acceptance, counters = history.acceptance, given["counters"]
    assert acceptance.drafts == (counters["vllm:spec_decode_num_drafts"] or 0)
    assert acceptance.drafted == (counters["vllm:spec_decode_num_draft_tokens"] or 0)
    assert acceptance.accepted == (counters["vllm:spec_decode_num_accepted_tokens"] or 0)
    assert acceptance.accepted_at == counters["vllm:spec_decode_num_accepted_tokens_per_pos"][: acceptance.steps]
    assert ("preempted" in run.name) is any(record.preempted for record in history.steps)
    checks = {check.name: check for check in judge(history, source="run").checks}
    assert [check for check in checks.values() if check.result is CheckResult.FAILED] == []
    assert {checks[name].result for name in CHECKED} == {CheckResult.PASSED}
    found = diagnosed(run, capture)
    assert "audit" in found.looked_at or SHAPED & set(run.params)
    assert (list(found.faults), found.unexplained) == ([], ())
    assert found.exit is not Exit.INCONSISTENT


@real
@pytest.mark.parametrize("run", GATHERED, ids=file_name)
def test_what_a_gpu_would_gather_is_the_same_evidence(ran, run):
    """The same tensors, read where they are and gathered by batches. Varentropy is a difference, and rounds more."""
    (plain,) = [other for other in HEALTHY if other.name == run.name.split(",")[0]]
    read, gathered = (read_capture(ran(each)[0]).history for each in (plain, run))
    for one, other in zip(read.steps, gathered.steps, strict=True):
        for here, there in zip(one.requests, other.requests, strict=True):
            named = dataclasses.replace(there, request=here.request)  # vLLM makes names up
            assert_same(here, named, f"step {one.step}", rough="varentropy")


@real
def test_vllm_refuses_what_was_called_ignored_and_several_outputs_are_requests(tmp_path):
    warm = {"temperature": 0.8, "max_tokens": 6, "seed": 1, "ignore_eos": True}
    asked = [warm | more for more in ({"min_p": 0.1}, {"logit_bias": {"3": 2.0}}, {"temperature": 0, "n": 2}, {"n": 2})]
    run = {"name": "asked", "singly": True, "prompts": ["anna saw the red cat"] * 4, "params": asked}
    run_inside(tmp_path, ENGINES["ngram"].job() | {"runs": [run]}, PYTHON)
    given = json.loads((tmp_path / "asked.json").read_text())
    assert [text.split(".")[0] for text in given["refused"]] == [
        *["The min_p and logit_bias sampling parameters are not yet supported with speculative decoding"] * 2,
        "n must be 1 when using greedy sampling, got 2",
    ]
    requests = read_capture(tmp_path / "asked.jsonl").history.requests.values()
    assert sorted([token for token, _ in request.output()] for request in requests) == sorted(given["outputs"])
    assert all("ignored by vLLM" not in request.info.labels for request in requests)
