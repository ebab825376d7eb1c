from contextlib import nullcontext

import pytest

from specscope.errors import UserError
from specscope.trace.inside.settings import ALL, PluginSettings
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.trace_sampling import TraceSampling
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
    assert read == PluginSettings(capture="a.jsonl", endpoint=None, debug=None, full=False, privacy=Privacy.NO_TEXT)
    assert read.is_on


def test_an_error_while_it_is_installed_does_not_reach_vllm(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "a.jsonl")
    monkeypatch.setattr(plugin, "_install", lambda *_: 1 / 0)
    plugin.register()
    assert "ZeroDivisionError" in caplog.text


def test_trace_sampling_has_its_variables():
    read = PluginSettings.read(
        {
            "SPECSCOPE_OTLP_ENDPOINT": "http://x",
            "SPECSCOPE_SAMPLE": "0.01",
            "SPECSCOPE_KEEP": "tau < 1.5 or error",
            "SPECSCOPE_KEEP_BUFFER": "32",
            "SPECSCOPE_SAMPLE_CAPTURE": "1",
        }
    )
    asked = read.sampling()
    assert (asked.ratio, asked.keep.text, asked.buffer, asked.captures) == (0.01, "tau < 1.5 or error", 2**25, True)
    assert PluginSettings.read({"SPECSCOPE_SAMPLE": ""}).sampling() == TraceSampling()
    with pytest.raises(UserError, match="SPECSCOPE_SAMPLE must be between 0 and 1"):
        PluginSettings.read({"SPECSCOPE_SAMPLE": "7"}).sampling()


def test_the_trace_level_has_its_variable():
    assert PluginSettings.read({}).level() is SpanLevel.TREES
    assert PluginSettings.read({"SPECSCOPE_TRACE_LEVEL": "requests"}).level() is SpanLevel.REQUESTS
    with pytest.raises(UserError, match="SPECSCOPE_TRACE_LEVEL is 'all': use off, requests, steps, trees"):
        PluginSettings.read({"SPECSCOPE_TRACE_LEVEL": "all"}).level()


def test_a_condition_that_cannot_be_used_switches_the_plugin_off_in_one_line(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("SPECSCOPE_KEEP", "tua < 1")
    plugin.register()
    (line,) = caplog.messages
    assert line.startswith("specscope: switched off: SPECSCOPE_KEEP: there is no field tua here")


def test_the_plugins_sinks_are_behind_sampling(tmp_path, caplog):
    """Spans and, where it is asked for, the capture; the same parts as in specscope's own outputs."""
    from specscope.remote.receiver import Receiver
    from specscope.trace.record.vocabulary import Vocabulary
    from specscope.trace.wire.bus import Bus
    from specscope.trace.wire.reading import read_capture
    from tests.trace.sampled_runs import FakeEngine, FinishReason
    from tests.trace.strategies import RUN

    taken, bus, engine = [], Bus(), FakeEngine()
    with Receiver(taken.extend) as receiver:
        asked = {"SPECSCOPE_CAPTURE": str(tmp_path / "a.jsonl"), "SPECSCOPE_KEEP": "error"}
        asked["SPECSCOPE_OTLP_ENDPOINT"] = f"http://127.0.0.1:{receiver.grpc_port}"
        closers = plugin.sinks(PluginSettings.read(asked), bus, RUN, Vocabulary(), (0, 0))
        ends = [(0, FinishReason.ERROR), (0, FinishReason.EOS)]
        bus.publish(engine.step([("", {}), ("", {})], [], [(2, 1)]))
        bus.publish(engine.step([], ends, [(2, 1)]))
        bus.close()
        for close in closers:
            close()
    names = [(one.read()[0], one.read()[3].get("specscope.request.id")) for one in taken]
    assert [name for name, request in names if request == "r1"] == []
    assert [name for name, request in names if request == "r0"][-1].startswith("text_completion")
    assert set(read_capture(tmp_path / "a.jsonl").history.requests) == {"r0", "r1"}  # it is whole
    assert "specscope: kept 1 of 2 requests (1 by outcome)" in caplog.messages


@pytest.mark.parametrize("happens", ["an older capture", "deleted meanwhile", "a full disk", "nothing"])
def test_the_plugin_replaces_no_capture_and_tells_what_becomes_of_its_own(happens, tmp_path, caplog):
    from specscope.trace.record.vocabulary import Vocabulary
    from specscope.trace.wire.bus import Bus
    from specscope.trace.wire.reading import read_capture
    from tests.processes import room_for
    from tests.trace.samples import record
    from tests.trace.strategies import RUN

    path = tmp_path / "a.jsonl"
    if happens == "an older capture":
        path.write_text('{"resourceSpans": []}\n')
    bus = Bus()
    closers = plugin.sinks(PluginSettings.read({"SPECSCOPE_CAPTURE": str(path)}), bus, RUN, Vocabulary(), (0, 0))
    if happens == "deleted meanwhile":
        path.unlink()
    with room_for(path.stat().st_size + 10) if happens == "a full disk" else nullcontext():
        bus.publish(record(0, ()))
        bus.close()
        for close in closers:
            close()
    new = tmp_path / "a.2.jsonl"
    assert (
        caplog.messages
        == {
            "an older capture": [f"specscope: {path} exists: capturing to {new}"],
            "deleted meanwhile": [
                f"specscope: {path} was deleted or replaced during the run: what was captured is lost"
            ],
            "a full disk": [
                f"specscope: {path}: File too large: 1 step not captured so far, and the run goes on",
                f"specscope: 1 step not captured: {path} could not be written",
            ],
            "nothing": [],
        }[happens]
    )
    if happens in ("an older capture", "nothing"):
        assert len(read_capture(new if new.exists() else path).history.steps) == 1
