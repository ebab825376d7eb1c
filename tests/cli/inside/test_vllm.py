"""What `specscope vllm` and `specscope transformers` ask of what they start, and what their screens show of it."""

import os
import subprocess
import sys

import pytest

from specscope.cli.inside import name_of, script_environment, vllm_environment
from specscope.trace.inside.settings import PluginSettings
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.reading import read_capture
from tests.processes import SPECSCOPE
from tests.support.commands import run_here
from tests.transformers.scripts import DIES, PLAIN, SCRIPT, installed, run, without_ours
from tests.transformers.scripts import environment as of_process
from tests.waiting import HANG_SECONDS, until

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
    told = vllm_environment(given)
    settings = PluginSettings.read(told)
    settings.check()
    assert (settings.full, settings.is_on) == (full, True)
    assert "SPECSCOPE_EVIDENCE" in told["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].split(",")


def test_a_debugger_may_hold_a_worker_longer_than_vllm_waits_by_itself(monkeypatch):
    def told(debug):
        return vllm_environment({"SPECSCOPE_DEBUG_SOCKET": debug}).get(LIMIT)

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


def test_the_screen_of_a_vllm_that_dies_at_its_start_says_so_and_so_does_the_end(terminal, tmp_path):
    """What is started is a package of vLLM's name: only its command line is there, and fails."""
    main = tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text("def main():\n    print('it loads', flush=True)\n    raise OSError('no such model')\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    shown = terminal(*SPECSCOPE, "vllm", "--screen", "--", "serve", "x", size=(24, 80), PYTHONPATH=path)
    shown.wait_for(lambda: b"failed" in shown.screen and b"no such model" in shown.screen)
    assert b"exit code 1" in shown.screen
    drawn = len(shown.screen)
    shown.type("q")
    assert shown.process.wait(HANG_SECONDS) == 1
    shown.wait_for(lambda: b"the output of vLLM is in" in shown.screen[drawn:])
    assert b"OSError: no such model" in shown.screen[drawn:]


VERB = ["-m", "specscope", "transformers"]


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def folder(tmp_path):
    for name, text in (("script.py", SCRIPT), ("dies.py", DIES), ("plain.py", PLAIN)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_script_whose_name_begins_with_a_dash_is_no_option_of_python(folder, installation):
    (folder / "-e.py").write_text("print('it runs')")
    assert run([*VERB, "--", "-e.py"], folder, installation).stdout == "it runs\n"


@pytest.mark.parametrize("how", ["raises", "exits"])
@pytest.mark.slow
def test_it_is_as_python_runs_it_and_recorded(folder, installation, how):
    words = ["script.py", how, "--screen", "-h"]  # the script's own flags
    without = run(words, folder, installation)
    recorded = run([*VERB, *words], folder, installation)
    assert (recorded.returncode, recorded.stdout) == (without.returncode, without.stdout)
    assert without_ours(recorded.stderr) == without_ours(without.stderr)
    assert len(read_capture(folder / "run.jsonl").history.steps) > 5


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        (["dies.py"], ["exit code 1: OSError: my/model does not appear to have a file"]),
        (["plain.py"], ["it ended", "nothing was recorded: no generate() with an assistant ran"]),
        (["script.py", "raises"], ["generate-0", "exit code 1: RuntimeError: enough"]),
    ],
)
@pytest.mark.slow
def test_the_screen_shows_what_it_records_and_how_it_ends(terminal, folder, installation, words, seen, monkeypatch):
    monkeypatch.chdir(folder)
    command = [sys.executable, *VERB, "--screen", *words]
    shown = terminal(*command, size=(40, 120), PYTHONPATH=of_process(installation)["PYTHONPATH"])
    until(lambda: all(text.encode() in shown.screen for text in seen), says=lambda: shown.screen[-3000:])
    shown.type("q")
    until(lambda: b"the output of" in shown.screen)
    assert shown.process.wait(60) == (0 if words == ["plain.py"] else 1)


def test_what_it_is_run_with(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECSCOPE_SAMPLE", "0.5")  # of which no flag is made here
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # a script finds the modules beside it
    variables = script_environment({"SPECSCOPE_CAPTURE": "a.jsonl", "SPECSCOPE_SAMPLE": None})
    assert variables["SPECSCOPE_CAPTURE"] == "a.jsonl"
    assert {"SPECSCOPE_SAMPLE", "PYTHONSAFEPATH"}.isdisjoint(variables)
    assert [name_of(words) for words in (["a/b.py", "-x"], ["-m", "mine", "y"], ["-"])] == ["b.py", "mine", "python"]


def test_an_environment_without_the_entry_point_is_told(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    code, _, err = run_here(["transformers", "--python", str(tmp_path / "bare" / "bin" / "python"), "a.py"])
    assert (code, err.count("\n")) == (2, 1)
    assert "transformers is not installed for" in err
