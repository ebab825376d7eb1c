"""Reading both sides: large captures in processes of their own, one for each processor."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from specscope.analyze.compare.side import Side, from_history, joined
from specscope.errors import UserError
from specscope.interrupt import ignore_terminal
from specscope.lifetime import end_with_parent
from specscope.trace.wire.reading import read_capture

LARGE = 16 * 2**20  # bytes: a smaller file is read sooner than a process starts
Progress = Callable[[float], None]


class NoStepsError(UserError):
    """A capture without decode steps: it may hold counts."""


def read_side(path: str, progress: Progress | None = None) -> Side:
    """One capture. Raises UserError."""
    read = read_capture(path, progress)
    return from_history(read.history, path, read.warnings)


def read_sides(a: Sequence[str], b: Sequence[str], progress: Progress | None = None) -> tuple[Side, Side]:
    """Both sides. Raises UserError."""
    paths = [*a, *b]
    large = [path for path in paths if _size(path) > LARGE]
    workers = min(len(large), os.cpu_count() or 1)
    if workers > 1:
        sides = _read_apart(paths, workers, progress)
    else:
        sides = [read_side(path, progress) for path in paths]
    for path, side in zip(paths, sides, strict=True):
        need_decode_steps(side, path)
    return joined(sides[: len(a)]), joined(sides[len(a) :])


def need_decode_steps(side: Side, name: str) -> None:
    """Raises NoStepsError where there are none."""
    if not len(side):
        raise NoStepsError(f"{name} holds no decode steps: there is nothing to compare")


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # reading it reports what is wrong


def _read_apart(paths: Sequence[str], workers: int, progress: Progress | None) -> list[Side]:
    """Each in a process of its own, `workers` at a time."""
    context = multiprocessing.get_context("spawn")
    done: dict[int, Side] = {}
    shares = [0.0] * len(paths)
    waiting = list(range(len(paths)))
    going: dict[Connection, tuple[int, SpawnProcess]] = {}
    try:
        while waiting or going:
            while waiting and len(going) < workers:
                index = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_send, args=(paths[index], theirs), daemon=True)
                with ignore_terminal():
                    process.start()
                theirs.close()
                going[ours] = (index, process)
            for ready in wait(list(going)):
                assert isinstance(ready, Connection)
                index, process = going[ready]
                try:
                    message = ready.recv()
                except EOFError:
                    raise UserError(f"reading {paths[index]} failed: its process ended (out of memory?)") from None
                if isinstance(message, UserError):
                    raise message
                if isinstance(message, float):
                    shares[index] = message
                    if progress:
                        progress(sum(shares) / len(shares))
                    continue
                done[index], shares[index] = message, 1.0
                process.join()
                del going[ready]
    finally:
        for _, process in going.values():
            process.terminate()
    return [done[index] for index in range(len(paths))]


def _send(path: str, to: Connection) -> None:
    """In the process: send how much has been read, then the side, or why it cannot be read."""
    end_with_parent()
    try:
        to.send(read_side(path, to.send))
    except UserError as error:
        to.send(error)
