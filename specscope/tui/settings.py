"""The user's settings: keys, theme and frame rate of the screen, from a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta
from platformdirs import user_config_path

from specscope.errors import UserError
from specscope.trace.checked import checked, short
from specscope.trace.files import read_lines

VARIABLE = "SPECSCOPE_CONFIG"
LARGEST = 2**20  # bytes of the file


KEY = "a key, such as 'f5', or several with commas"
Key = Annotated[str, Meta(max_length=200, pattern=r"^\s*[^\s,][^,]*(,\s*[^\s,][^,]*)*$", description=KEY)]
Keys = Annotated[
    dict[str, Any], Meta(max_length=200, description="a table: [keys], then a line for each, such as pause = 'f5'")
]
Theme = Annotated[Literal["dark", "light"], Meta(description="dark or light")]
Folder = Annotated[str, Meta(max_length=4096, description="a folder, such as '~/pictures'")]
Fps = Annotated[float, Meta(ge=1, le=60, description="a number from 1 to 60")]


@dataclass(frozen=True)
class Settings:
    """What the file may say, and its schema; every field may be left out."""

    keys: Mapping[str, str] = field(default_factory=dict)  # [keys]: an action's name to its key or keys, "f5,p"
    theme: Theme = "dark"
    fps: Fps = 10  # frames a second at most
    screenshots: str = ""  # the folder that screenshots go to; "" is the current one


def settings_path() -> Path:
    """$SPECSCOPE_CONFIG, else config.toml in the user's configuration folder for specscope."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else user_config_path("specscope") / "config.toml"


def read_settings(actions: Mapping[str, str], path: Path | None = None) -> Settings:
    """The settings; the defaults where there is no file. Raises UserError for a file that cannot be understood.

    `actions`: the names that [keys] may have, with their usual keys; no key may be given to two of them.
    """
    path = path or settings_path()
    if not path.exists():
        return Settings()
    settings = _read(path)
    try:
        unknown = set(settings) - {"keys", "theme", "fps", "screenshots"}
        if unknown:
            raise UserError(f"unknown setting {sorted(unknown)[0]}: use keys, theme, fps and screenshots")
        return Settings(
            _keys(checked(settings.get("keys", {}), Keys, "keys"), actions),
            checked(settings.get("theme", "dark"), Theme, "theme"),
            checked(settings.get("fps", 10), Fps, "fps"),
            checked(settings.get("screenshots", ""), Folder, "screenshots"),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    """The file as it is; empty where there is none."""
    try:
        lines = [line for _, line in read_lines(str(path), "the settings", largest=LARGEST)]
        return tomllib.loads("\n".join(lines))
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:  # ValueError: a number of 5,000 digits
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UserError(f"{path}: {reason}") from error


def _keys(keymap: Mapping[str, Any], actions: Mapping[str, str]) -> dict[str, str]:
    """[keys], checked: each a known action, and no key given to two of them."""
    for name, key in keymap.items():
        if name not in actions:
            raise UserError(f"unknown action {short(name)}: use {', '.join(actions)}")
        checked(key, Key, f"keys.{name}")
    owner: dict[str, str] = {}
    for name, keys in {**actions, **keymap}.items():
        for key in (part.strip() for part in keys.split(",")):
            if key in owner:
                raise UserError(f"{key} is given to both {owner[key]} and {name}")
            owner[key] = name
    return dict(keymap)
