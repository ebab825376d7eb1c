"""Which parameters real vLLM takes where it speculates, and what is recorded of a request with several outputs.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_params.py
"""

import json
import os
import subprocess

import pytest

from specscope.trace.wire.reading import read_capture
from tests.vllm.models import TARGET
from tests.vllm.planted import ENGINES
from tests.vllm.test_real import HERE, PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
WARM = {"temperature": 0.8, "max_tokens": 6, "seed": 1}
ASKED = [
    WARM | {"min_p": 0.1},
    WARM | {"logit_bias": {"3": 2.0}},
    WARM | {"temperature": 0, "n": 2},
    WARM | {"n": 2},
]


def test_vllm_refuses_what_was_called_ignored_and_several_outputs_are_requests(tmp_path):
    capture, out = tmp_path / "run.jsonl", tmp_path / "out.json"
    speculation, _ = ENGINES["ngram"]
    job = {"model": str(TARGET), "speculation": speculation, "prompt": "anna saw the red cat", "asked": ASKED}
    (tmp_path / "job.json").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECSCOPE_")}
    environment["SPECSCOPE_CAPTURE"] = str(capture)
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [PYTHON, "-P", str(HERE / "asking.py"), str(tmp_path / "job.json"), str(out)]
    subprocess.run(command, env=environment, check=True, timeout=600)
    *refused, outputs = json.loads(out.read_text())
    assert [text.split(".")[0] for text in refused] == [
        *["The min_p and logit_bias sampling parameters are not yet supported with speculative decoding"] * 2,
        "n must be 1 when using greedy sampling, got 2",
    ]
    requests = read_capture(capture).history.requests.values()
    assert sorted([token for token, _ in request.output()] for request in requests) == sorted(outputs)
    assert all("ignored by vLLM" not in request.info.labels for request in requests)
