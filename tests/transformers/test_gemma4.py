"""A bug of transformers 5.10 to 5.24: Gemma 4's assistant drafts by argmax, and states its raw logits as q."""

import pytest

import specscope
from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.trace.wire.reading import read_capture
from tests.transformers import gemma4


def test_it_is_convicted_and_named_from_less_than_200_tokens(tmp_path):
    try:
        pair = gemma4.models()
    except ValueError as error:
        pytest.skip(f"this version of transformers cannot build one: {error}")
    without, recorded = [gemma4.generate(*pair, seed) for seed in range(4)], []
    with specscope.record(tmp_path / "run.jsonl"):
        recorded += [gemma4.generate(*pair, seed) for seed in range(4)]
    assert recorded == without
    history = read_capture(tmp_path / "run.jsonl").history
    found = examine(history, "a test")
    trial = found.stages["verify"]
    assert trial.tokens < 200
    assert {"drafted surprisal", "emitted surprisal"} <= {check.name for check in trial.failed}
    assert found.suspects[0].cause is Cause.Q_NOT_DRAWN
