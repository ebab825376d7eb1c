"""The settings file: what it may say, what is refused, and that a key that is bound otherwise works."""

import pytest

from specscope.errors import UserError
from specscope.tui.app import ScopeApp
from specscope.tui.keys import ACTIONS
from specscope.tui.screens.help import help_lines
from specscope.tui.settings import Settings, read_settings, settings_path
from tests.tui.sample import replay


def written(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_without_a_file_all_is_as_usual(tmp_path):
    assert read_settings(ACTIONS, tmp_path / "none.toml") == Settings()


def test_what_it_may_say(tmp_path, monkeypatch):
    path = written(tmp_path, 'theme = "light"\nfps = 4\n[keys]\npause = "f5"\ndebugger = "f6,colon"\n')
    monkeypatch.setenv("SPECSCOPE_CONFIG", str(path))
    assert settings_path() == path
    assert read_settings(ACTIONS) == Settings({"pause": "f5", "debugger": "f6,colon"}, "light", 4.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("theme = ", "config.toml"),
        ("colour = 1", "unknown setting colour"),
        ('theme = "pink"', "dark or light"),
        ("fps = 0", "from 1 to 60"),
        ("fps = true", "fps must be a number, not True"),
        ("keys = 3", "keys must be a table"),
        ('[keys]\nfly = "f"', "unknown action 'fly'"),
        ("[keys]\npause = 5", "pause must be a key"),
        ('[keys]\npause = ","', "pause must be a key"),
        ('[keys]\npause = "q"', "q is given to both"),
        ("fps = nan", "fps must be a number"),
        ("fps = inf", "fps must be a number"),
        ("fps = 1" + "0" * 5000, "config.toml"),
        ("theme = 5", "dark or light"),
        ("keys = " + "[" * 5000, "config.toml"),
        ("[keys]\n" + "x" * 300 + " = 'f'", "unknown action"),
        ("\x00", "NUL bytes"),
        ("# " + "x" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_what_is_refused(tmp_path, text, why):
    with pytest.raises(UserError, match=why):
        read_settings(ACTIONS, written(tmp_path, text))


async def test_a_key_bound_otherwise_does_its_work_and_is_named():
    app = ScopeApp(replay(14), settings=Settings({"back": "f7", "quit": "f10"}))
    async with app.run_test(size=(200, 60)) as pilot:
        at = app.viewer.position
        await pilot.press("comma")
        assert app.viewer.position == at
        await pilot.press("f7")
        assert app.viewer.position == at - 1
    text = "".join(part for line in help_lines(120, app.settings.keys) for part, _ in line)
    assert "f7     previous step" in text
    assert "f10    quit" in text
