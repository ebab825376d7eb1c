"""A script that knows nothing of specscope is recorded by variables, and does what it does without them."""

import subprocess
import sys

import pytest
from transformers.generation import utils

from specscope.remote.receiver import Receiver
from specscope.trace.record.records import FinishReason
from specscope.trace.wire.reading import read_capture
from specscope.transformers import unasked
from tests.support.records import received
from tests.transformers.scripts import SCRIPT, environment, installed, run, without_ours


@pytest.fixture(scope="module")
def installation(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("installed"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def ends(capture):
    return [end for record in read_capture(capture).history.steps for end in record.finished]


def test_a_script_is_recorded_and_sent_and_does_what_it_does_without(folder, installation):
    taken, words = [], ["script.py", "exits", "--capture", "x"]
    without = run(words, folder, installation)
    with Receiver(taken.append) as receiver:
        variables = {"SPECSCOPE_CAPTURE": "run.jsonl", "SPECSCOPE_OTLP_ENDPOINT": f"127.0.0.1:{receiver.grpc_port}"}
        recorded = run(words, folder, installation, **variables)
    assert (recorded.returncode, recorded.stdout) == (without.returncode, without.stdout)
    assert without.returncode == 3
    assert without_ours(recorded.stderr) == without_ours(without.stderr)
    assert f"specscope: captured to {folder / 'run.jsonl'}" in recorded.stderr
    steps = read_capture(folder / "run.jsonl").history.steps
    assert len(steps) > 5
    sent = {span.attributes.get("specscope.step") for _, span in received(taken)} - {None}
    assert sent == {record.step for record in steps}, "the receiver did not get every record"


@pytest.mark.parametrize("how", ["raises", "forks"])
@pytest.mark.slow
def test_however_it_ends_the_capture_is_whole(folder, installation, how):
    without = run(["script.py", how], folder, installation)
    recorded = run(["script.py", how], folder, installation, SPECSCOPE_CAPTURE="run.jsonl")
    assert (recorded.returncode, recorded.stdout) == (without.returncode, without.stdout)
    assert without_ours(recorded.stderr) == without_ours(without.stderr)
    assert recorded.stderr.count("captured to") == 1
    assert len(ends(folder / "run.jsonl")) == 1  # of a fork there is none: what writes is the parent's


def test_without_a_variable_nothing_of_specscope_is_imported(tmp_path, installation):
    code = "import sys, torch; print(sorted(name for name in sys.modules if name.startswith('specscope')))"
    done = run(["-c", code], tmp_path, installation)
    assert done.stdout.split() == ["['specscope',", "'specscope.transformers',", "'specscope.transformers.unasked']"]


def test_what_cannot_be_recorded_is_told_in_a_line_and_the_import_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "run.jsonl")
    monkeypatch.setenv("SPECSCOPE_SAMPLE", "7")
    monkeypatch.delitem(sys.modules, "specscope.cli.main", raising=False)  # our own command records nothing by itself
    assert utils.__name__ in sys.modules  # so that it begins at once
    unasked.register()
    (line,) = [line for line in caplog.messages if "nothing is recorded" in line]
    assert "SPECSCOPE_SAMPLE must be between 0 and 1" in line


def test_inside_vllm_its_own_plugin_records(monkeypatch):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "run.jsonl")
    monkeypatch.setitem(sys.modules, "vllm", sys)
    monkeypatch.setattr(unasked, "recording_of", lambda settings: pytest.fail("recorded twice"))
    unasked.register()


@pytest.mark.slow
def test_ctrl_c_leaves_a_valid_capture(folder, installation):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = environment(installation, SPECSCOPE_CAPTURE="run.jsonl")
    with subprocess.Popen([sys.executable, "script.py", "waits"], cwd=folder, env=variables, **pipes) as process:
        assert process.stdout.readline().startswith("['script.py', 'waits']")
        process.stdout.readline()  # it has generated once, and goes on
        process.send_signal(2)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == -2  # as Python ends by a Ctrl-C that nobody caught
    assert "KeyboardInterrupt" in stderr
    reader = read_capture(folder / "run.jsonl")
    assert reader.warnings == []
    reasons = {end.reason for end in ends(folder / "run.jsonl")}
    assert reasons <= {FinishReason.LENGTH, FinishReason.EOS, FinishReason.ERROR}
