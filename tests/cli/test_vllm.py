"""What `specscope vllm` asks the plugin to do."""

import pytest

from specscope.cli.vllm import VllmRun, environment
from specscope.vllm.settings import Settings

LIMIT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"


@pytest.mark.parametrize(
    ("evidence", "full", "aggregates"), [("full", True, False), ("lean", False, False), ("counts", True, True)]
)
def test_the_evidence_that_was_asked_for(evidence, full, aggregates, monkeypatch):
    monkeypatch.setenv("SPECSCOPE_AGGREGATES", "1")  # flags alone decide
    told = environment(VllmRun(None, ("serve", "x"), "a.jsonl", None, None, False, evidence, True))
    settings = Settings.read(told)
    assert (settings.full, settings.aggregates, settings.is_on) == (full, aggregates, True)
    assert ("SPECSCOPE_AGGREGATES" in told["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")) is aggregates


def test_a_debugger_may_hold_a_worker_longer_than_vllm_waits_by_itself(monkeypatch):
    def told(debug):
        return environment(VllmRun(None, ("serve", "x"), "a.jsonl", None, debug, False, "full", True)).get(LIMIT)

    monkeypatch.delenv(LIMIT, raising=False)
    assert told(None) is None
    assert int(told("debug.sock")) > 3600
    monkeypatch.setenv(LIMIT, "60")  # what the user chose stays
    assert told("debug.sock") == "60"
