"""The real SGLang, in an environment of its own: SGLANG_PYTHON names its interpreter, with the plugin installed.

SGLANG_PYTHON=/path/to/sglang/bin/python make sglang-live
"""

import json
import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

from specscope.analyze.diagnose.causes import Cause
from specscope.analyze.diagnose.run import examine
from specscope.analyze.findings import Exit
from specscope.analyze.verify.trial import judge
from specscope.measure.judges import DEFAULT_HEAD, audit_options
from specscope.measure.prompts import COPYING, PLAIN
from specscope.model.places import bundled_model
from specscope.trace.wire.reading import read_capture

PYTHON = os.environ.get("SGLANG_PYTHON", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SGLANG_PYTHON names no SGLang")]
HERE = Path(__file__).parent
PROMPTS = [*PLAIN, *COPYING][:8]
HEAD, TARGET = str(DEFAULT_HEAD), "TARGET"
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
EAGLE = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": HEAD}
SPECULATION = {
    "plain": {},
    "ngram": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6},
    "standalone": CHAIN | {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": TARGET},
    "chain": CHAIN | EAGLE,
    "tree": TREE | EAGLE,
}
FAULTS = {
    "other_layers": ("chain", Cause.DRAFTER_FED),
    "row_before": ("chain", Cause.DRAFTER_FED),
    "positions_high": ("chain", Cause.ROTARY_POSITIONS),
    "kv_not_moved": ("tree", Cause.TARGET_KV),
}


@cache
def model():
    return str(bundled_model(lambda text: None))


@cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model())


def encoded(prompt):
    turn = [{"role": "user", "content": prompt}]
    return tokenizer().apply_chat_template(turn, add_generation_prompt=True, return_dict=False)


def run(folder, method, *, tokens=32, plugin=True, fault=""):
    """(the capture, what SGLang gave)."""
    capture, out = folder / f"{plugin}.jsonl", folder / "out.json"
    job = {
        "model": model(),
        "speculation": {key: model() if value == TARGET else value for key, value in SPECULATION[method].items()},
        "prompts": list(map(encoded, PROMPTS)),
        "sampling": {"temperature": 0, "max_new_tokens": tokens},
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
    environment |= {"SPECSCOPE_CAPTURE": str(capture)} if plugin else {}
    environment |= {"SPECSCOPE_TEST_FAULT": fault} if fault else {}
    command = [PYTHON, "-P", str(HERE / "live.py"), str(folder / "job.json"), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return capture, json.loads(out.read_text())


def diagnosed(capture):
    reader = read_capture(capture)
    return examine(reader.history, "run", audit_options(reader.history, model(), HEAD, 120), warnings=reader.warnings)


@pytest.mark.parametrize("method", ["chain", "tree", "ngram", "standalone"])
def test_the_capture_is_what_sglang_says_and_stands_every_trial(tmp_path, method):
    capture, answers = run(tmp_path, method)
    _, plain = run(tmp_path, "plain", plugin=False)
    history = read_capture(capture).history
    requests = {request.id: request for request in history.requests.values()}
    assert len(requests) == len(PROMPTS)
    for answer, other in zip(answers, plain, strict=True):
        request, counts = requests[answer["meta_info"]["id"]], answer["meta_info"]
        output = [token for token, _ in request.output()]
        assert output == answer["output_ids"] == other["output_ids"]
        assert request.ended  # shutdown() waits for what is still to be written
        drafts = [part for part in request.steps if part.verdict is not None and len(part.tree)]
        assert len(drafts) == counts["spec_verify_ct"]
        assert sum(part.verdict.accepted for part in drafts) == counts["spec_num_correct_drafts"]
    assert judge(history, source="run").exit is not Exit.INCONSISTENT


@pytest.mark.parametrize("fault", FAULTS)
def test_diagnose_names_a_fault_from_the_plugin_s_capture(tmp_path, fault):
    method, cause = FAULTS[fault]
    found = diagnosed(run(tmp_path, method, fault=fault, tokens=48)[0])
    assert found.exit is Exit.INCONSISTENT
    assert found.suspects[0].cause is cause


def test_no_fault_is_named_in_a_chain_of_a_head(tmp_path):
    found = diagnosed(run(tmp_path, "chain", tokens=48)[0])
    assert "audit" in found.looked_at
    assert (found.exit, list(found.faults), found.unexplained) == (Exit.CONSISTENT, [], ())
