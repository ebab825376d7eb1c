"""Real vLLM's server, ended in the ways in which people and machines end it: what it counted is in its captures.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_ends.py
"""

import json
import re
import signal

import psutil
import pytest

from specscope.trace.wire.reading import read_capture
from tests.vllm.served import PYTHON, Server, ask

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]
PROMPTS = ["anna has a cat", "bob sees two dogs", "a red house"]
WARM = {"temperature": 0.9}


def kept(capture):
    """(drafts, drafted, accepted) of a capture, and what its reader remarks."""
    reader = read_capture(capture)
    acceptance = reader.history.acceptance
    return (acceptance.drafts, acceptance.drafted, acceptance.accepted), reader.warnings


def test_what_vllm_counted_is_in_the_file_when_ctrl_c_follows_the_last_answer(tmp_path):
    """At once, on all of its processes. By itself its server kills the worker within a few milliseconds."""
    capture = tmp_path / "run.jsonl"
    with Server(tmp_path / "log", SPECSCOPE_CAPTURE=str(capture)) as server:
        counts = [server.counted(prompt, 60, **WARM, seed=at) for at, prompt in enumerate(PROMPTS)]
        server.signal(group=True)
        server.ended()
    assert kept(capture) == (tuple(map(sum, zip(*counts, strict=True))), [])


def test_a_crash_leaves_its_evidence_and_a_restart_takes_another_name(tmp_path):
    """What a supervisor does: the same command again. The first worker is killed while it generates."""
    capture, again = tmp_path / "run.jsonl", tmp_path / "run.2.jsonl"
    settings = {"SPECSCOPE_CAPTURE": str(capture)}
    with Server(tmp_path / "log", **settings) as server:
        assert f"; writing to {capture}; lacking nothing" in server.log.read_text()  # before any request
        whole = server.counted(PROMPTS[0], 40, **WARM)
        heard = heard_until(server, lambda: worker(server).kill())
        server.ended()
    evidence = capture.read_bytes()
    with Server(tmp_path / "log.2", **settings) as server:
        assert f"; writing to {again} ({capture} exists); lacking nothing" in server.log.read_text()
        counted = server.counted(PROMPTS[0], 40, **WARM)
        heard_again = heard_until(server, lambda: server.signal(signal.SIGTERM))
        server.ended()
    assert capture.read_bytes() == evidence
    (drafts, _, _), (remark,) = kept(capture)
    assert drafts > whole[0]
    assert remark == "1 of 2 requests did not end in this file"
    assert cut_off(capture) > heard / 2
    (drafts, _, _), remarks = kept(again)
    assert (drafts > counted[0], remarks) == (True, [])
    assert cut_off(again) >= heard_again


def worker(server):
    """The process that says that it watches."""
    (number,) = re.findall(r"specscope: watching vLLM \S+ \(process (\d+)", server.log.read_text())
    return psutil.Process(int(number))


def heard_until(server, end):
    """End it in the midst of a long answer; how many of its tokens the client had got."""
    heard = 0
    with ask(server.url, PROMPTS[1], 900, **WARM, seed=5, stream=True, return_token_ids=True) as answer:
        for line in answer:
            if line.startswith(b"data: {") and (choices := json.loads(line[6:]).get("choices")):
                heard += len(choices[0].get("token_ids") or ())
            if heard > 60:
                end()
                return heard
    pytest.fail("the answer ended")


def cut_off(capture):
    """Tokens of the last request."""
    return len(list(read_capture(capture).history.requests.values())[-1].output())
