"""Real vLLM's server, ended in the ways in which people and machines end it: what it counted is in its captures.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_ends.py
"""

import json
import signal
import socket

import psutil
import pytest

from specscope.trace.wire.reading import read_capture
from tests.vllm.served import EAGLE, PYTHON, Server
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
PROMPTS = ["anna has a cat", "bob sees two dogs", "a red house"]
WARM = {"temperature": 0.9}


def kept(capture):
    """(drafts, drafted, accepted) of a capture, and what its reader remarks."""
    reader = read_capture(capture)
    acceptance = reader.history.acceptance
    return (acceptance.drafts, acceptance.drafted, acceptance.accepted), reader.warnings


def test_what_vllm_counted_is_in_the_file_when_ctrl_c_follows_the_last_answer(tmp_path):
    """At once, on all of its processes: its server kills the worker within a few milliseconds."""
    capture = tmp_path / "run.jsonl"
    with Server(tmp_path / "log", SPECSCOPE_CAPTURE=str(capture)) as server:
        counts = [server.counted(prompt, 60, **WARM, seed=at) for at, prompt in enumerate(PROMPTS)]
        server.signal(group=True)
        server.ended()
    assert kept(capture) == (tuple(map(sum, zip(*counts, strict=True))), [])


def test_a_crash_leaves_its_evidence_and_a_restart_takes_another_name(tmp_path):
    """What a supervisor does: the same command again. The first server's worker is killed while it generates."""
    capture, again = tmp_path / "run.jsonl", tmp_path / "run.2.jsonl"
    settings = {"SPECSCOPE_CAPTURE": str(capture)}
    with Server(tmp_path / "log", **settings) as server:
        whole = server.counted(PROMPTS[0], 40, **WARM)
        heard = cut_off(server)
        server.ended()
    evidence = capture.read_bytes()
    with Server(tmp_path / "log.2", **settings) as server:
        counted = server.counted(PROMPTS[0], 40, **WARM)
        server.signal(signal.SIGTERM)
        server.ended()
    assert capture.read_bytes() == evidence
    assert kept(again) == (counted, [])
    assert f"writing to {again} ({capture} exists)" in (tmp_path / "log.2").read_text()
    (drafts, _, _), warnings = kept(capture)
    assert drafts > whole[0]
    (remark,) = warnings
    assert remark.startswith("1 of 2 requests did not end in this file")
    reader = read_capture(capture)
    (cut,) = (request for request in reader.history.requests.values() if request.end is None)
    most = 1 + EAGLE["num_speculative_tokens"]  # the step that ran
    assert len(cut.output()) >= heard - most


def cut_off(server):
    """Kill the worker in the midst of a long answer; how many of its tokens the client had got."""
    worker = max(psutil.Process(server.process.pid).children(recursive=True), key=lambda one: one.create_time())
    heard = 0
    with server.ask(PROMPTS[1], 900, **WARM, seed=5, stream=True, return_token_ids=True) as answer:
        for line in answer:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                heard += len(choices[0].get("token_ids") or ())
            if heard > 60:
                worker.kill()
                break
    return heard
