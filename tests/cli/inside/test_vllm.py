"""What `specscope vllm` asks the plugin to do."""

import os

import pytest

from specscope.cli.inside import vllm_environment as environment
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.privacy import Privacy
from tests.processes import SPECSCOPE, Terminal
from tests.support.commands import run_here
from tests.waiting import HANG_SECONDS

LIMIT = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"


@pytest.fixture
def started(monkeypatch):
    """The variables of each vLLM that was started."""
    variables = []

    class Ended:
        def __init__(self, command, env, **how):
            variables.append(env)

        def wait(self):
            return 0

    monkeypatch.setattr("specscope.cli.inside.interpreter", lambda *words: "python")
    monkeypatch.setattr("specscope.cli.inside.subprocess.Popen", Ended)
    return variables


@pytest.mark.parametrize(("evidence", "full"), [("full", True), ("lean", False)])
def test_the_evidence_that_was_asked_for(evidence, full, monkeypatch):
    monkeypatch.setenv("SPECSCOPE_AGGREGATES", "1")  # is gone
    given = {"SPECSCOPE_CAPTURE": "/a.jsonl", "SPECSCOPE_EVIDENCE": evidence}
    told = environment(given)
    settings = PluginSettings.read(told)
    settings.check()
    assert (settings.full, settings.is_on) == (full, True)
    assert "SPECSCOPE_EVIDENCE" in told["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")


def test_a_debugger_may_hold_a_worker_longer_than_vllm_waits_by_itself(monkeypatch):
    def told(debug):
        return environment({"SPECSCOPE_DEBUG_SOCKET": debug}).get(LIMIT)

    monkeypatch.delenv(LIMIT, raising=False)
    assert told(None) is None
    assert int(told("debug.sock")) > 3600
    monkeypatch.setenv(LIMIT, "60")  # what the user chose stays
    assert told("debug.sock") == "60"


@pytest.mark.parametrize("level", Privacy)
def test_a_variable_counts_where_its_flag_is_not_given(level, started, monkeypatch):
    words = ["vllm", "--capture", "a.jsonl", *filter(None, [level.flag]), "--", "serve", "m"]
    assert run_here(words)[0] == 0
    assert PluginSettings.read(started[0]).privacy is level
    for name, value in (("SAMPLE", "0.5"), ("OTLP_ENDPOINT", "http://x"), ("EVIDENCE", "lean"), ("NO_TOKENS", "1")):
        monkeypatch.setenv(f"SPECSCOPE_{name}", value)
    assert run_here(["vllm", "--evidence", "full", "--", "serve", "m"])[0] == 0
    told = PluginSettings.read(started[1])
    assert (told.ratio(), told.endpoint, told.full, told.privacy) == (0.5, "http://x", True, Privacy.NO_TOKENS)
    assert run_here(["vllm", "--sample", "0.1", "--", "serve", "m"])[0] == 0
    assert PluginSettings.read(started[2]).ratio() == 0.1


def test_the_screen_of_a_vllm_that_dies_at_its_start_says_so_and_so_does_the_end(tmp_path):
    """What is started is a package of vLLM's name: only its command line is there, and fails."""
    main = tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text("def main():\n    print('it loads', flush=True)\n    raise OSError('no such model')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    terminal = Terminal([*SPECSCOPE, "vllm", "--screen", "--", "serve", "x"], (24, 80), PYTHONPATH=path)
    try:
        terminal.wait_for(lambda: b"failed" in terminal.screen and b"no such model" in terminal.screen)
        assert b"exit code 1" in terminal.screen
        drawn = len(terminal.screen)
        terminal.type("q")
        assert terminal.process.wait(HANG_SECONDS) == 1
        terminal.wait_for(lambda: b"the output of vLLM is in" in terminal.screen[drawn:])
        assert b"OSError: no such model" in terminal.screen[drawn:]
    finally:
        terminal.close()
