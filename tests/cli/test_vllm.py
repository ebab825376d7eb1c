"""What `specscope vllm` asks the plugin to do."""

import pytest

from specscope.cli.vllm import VllmRun, environment
from specscope.vllm.settings import Settings


@pytest.mark.parametrize(
    ("evidence", "full", "aggregates"), [("full", True, False), ("lean", False, False), ("counts", True, True)]
)
def test_the_evidence_that_was_asked_for(evidence, full, aggregates, monkeypatch):
    monkeypatch.setenv("SPECSCOPE_AGGREGATES", "1")  # flags alone decide
    told = environment(VllmRun(None, ("serve", "x"), "a.jsonl", None, None, False, evidence, True))
    settings = Settings.read(told)
    assert (settings.full, settings.aggregates, settings.is_on) == (full, aggregates, True)
    assert ("SPECSCOPE_AGGREGATES" in told["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")) is aggregates
