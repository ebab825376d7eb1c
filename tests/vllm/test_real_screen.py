"""The screen beside a real vLLM: SPECSCOPE_VLLM_PYTHON names its interpreter, with the plugin installed.

SPECSCOPE_VLLM_PYTHON=/path/to/vllm/bin/python pytest -m slow tests/vllm/test_real_screen.py
"""

import json

import pytest

from tests.processes import SPECSCOPE, Terminal, free_port
from tests.vllm.models import TARGET
from tests.vllm.served import EAGLE, LOAD_SECONDS, OFFLINE, OPTIONS, PYTHON, ask
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="SPECSCOPE_VLLM_PYTHON names no vLLM")]


class Screen(Terminal):
    """`specscope vllm --screen -- serve ...` on a terminal."""

    def __init__(self, size, *arguments):
        command = [*SPECSCOPE, "vllm", "--screen", "--python", PYTHON, "--", "serve", *arguments]
        super().__init__(command, size, **OFFLINE)

    def shows(self, *words):
        found = wait_for(lambda: all(word.encode() in self.screen for word in words), LOAD_SECONDS)
        assert found, self.screen[-3000:]


@pytest.mark.parametrize("size", [(24, 80), (40, 120)], ids=str)
@pytest.mark.parametrize(
    ("arguments", "why"), [((str(TARGET), "--no-such-flag"), "unrecognized arguments"), (("./no-such",), "Error")]
)
def test_a_vllm_that_dies_at_its_start_has_ended_and_says_why(size, arguments, why):
    terminal = Screen(size, *arguments)
    try:
        terminal.shows("loading", "failed", "exit code", why)
        drawn = len(terminal.screen)
        terminal.type("q")
        assert terminal.process.wait(LOAD_SECONDS) in (1, 2)
        assert wait_for(lambda: why.encode() in terminal.screen[drawn:]), terminal.screen[drawn:]
    finally:
        terminal.close()


def test_one_that_loads_shows_its_log_then_that_it_is_watched_then_its_steps():
    port = free_port()
    options = [*OPTIONS, "--port", str(port), "--served-model-name", "it", "--speculative-config", json.dumps(EAGLE)]
    terminal = Screen((24, 80), str(TARGET), *options)
    try:
        terminal.shows("vLLM is starting", "INFO", "watching vLLM", "idle", "Application startup complete")
        assert b"attached" not in terminal.screen
        ask(f"http://127.0.0.1:{port}", "anna has a cat", 20).close()
        terminal.shows("attached", "Acceptance")
        terminal.remember()
        terminal.type("q")
        assert terminal.process.wait(LOAD_SECONDS) == 0
        assert terminal.left() == []
    finally:
        terminal.close()
