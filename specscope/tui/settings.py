"""The user's settings: keys, theme and frame rate of the screen, from a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from specscope.errors import UserError

VARIABLE = "SPECSCOPE_CONFIG"


@dataclass(frozen=True)
class Settings:
    """What the file may say; every field may be left out."""

    keys: Mapping[str, str] = field(default_factory=dict)  # [keys]: an action's name to its key or keys, "f5,p"
    theme: str = "dark"  # dark or light
    fps: float = 10  # frames a second at most, 1 to 60


def settings_path() -> Path:
    """$SPECSCOPE_CONFIG, else config.toml in the user's configuration folder for specscope."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else user_config_path("specscope") / "config.toml"


def read_settings(actions: Mapping[str, str], path: Path | None = None) -> Settings:
    """The settings; the defaults where there is no file. Raises UserError for a file that cannot be understood.

    `actions`: the names that [keys] may have, with their usual keys; no key may be given to two of them.
    """
    path = path or settings_path()
    try:
        found = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return Settings()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: {error}") from error
    unknown = set(found) - {"keys", "theme", "fps"}
    if unknown:
        raise UserError(f"{path}: unknown {', '.join(sorted(unknown))}; there are keys, theme and fps")
    theme, fps = found.get("theme", "dark"), found.get("fps", 10)
    if theme not in ("dark", "light"):
        raise UserError(f"{path}: theme is dark or light, not {theme!r}")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not 1 <= fps <= 60:
        raise UserError(f"{path}: fps is a number from 1 to 60, not {fps!r}")
    return Settings(_keys(found.get("keys", {}), actions, path), theme, float(fps))


def _keys(found: Any, actions: Mapping[str, str], path: Path) -> dict[str, str]:  # noqa: ANN401
    """[keys], checked."""
    if not isinstance(found, dict):
        raise UserError(f"{path}: keys is a table: [keys], then a line for each, such as pause = 'f5'")
    for name, key in found.items():
        if name not in actions:
            raise UserError(f"{path}: there is no action {name!r}; there are {', '.join(actions)}")
        if not isinstance(key, str) or not all(part.strip() for part in key.split(",")):
            raise UserError(f"{path}: keys.{name} is a key, such as 'f5', or several with commas, not {key!r}")
    owner: dict[str, str] = {}
    for name, keys in {**actions, **found}.items():
        for key in (part.strip() for part in keys.split(",")):
            if key in owner:
                raise UserError(f"{path}: {key} is given to both {owner[key]} and {name}")
            owner[key] = name
    return dict(found)
