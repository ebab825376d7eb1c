"""LiteLLM, a gateway's client, in an environment of its own: its pins clash with transformers'."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "litellm>=1.80,<1.109"  # newer ones may need packages that are not out yet
SCRIPT = """
import json, sys
import litellm

base = sys.argv[1]
asked = {"api_base": base + "/v1", "api_key": "none", "model": "hosted_vllm/" + sys.argv[2], "temperature": 0}
messages = [{"role": "user", "content": "hello hello"}]
whole = litellm.completion(messages=messages, max_tokens=12, **asked)
pieces = litellm.completion(messages=messages, max_tokens=12, stream=True, **asked)
streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces)
probs = litellm.completion(messages=messages, max_tokens=4, logprobs=True, top_logprobs=2, **asked)
try:
    litellm.completion(messages=[{"role": "user", "content": "x" * 600}], max_tokens=4, **asked)
    error = ""
except litellm.ContextWindowExceededError:
    error = "too long"
print(json.dumps([whole.choices[0].message.content, whole.choices[0].finish_reason, streamed,
                  len(probs.choices[0].logprobs.content), whole.usage.completion_tokens, error]))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with LiteLLM: SPECSCOPE_LITELLM's, or one that is made here."""
    given = os.environ.get("SPECSCOPE_LITELLM")
    if given is not None:
        return given
    folder = tmp_path_factory.mktemp("litellm")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    found = folder / "bin" / "python"
    done = subprocess.run(
        [found, "-m", "pip", "install", "--quiet", PACKAGE], capture_output=True, text=True, timeout=900
    )
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed here: {done.stderr.strip().splitlines()[-1:]}")
    return str(found)


@pytest.mark.slow
def test_litellm_runs_unchanged(server, python):
    name = server.serving.service.model
    command = [python, "-c", SCRIPT, server.url, name]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path("/"), env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    text, finish, streamed, probs, tokens, error = json.loads(done.stdout.splitlines()[-1])
    assert text == streamed == server.chat(max_tokens=12).json()["choices"][0]["message"]["content"]
    assert (finish, probs, tokens, error) == ("length", 4, 12, "too long")
