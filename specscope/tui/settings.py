"""The user's settings: theme and frame rate of the screen, from a TOML file."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta
from platformdirs import user_config_path

from specscope.errors import UserError
from specscope.gone import refuse_gone
from specscope.trace.checked import checked
from specscope.trace.files import read_lines

VARIABLE = "SPECSCOPE_CONFIG"
LARGEST = 2**20  # bytes of the file

Theme = Annotated[Literal["dark", "light"], Meta(description="dark or light")]
Folder = Annotated[str, Meta(max_length=4096, description="a folder, such as '~/pictures'")]
Fps = Annotated[float, Meta(ge=1, le=60, description="a number from 1 to 60")]


@dataclass(frozen=True)
class Settings:
    """What the file may say, and its schema; every field may be left out."""

    theme: Theme = "dark"
    fps: Fps = 10  # frames a second
    screenshots: str = ""  # the folder that screenshots go to; "" is the current one


def settings_path() -> Path:
    """$SPECSCOPE_CONFIG, else config.toml in the user's configuration folder for specscope."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else user_config_path("specscope") / "config.toml"


def read_settings(path: Path | None = None) -> Settings:
    """The settings; the defaults where there is no file. Raises UserError for a file that cannot be understood."""
    path = path or settings_path()
    if not path.exists():
        return Settings()
    settings = _read(path)
    try:
        if "keys" in settings:
            refuse_gone("[keys]")
        unknown = set(settings) - {"theme", "fps", "screenshots"}
        if unknown:
            raise UserError(f"unknown setting {sorted(unknown)[0]}: use theme, fps and screenshots")
        return Settings(
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
