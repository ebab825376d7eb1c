"""`specscope transformers`: a script runs as by `python script.py`, and the screen shows how it ends."""

import subprocess
import sys

import pytest

from specscope.cli.inside import name_of
from specscope.cli.inside import script_environment as environment
from specscope.trace.wire.reading import read_capture
from tests.processes import Terminal
from tests.support.commands import run_here
from tests.transformers.scripts import DIES, PLAIN, SCRIPT, installed, run, without_ours
from tests.transformers.scripts import environment as of_process
from tests.waiting import until

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
def test_the_screen_shows_what_it_records_and_how_it_ends(folder, installation, words, seen, monkeypatch):
    monkeypatch.chdir(folder)
    command = [sys.executable, *VERB, "--screen", *words]
    terminal = Terminal(command, size=(40, 120), PYTHONPATH=of_process(installation)["PYTHONPATH"])
    try:
        until(lambda: all(text.encode() in terminal.screen for text in seen), says=lambda: terminal.screen[-3000:])
        terminal.type("q")
        until(lambda: b"the output of" in terminal.screen)
        assert terminal.process.wait(60) == (0 if words == ["plain.py"] else 1)
    finally:
        terminal.close()


def test_what_it_is_run_with(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECSCOPE_SAMPLE", "0.5")  # of which no flag is made here
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # a script finds the modules beside it
    variables = environment({"SPECSCOPE_CAPTURE": "a.jsonl", "SPECSCOPE_SAMPLE": None})
    assert variables["SPECSCOPE_CAPTURE"] == "a.jsonl"
    assert {"SPECSCOPE_SAMPLE", "PYTHONSAFEPATH"}.isdisjoint(variables)
    assert [name_of(words) for words in (["a/b.py", "-x"], ["-m", "mine", "y"], ["-"])] == ["b.py", "mine", "python"]


def test_an_environment_without_the_entry_point_is_told(tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    code, _, err = run_here(["transformers", "--python", str(tmp_path / "bare" / "bin" / "python"), "a.py"])
    assert (code, err.count("\n")) == (2, 1)
    assert "transformers is not installed for" in err
