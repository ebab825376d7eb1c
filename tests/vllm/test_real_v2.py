"""The V2 model runner of the real vLLM on a CPU: Triton's interpreter runs its kernels (interpreted.py). Tiny models.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_v2.py
"""

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import CheckResult, Exit
from specscope.analyze.verify.trial import judge
from specscope.measure.judges import audit_options
from specscope.trace.record.tree import Drawn
from specscope.trace.wire.reading import read_capture
from tests.faults.models import story
from tests.vllm.models import DRAFT, HEAD, TARGET

PYTHON = os.environ.get("SPECSCOPE_VLLM_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
HERE = Path(__file__).parent
SAMPLED = {"draft_sample_method": "probabilistic"}  # by default V2 drafts greedily, and its q is all at the draft
WARM, HOT = {"temperature": 0.8}, {"temperature": 1.5}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2},
    "draft_model": {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": 3},
}


@dataclass(frozen=True)
class Case:
    """A run of four requests."""

    method: str
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    more: dict[str, Any] = field(default_factory=dict)  # of the speculative configuration
    engine: dict[str, Any] = field(default_factory=dict)
    chunk: int | None = None  # rows of logits that one call of `_verify` takes; by default vLLM's own number
    prompt: int = 40  # characters of a prompt

    @property
    def draft(self) -> Path | None:
        """The folder of its draft model or head."""
        return {"eagle3": HEAD, "draft_model": DRAFT}.get(self.method)


# Five blocks, where four requests would take eight
FEW_BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 6, "max_model_len": 128, "max_num_batched_tokens": 128}
CASES = {
    "ngram": Case("ngram"),
    "ngram warm": Case("ngram", WARM),
    "model": Case("draft_model"),
    "model warm": Case("draft_model", WARM),
    "model warm, drafts sampled": Case("draft_model", WARM, SAMPLED),
    "head": Case("eagle3"),
    "head warm": Case("eagle3", WARM),
    "head hot, drafts sampled": Case("eagle3", HOT, SAMPLED),
    "cut, penalised": Case("eagle3", WARM | {"top_p": 0.8, "top_k": 12, "repetition_penalty": 1.2}, SAMPLED),
    "in chunks": Case("eagle3", WARM, SAMPLED, chunk=5),
    "block": Case("draft_model", HOT, SAMPLED | {"rejection_sample_method": "block"}),
    "block, drafts greedy": Case("draft_model", HOT, {"rejection_sample_method": "block"}),
    "preempted": Case("draft_model", WARM, SAMPLED, FEW_BLOCKS, prompt=20),
    "asynchronous": Case("draft_model", WARM, engine={"async_scheduling": True}),
    "prompts in chunks": Case("eagle3", WARM, engine={"max_num_batched_tokens": 32}),
}


def run(folder, case, *, plugin=True, tokens=20):
    """(The capture, what vLLM gave)."""
    folder.mkdir(exist_ok=True)
    capture, out = folder / "run.jsonl", folder / "out.json"
    seeded = case.params["temperature"] > 0
    job = {
        "v2": True,
        "chunk": case.chunk,
        "model": str(TARGET),
        "speculation": METHODS[case.method] | case.more,
        "prompts": [story(10**7 + seed, case.prompt) for seed in range(4)],
        "seeds": [seed if seeded else None for seed in range(1, 5)],
        "params": case.params | {"max_tokens": tokens},
        "engine": {"max_model_len": 256, "max_num_batched_tokens": 256} | case.engine,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
    environment |= {"SPECSCOPE_CAPTURE": str(capture)} if plugin else {}
    command = [PYTHON, "-P", str(HERE / "offline.py"), str(folder / "job.json"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Using V2 Model Runner" in done.stdout + done.stderr
    assert "specscope: switched off" not in done.stderr
    return capture, json.loads(out.read_text())


@pytest.mark.parametrize("name", CASES)
def test_the_capture_is_what_vllm_says_and_stands_every_trial(tmp_path, name):
    case = CASES[name]
    capture, given = run(tmp_path / "on", case)
    _, plain = run(tmp_path / "off", case, plugin=False)
    assert given["outputs"] == plain["outputs"]
    reader = read_capture(capture)
    history = reader.history
    requests = sorted(history.requests.values(), key=lambda request: int(request.id.split("-")[0]))
    for request, output, (accepted, drafted) in zip(requests, given["outputs"], given["steps"], strict=True):
        assert [token for token, _ in request.output()] == output
        judged = [part for part in request.steps if part.verdict is not None and len(part.tree)]
        assert [part.verdict.accepted for part in judged] == accepted
        assert [len(part.tree) for part in judged] == drafted
        for part in judged:
            assert len(part.blocks)
            assert bool((part.tree.drawn == Drawn.DETERMINISTIC).all()) is (
                case.more.get("draft_sample_method") is None
            )
            assert (part.notes is None) is (case.draft is None)  # the drafter's scores, of greedy drafts too
            if part.notes is not None:
                assert 0 < np.min(part.notes.prob) <= np.max(part.notes.prob) <= 1
                assert part.parents.draft_top.shape == (len(part.parents.node), 4)
    acceptance, counters = history.acceptance, given["counters"]
    assert acceptance.drafts == counters["vllm:spec_decode_num_drafts"] > 0
    assert acceptance.drafted == counters["vllm:spec_decode_num_draft_tokens"]
    assert acceptance.accepted == (counters["vllm:spec_decode_num_accepted_tokens"] or 0)
    assert acceptance.accepted_at == counters["vllm:spec_decode_num_accepted_tokens_per_pos"][: acceptance.steps]
    if name == "preempted":
        assert any(record.preempted for record in history.steps)
    trial = judge(history, source="run")
    checks = {check.name: check for check in trial.checks}
    assert [check for check in checks.values() if check.result is CheckResult.FAILED] == []
    for passed in ("blocks written", "tokens in the cache", "outputs"):
        assert checks[passed].result is CheckResult.PASSED
    options = audit_options(history, str(TARGET), None if case.draft is None else str(case.draft), 150)
    found = examine(history, "run", options, warnings=reader.warnings)
    assert "audit" in found.looked_at
    assert (list(found.faults), found.unexplained) == ([], ())
    assert found.exit is Exit.CONSISTENT
