"""Log-probabilities that are handed out are the tokens' own: healthy runs, and faults by verify, audit and diagnose."""

import dataclasses

import numpy as np
import pytest

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult
from specscope.analyze.verify.trial import judge
from tests.analyze.audit.runs import RULES, run
from tests.analyze.judges.edits import changed
from tests.analyze.verify.edits import check

NAME = "log-probabilities"


def ran(bench, name, rule, count=3):
    return bench.engine(name), run(bench.engine(name), {**RULES[rule], "logprobs": count}, tokens=12)


@pytest.mark.parametrize(
    ("name", "rule", "count"),
    [("eagle dynamic", "greedy", 3), ("draft tree", "all", 1), ("eagle dynamic", "penalties", 0), ("ngram", "bias", 5)],
)
def test_a_healthy_run_passes_whatever_shapes_its_tokens(bench, name, rule, count):
    engine, history = ran(bench, name, rule, count)
    emitted = sum(part.emitted for record in history.steps for part in record.requests)
    for found in (check(history, NAME), bench.audit(engine, history).finding(NAME)):
        assert (found.result, found.tested, found.unit) == (CheckResult.PASSED, emitted, "token")


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


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_verify_and_by_audit_alone(bench, fault):
    engine, healthy = ran(bench, "eagle dynamic", "temperature")
    history = changed(healthy, lambda part: dataclasses.replace(part, logprobs=FAULTS[fault](part.logprobs)))
    trial, audited = judge(history, source="run"), bench.audit(engine, history)
    assert [failed.name for failed in trial.failed] == [NAME]
    assert [finding.name for finding in audited.findings if finding.failed] == [NAME]
    for found in (examine(history), examine(healthy, audited=audited)):
        assert [suspect.cause for suspect in found.faults] == [Cause.LOGPROBS]
        assert not found.unexplained
