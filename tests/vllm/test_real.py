"""Real vLLM, in an environment of its own: SPECSCOPE_VLLM_PYTHON names its interpreter, with the plugin installed.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real.py
"""

import dataclasses
import json
import os
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.verify.trial import judge
from specscope.measure.judges import audit_options
from specscope.measure.prompts import COPYING, PLAIN
from specscope.model.bundled import bundled_model
from specscope.trace.wire.reading import read_capture
from tests.vllm.served import PYTHON
from tests.vllm.test_recording import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
HERE = Path(__file__).parent
HEAD = str(HERE.parents[1] / "specscope" / "heads" / "SmolLM2-135M-Instruct")
PROMPTS = [*PLAIN, *COPYING, *(f"{prompt} Be brief." for prompt in PLAIN)]


@cache
def model():
    return str(bundled_model(lambda text: None))


def speculation(method, length):
    if method == "ngram":
        return {"method": method, "num_speculative_tokens": length, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if method == "draft_model":
        more = {"model": model(), "draft_sample_method": "probabilistic"}
        return {"method": method, "num_speculative_tokens": length} | more
    return {"method": method, "model": HEAD, "num_speculative_tokens": length}


def run(folder, method, length, temperature, *, plugin=True, prompts=20, tokens=32, faults=(), gather=False):
    """(the capture, what vLLM gave)."""
    folder.mkdir(exist_ok=True)
    capture, out = folder / "run.jsonl", folder / "out.json"
    job = {
        "model": model(),
        "speculation": speculation(method, length),
        "prompts": PROMPTS[:prompts],
        "seeds": list(range(1, prompts + 1)) if temperature else [None] * prompts,
        "params": {"temperature": temperature, "max_tokens": tokens},
        "faults": list(faults),
        "gather": gather,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
    environment |= {"SPECSCOPE_CAPTURE": str(capture)} if plugin else {}
    command = [PYTHON, "-P", str(HERE / "offline.py"), str(folder / "job.json"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return capture, json.loads(out.read_text())


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize(("method", "length"), [("eagle3", 3), ("eagle3", 5), ("ngram", 5), ("draft_model", 3)])
def test_the_capture_is_what_vllm_says_and_stands_every_trial(tmp_path, method, length, temperature):
    capture, told = run(tmp_path / "on", method, length, temperature)
    _, plain = run(tmp_path / "off", method, length, temperature, plugin=False)
    assert told["outputs"] == plain["outputs"]
    reader = read_capture(capture)
    requests = sorted(reader.history.requests.values(), key=lambda one: int(one.id.split("-")[0]))
    for request, output, steps in zip(requests, told["outputs"], told["steps"], strict=True):
        assert [token for token, _ in request.output()] == output
        judged = [part for part in request.steps if part.verdict is not None and len(part.tree)]
        assert [part.verdict.accepted for part in judged] == steps[0]
        assert [len(part.tree) for part in judged] == steps[1]
    acceptance, counters = reader.history.acceptance, told["counters"]
    assert acceptance.drafts == counters["vllm:spec_decode_num_drafts"]
    assert acceptance.drafted == counters["vllm:spec_decode_num_draft_tokens"]
    assert acceptance.accepted == (counters["vllm:spec_decode_num_accepted_tokens"] or 0)
    assert acceptance.accepted_at == counters["vllm:spec_decode_num_accepted_tokens_per_pos"][: acceptance.steps]
    trial = judge(reader.history, source="run")
    assert [c.name for c in trial.checks if c.result is CheckResult.FAILED] == []
    found = diagnosed(reader, method)
    assert "audit" in found.looked_at
    assert (found.exit, list(found.faults), found.unexplained) == (Exit.CONSISTENT, [], ())


def diagnosed(reader, method):
    draft = {"ngram": None, "draft_model": model()}.get(method, HEAD)
    options = audit_options(reader.history, model(), draft, 150)
    return examine(reader.history, "run", options, warnings=reader.warnings)


@pytest.mark.parametrize(
    ("fault", "method", "temperature", "cause"),
    [
        ("final_from_p", "eagle3", 0.8, Cause.FINAL_NOT_RESIDUAL),
        ("q_dropped", "draft_model", 0.8, Cause.Q_DROPPED),
        ("one_late", "ngram", 0, Cause.DRAFT_POSITION),
        ("layers_one_lower", "eagle3", 0, Cause.DRAFTER_FED),
        ("features_missing", "eagle3", 0, Cause.DRAFTER_FED),
    ],
)
def test_diagnose_names_a_fault_from_the_plugin_s_capture(tmp_path, fault, method, temperature, cause):
    length = 5 if method == "ngram" else 3
    capture, _ = run(tmp_path, method, length, temperature, prompts=12, tokens=48, faults=[fault])
    found = diagnosed(read_capture(capture), method)
    assert found.suspects[0].cause is cause


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_what_a_gpu_would_gather_is_the_same_evidence(tmp_path, method):
    """The same tensors, read where they are and gathered by batches. Varentropy is a difference, and rounds more."""
    read, gathered = (
        read_capture(run(tmp_path / str(gather), method, 3, 0.8, prompts=6, gather=gather)[0]).history
        for gather in (False, True)
    )
    for one, other in zip(read.steps, gathered.steps, strict=True):
        for here, there in zip(one.requests, other.requests, strict=True):
            assert_same(_plain(here), _plain(there), f"step {one.step}")
            np.testing.assert_allclose(_varentropies(here), _varentropies(there), rtol=1e-3, atol=1e-4)


def _plain(part):
    """Without its name, which vLLM makes up, and without varentropies."""
    if part.parents is None:
        return dataclasses.replace(part, request="")
    none = {"varentropy": np.zeros(0), "q_varentropy": np.zeros(0), "final_varentropy": 0.0}
    return dataclasses.replace(part, request="", parents=dataclasses.replace(part.parents, **none))


def _varentropies(part):
    told = part.parents
    return [] if told is None else [*told.varentropy, *told.q_varentropy, told.final_varentropy]
