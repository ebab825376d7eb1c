import os
import subprocess
import sys
from dataclasses import replace

import pytest

from specscope.errors import UserError
from specscope.gone import instead
from specscope.trace.inside.settings import ALL, PluginSettings
from specscope.trace.record.privacy import Privacy
from specscope.trace.wire.spans import SpanLevel
from specscope.vllm import plugin


def test_nothing_happens_unless_a_variable_asks_for_it(monkeypatch):
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    assert not PluginSettings.read({}).is_on
    assert not PluginSettings.read({"SPECSCOPE_CAPTURE": "", "SPECSCOPE_NO_TEXT": "1"}).is_on
    monkeypatch.setattr(plugin, "_install", lambda *_: 1 / 0)
    plugin.register()


def test_what_it_is_asked():
    read = PluginSettings.read({"SPECSCOPE_CAPTURE": "a.jsonl", "SPECSCOPE_EVIDENCE": "lean", "SPECSCOPE_NO_TEXT": "1"})
    asked = PluginSettings(None, None, None, evidence="lean", privacy=Privacy.NO_TEXT)
    assert read == replace(asked, capture="a.jsonl")
    assert read.is_on


def test_an_error_while_it_is_installed_does_not_reach_vllm(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "a.jsonl")
    monkeypatch.setattr(plugin, "_install", lambda *_: 1 / 0)
    plugin.register()
    assert "ZeroDivisionError" in caplog.text


def test_trace_sampling_has_its_variable():
    assert PluginSettings.read({"SPECSCOPE_SAMPLE": "0.01"}).ratio() == 0.01
    assert PluginSettings.read({"SPECSCOPE_SAMPLE": ""}).ratio() is None
    with pytest.raises(UserError, match="SPECSCOPE_SAMPLE must be between 0 and 1"):
        PluginSettings.read({"SPECSCOPE_SAMPLE": "7"}).ratio()


def test_the_trace_level_has_its_variable():
    assert PluginSettings.read({}).level() is SpanLevel.TREES
    assert PluginSettings.read({"SPECSCOPE_TRACE_LEVEL": "requests"}).level() is SpanLevel.REQUESTS
    with pytest.raises(UserError, match="SPECSCOPE_TRACE_LEVEL is 'all': use off, requests, steps, trees"):
        PluginSettings.read({"SPECSCOPE_TRACE_LEVEL": "all"}).level()


def test_evidence_that_is_none_is_refused():
    """As the flag --evidence: a word that is not known must not record more than was asked for."""
    assert not PluginSettings.read({"SPECSCOPE_EVIDENCE": "lean"}).full
    assert PluginSettings.read({"SPECSCOPE_EVIDENCE": ""}).full
    with pytest.raises(UserError, match="SPECSCOPE_EVIDENCE is 'Lean': use full, lean"):
        PluginSettings.read({"SPECSCOPE_EVIDENCE": "Lean"}).check()


@pytest.mark.parametrize(
    ("name", "value"), [("SPECSCOPE_AGGREGATES", "1"), ("SPECSCOPE_EVIDENCE", "counts"), ("SPECSCOPE_KEEP", "error")]
)
def test_a_variable_that_is_gone_switches_the_plugin_off_in_one_line(name, value, monkeypatch, caplog):
    """It asked for less than would be recorded without it."""
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "a.jsonl")
    monkeypatch.setenv(name, value)
    plugin.register()
    line = instead(name) or instead(f"{name}={value}")
    assert caplog.messages == [f"specscope: switched off: {line}"]
    assert not PluginSettings.read({"SPECSCOPE_AGGREGATES": "0"}).gone


def test_what_every_process_of_a_vllm_finds_is_said_once(tmp_path):
    code = (
        "import multiprocessing\n"
        "from specscope.vllm.plugin import register\n"
        "register()\n"
        "worker = multiprocessing.get_context('fork').Process(target=register)\n"
        "worker.start(); worker.join(); print(worker.exitcode)"
    )
    variables = os.environ | {"SPECSCOPE_CAPTURE": "a.jsonl"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=variables
    )
    assert (done.stdout.strip(), done.stderr.count("specscope: ")) == ("0", 1)


def test_a_ratio_that_cannot_be_used_switches_the_plugin_off_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("SPECSCOPE_SAMPLE", "7")
    plugin.register()
    (line,) = caplog.messages
    assert line.startswith("specscope: switched off: SPECSCOPE_SAMPLE must be between 0 and 1")
