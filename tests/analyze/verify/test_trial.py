"""A trial as a whole: exit codes, notes, the sample captures, any record that can be read."""

import io
import tracemalloc
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from rich.console import Console

from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.verify.text import render_trial
from specscope.analyze.verify.trial import judge
from specscope.trace.history.history import History
from specscope.trace.wire.reading import read_capture
from tests.analyze.histories import RUN
from tests.analyze.verify.conftest import run
from tests.analyze.verify.edits import edited, failed, replaced
from tests.engines import DRAFTERS, SMALL, each_drafter
from tests.trace import strategies

TRACES = Path(__file__).parents[3] / "traces"
SAMPLING = {
    "greedy": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 1.2},
    "form": {"temperature": 1.2, "structured_outputs": {"regex": "([!-@]|[a-z]{2}[A-Z])+"}, "min_tokens": 9},
    "all": {
        "temperature": 0.8,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {65: 2.0, 70: -3.0},
    },
}


@pytest.mark.every(3)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("drafter", each_drafter(DRAFTERS))
def test_real_engines_raise_no_alarm(engines, drafter, sampling):
    """With preemption: nine blocks for five requests."""
    assert failed(run(engines[drafter], SMALL, **SAMPLING[sampling])) == []


@pytest.mark.parametrize("name", ["eagle", "ngram", "sampled", "planted"])
def test_the_sample_captures_are_consistent(name):
    """The planted bug among them: it is a drafter's, and a bad draft costs acceptance, not losslessness."""
    trial = judge(read_capture(TRACES / f"{name}.jsonl").history, source=name)
    assert trial.exit is Exit.CONSISTENT
    assert trial.failed == []
    assert sum(check.result is CheckResult.PASSED for check in trial.checks) > 20


def test_the_text_names_each_check_and_how_to_see_it(runs):
    bad = edited(runs["sampled"], lambda part: replaced(part, verdict__final_p=0.0))
    console = Console(width=100, record=True, file=io.StringIO())
    trial = judge(bad, source="run.jsonl", warnings=("a [warning]",))
    assert trial.exit is Exit.INCONSISTENT
    render_trial(trial, console)
    text = console.export_text()
    for check in trial.checks:
        assert check.name in text
    assert "a [warning]" in text
    assert "✗ final tokens" in text
    assert f"specscope open 'run.jsonl#{trial.failed[0].example}'" in text
    assert text.splitlines()[-1].startswith("NOT CONSISTENT: ")


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(strategies.runs())
def test_any_run_that_can_be_read_is_judged(records):
    """Whatever the numbers are: an answer, never an error."""
    history = History(run=RUN)
    for record in records:
        history.append(record)
    trial = judge(history, source="x")
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
