from specscope.vllm import plugin
from specscope.vllm.settings import ALL, Settings


def test_nothing_happens_unless_a_variable_asks_for_it(monkeypatch):
    for name in ALL:
        monkeypatch.delenv(name, raising=False)
    assert not Settings.read({}).is_on
    assert not Settings.read({"SPECSCOPE_CAPTURE": "", "SPECSCOPE_NO_TEXT": "1"}).is_on
    monkeypatch.setattr(plugin, "_install", lambda *_: 1 / 0)
    plugin.register()


def test_what_it_is_asked():
    read = Settings.read({"SPECSCOPE_CAPTURE": "a.jsonl", "SPECSCOPE_EVIDENCE": "lean", "SPECSCOPE_NO_TEXT": "1"})
    assert read == Settings(capture="a.jsonl", endpoint=None, debug=None, full=False, text=False)
    assert read.is_on


def test_an_error_while_it_is_installed_does_not_reach_vllm(monkeypatch, caplog):
    monkeypatch.setenv("SPECSCOPE_CAPTURE", "a.jsonl")
    monkeypatch.setattr(plugin, "_install", lambda *_: 1 / 0)
    plugin.register()
    assert "ZeroDivisionError" in caplog.text
