"""Logs, pages and answers of engines where a verb reads captures: they are watched to their end first."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specscope.errors import UserError
from specscope.trace.files import Existing
from specscope.trace.kinds import ReadAs, kind_of, start_of
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.vocabulary import printable, shell_word
from specscope.trace.stored import FetchedCapture, StoreAddress
from specscope.trace.wire.outputs import OutputOptions
from specscope.trace.wire.spans import SpanLevel

F = TypeVar("F", bound=Callable[..., Any])
POLL = 0.02  # seconds between two looks for its end


def reads_watched(function: F) -> F:
    """Of a verb whose captures may be files that `watch` reads."""

    @functools.wraps(function)
    def read(*args: Any, **flags: Any) -> Any:  # noqa: ANN401
        for name, value in flags.items():
            if isinstance(value, tuple) and name in ("captures", "others"):
                flags[name] = tuple(map(_capture_of, value))
        return function(*args, **flags)

    return read  # type: ignore[return-value]


def _capture_of(file: str) -> str:
    """The capture of a file that watch reads, under the file's name; any other as it is. Raises UserError."""
    if isinstance(file, StoreAddress | FetchedCapture):
        return file
    kind = kind_of(start_of(file))
    return file if kind is None or kind.reader is not ReadAs.WATCH else watched_capture(file)


def watched_capture(file: str) -> FetchedCapture:
    """What a file says of one engine, as a capture until the process ends. Raises UserError."""
    from specscope.cli.watch import opened_sources
    from specscope.watch.watching import Watch

    folder = tempfile.mkdtemp(prefix="specscope-watch-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "capture.jsonl"
    about: dict[str, Any] = {"privacy": Privacy.NO_TEXT, "existing": Existing.REPLACE, "service": ""}
    watch = Watch(
        *opened_sources((file,), 1.0, OutputOptions(str(path), None, None, SpanLevel.TREES, None, **about), False)
    )
    watch.start()
    try:
        while not watch.done:
            watch.news.clear()
            time.sleep(POLL)
    finally:
        losses = watch.stop()
    if watch.errors:
        raise watch.errors[0]
    name = printable(file)
    if len(watch.runs) != 1:
        several = "several engines" if watch.runs else "no interval of any engine"
        raise UserError(
            f"{name} has {several}: specscope watch {shell_word(file)} --headless -o w.jsonl shows what it has"
        )
    return FetchedCapture(file, path, notes=(*watch.faults(), *losses))
