"""Captures to tables, which are written in row groups, under temporary names until all of them are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specscope.analyze.export.rows import Batches, Source
from specscope.analyze.export.schema import MARK, SCHEMAS
from specscope.errors import UserError, first_line
from specscope.trace.files import PRIVATE
from specscope.trace.record.privacy import Privacy
from specscope.trace.record.records import StepRecord
from specscope.trace.wire.reading import CaptureReader

GROUP = 100_000  # rows of a row group
HELD = 64 * 2**20  # bytes of rows that wait for their row group: prompts may be long
Progress = Callable[[float], None]
SLICE = 0.05  # seconds of reading, whose steps are held
PART = ".part"  # ends the name of a table that is not complete


class Tables:
    """The tables of one folder. Use `open_tables`."""

    def __init__(self, writers: Mapping[str, pq.ParquetWriter]) -> None:
        self.rows = dict.fromkeys(writers, 0)
        self._writers = writers
        self._waiting: dict[str, list[pa.RecordBatch]] = {name: [] for name in writers}

    def add(self, batches: Batches) -> None:
        """Rows of these tables; parents, which are no file, are left out."""
        for name, batch in batches:
            if name in self.rows:
                self.rows[name] += len(batch)
                self._waiting[name].append(batch)
                self.write(name, GROUP, HELD)

    def write(self, name: str, rows: int = 1, size: int = 1) -> None:
        """Write the rows that wait, if they are so many, or of so many bytes."""
        waiting = self._waiting[name]
        if sum(map(len, waiting)) >= rows or sum(batch.nbytes for batch in waiting) >= size:
            self._writers[name].write_table(pa.Table.from_batches(waiting))
            waiting.clear()


@contextmanager
def open_tables(name: str) -> Iterator[Tables]:
    """The tables of a folder, which is created if need be. After an error nothing is left of them.

    Raises UserError where they cannot be written.
    """
    folder = Path(name)
    made = not os.path.lexists(folder)
    parts = {table: folder / f"{table}.parquet{PART}" for table in SCHEMAS}
    try:
        folder.mkdir(exist_ok=True)
        with ExitStack() as stack:
            writers = {
                table: stack.enter_context(pq.ParquetWriter(path, SCHEMAS[table], compression="zstd"))
                for table, path in parts.items()
            }
            for path in parts.values():
                path.chmod(PRIVATE)  # while they are empty: they will hold prompts
            tables = Tables(writers)
            yield tables
            for table in SCHEMAS:
                tables.write(table)
        for path in parts.values():
            os.replace(path, path.with_suffix(""))
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot write {name}: {getattr(error, 'strerror', None) or first_line(error)}") from error
    finally:
        with suppress(OSError):
            for path in parts.values():
                path.unlink(missing_ok=True)
            if made:
                folder.rmdir()  # which fails where the tables are in it


def check_folder(name: str) -> None:
    """Refuse a folder that cannot be written, or that holds anything but an older export. Writes nothing."""
    if not name:
        raise UserError("-o needs the name of a folder")
    folder = Path(name)
    written = folder if os.path.lexists(folder) else folder.absolute().parent  # where it will be made
    if not written.exists():
        raise UserError(f"cannot write {folder}: there is no folder {written}")
    if not written.is_dir():
        raise UserError(f"{written} is a file: -o takes a folder")
    if not os.access(written, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: Permission denied")
    for entry in os.listdir(folder) if written == folder else ():
        if not _is_ours(folder / entry):
            raise UserError(f"{name} holds {entry!r}, which is not from an older export: give another folder")


def _is_ours(path: Path) -> bool:
    """Whether a file is a table that an export wrote, or what is left of one that was killed."""
    table, _, ending = path.name.partition(".")
    if table not in SCHEMAS or ending not in ("parquet", f"parquet{PART}") or not path.is_file():
        return False
    try:
        if ending != "parquet":
            return path.read_bytes()[:4] in (b"PAR1", b"")
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return metadata.get(MARK) == table.encode()


@dataclass
class Exported:
    rows: dict[str, int]  # of each table
    warnings: list[str]  # what is damaged or missing in the captures


class BranchedError(Exception):
    """A run went back: which of its steps are on the way to its end is known when all of it has been read."""


def export(
    captures: Sequence[str], folder: str, progress: Progress | None = None, privacy: Privacy = Privacy.EVERYTHING
) -> Exported:
    """Write the tables of some captures into a folder. Raises UserError; then nothing is written.

    Rows are written while a capture is read, and its steps are let go. Only of a run with branches all are held.
    """
    check_folder(folder)
    for name in captures:
        CaptureReader(name)  # a file that is no capture is refused before anything is written
    branched: set[int] = set()
    while True:
        warnings: list[str] = []
        try:
            with open_tables(folder) as tables:
                for index, name in enumerate(captures):
                    reader = CaptureReader(name, keep=index in branched)
                    source = Source(name, reader.history, privacy)
                    records = _records(reader, progress, index / len(captures), 1 / len(captures))
                    tables.add(source.steps(records))
                    if index not in branched:
                        reader.tell_requests(source.gaps, source.unfinished)
                    tables.add(source.others(reader.warnings))
                    warnings += reader.warnings
            return Exported(tables.rows, warnings)
        except BranchedError:
            branched.add(index)


def _records(reader: CaptureReader, progress: Progress | None, before: float, share: float) -> Iterator[StepRecord]:
    """The records of a capture: while it is read, or where its history keeps them behind its end.

    `before`: what of the whole was read before; `share`: of this capture in it.
    """
    last, more = -1, True
    while more:
        more = reader.read(SLICE)
        records, reader.passed = reader.passed, []
        if progress is not None:
            progress(before + share * reader.progress)
        for record in records:
            if record.after not in (None, last):
                raise BranchedError
            last = record.step
            yield record
    yield from reader.history.known
