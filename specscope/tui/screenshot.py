"""The palette's screenshot: an SVG in the current folder, or where the settings say."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from textual.app import App

from specscope.errors import UserError


def save_screenshot(app: App[None], folder: str) -> Path:
    """Write what the screen shows; the file. Raises UserError where it cannot be written."""
    path = Path(folder or ".").expanduser() / f"specscope-{datetime.now():%Y%m%d-%H%M%S-%f}.svg"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(app.export_screenshot())
    except OSError as error:
        raise UserError(
            f"cannot write a screenshot to {path.parent}: {error.strerror}; set screenshots in the settings"
        ) from error
    return path
