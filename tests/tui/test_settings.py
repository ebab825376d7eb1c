"""The settings file: what it may say, and what is refused."""

import pytest

from specscope.errors import UserError
from specscope.tui.settings import Settings, read_settings, settings_path


def written(tmp_path, text):
    path = tmp_path / "config.toml"
    path.write_text(text)
    return path


def test_without_a_file_all_is_as_usual(tmp_path):
    assert read_settings(tmp_path / "none.toml") == Settings()


def test_what_it_may_say(tmp_path, monkeypatch):
    path = written(tmp_path, 'theme = "light"\nfps = 4\n')
    monkeypatch.setenv("SPECSCOPE_CONFIG", str(path))
    assert settings_path() == path
    assert read_settings() == Settings("light", 4.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("theme = ", "config.toml"),
        ("colour = 1", "unknown setting colour"),
        ('theme = "pink"', "dark or light"),
        ("fps = 0", "from 1 to 60"),
        ("fps = true", "fps must be a number, not True"),
        ('[keys]\npause = "f5"', r"config.toml: \[keys\] was removed: keys cannot be changed"),
        ("fps = nan", "fps must be a number"),
        ("fps = inf", "fps must be a number"),
        ("fps = 1" + "0" * 5000, "config.toml"),
        ("theme = 5", "dark or light"),
        ("x = " + "[" * 5000, "config.toml"),
        ("\x00", "NUL bytes"),
        ("# " + "x" * 2_000_000, "larger than 1 MiB"),
    ],
)
def test_what_is_refused(tmp_path, text, why):
    with pytest.raises(UserError, match=why):
        read_settings(written(tmp_path, text))
