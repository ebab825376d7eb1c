"""Captures to tables, which are written in row groups, under temporary names until all of them are complete."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specscope.analyze.export.rows import Source
from specscope.analyze.export.schema import MARK, SCHEMAS
from specscope.errors import UserError, first_line
from specscope.trace.files import PRIVATE
from specscope.trace.wire.reading import CaptureReader, without_gc

GROUP = 100_000  # rows of a row group
HELD = 64 * 2**20  # bytes of rows that wait for their row group: prompts may be long
PART = ".part"  # ends the name of a table that is not complete


class Tables:
    """The tables of one folder. Use `open_tables`."""

    def __init__(self, folder: Path) -> None:
        self.rows = dict.fromkeys(SCHEMAS, 0)
        self._waiting: dict[str, list[pa.RecordBatch]] = {name: [] for name in SCHEMAS}
        self._writers = {
            name: pq.ParquetWriter(folder / f"{name}.parquet{PART}", schema, compression="zstd")
            for name, schema in SCHEMAS.items()
        }
        for name in SCHEMAS:
            (folder / f"{name}.parquet{PART}").chmod(PRIVATE)  # while they are empty: they will hold prompts

    def add(self, name: str, batch: pa.RecordBatch) -> None:
        """Rows of a table."""
        self.rows[name] += len(batch)
        waiting = self._waiting[name]
        waiting.append(batch)
        if sum(len(batch) for batch in waiting) >= GROUP or sum(batch.nbytes for batch in waiting) >= HELD:
            self._write(name)

    def _write(self, name: str) -> None:
        waiting = self._waiting[name]
        if waiting:
            self._writers[name].write_table(pa.Table.from_batches(waiting))
            waiting.clear()

    def finish(self) -> None:
        """Write the rows that still wait, and close the files."""
        for name, writer in self._writers.items():
            self._write(name)
            writer.close()

    def abandon(self) -> None:
        """Close the files, whatever state they are in."""
        for writer in self._writers.values():
            with suppress(OSError, pa.ArrowException):
                writer.close()


@contextmanager
def open_tables(name: str) -> Iterator[Tables]:
    """The tables of a folder, which is created if need be. After an error nothing is left of them.

    Raises UserError where they cannot be written.
    """
    folder = Path(name)
    made = not folder.exists()
    whole = False
    tables = None
    try:
        folder.mkdir(exist_ok=True)
        tables = Tables(folder)
        yield tables
        tables.finish()
        for table in SCHEMAS:
            os.replace(folder / f"{table}.parquet{PART}", folder / f"{table}.parquet")
        whole = True
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot write {name}: {getattr(error, 'strerror', None) or first_line(error)}") from error
    finally:
        if not whole:
            if tables is not None:
                tables.abandon()
            _remove(folder, made)


def _remove(folder: Path, made: bool) -> None:
    """Remove the parts of tables, and the folder where it did not exist before."""
    with suppress(OSError):
        for table in SCHEMAS:
            (folder / f"{table}.parquet{PART}").unlink(missing_ok=True)
        if made:
            folder.rmdir()


def check_folder(name: str) -> None:
    """Refuse a folder that cannot be written, or that holds anything but an older export. Writes nothing."""
    if not name:
        raise UserError("-o needs the name of a folder")
    folder = Path(name)
    try:
        held = os.listdir(folder)
    except FileNotFoundError:
        _check_new(folder)
        return
    except NotADirectoryError:
        raise UserError(f"{name} is a file: -o takes a folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {name}: {getattr(error, 'strerror', None) or error}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {name}: Permission denied")
    for entry in held:
        if not _is_ours(folder / entry):
            raise UserError(f"{name} holds {entry!r}, which is no table of an older export: give another folder")


def _check_new(folder: Path) -> None:
    above = folder.absolute().parent
    if folder.is_symlink() or not above.is_dir():
        raise UserError(f"cannot write {folder}: there is no folder {folder if folder.is_symlink() else above}")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"cannot write {folder}: Permission denied")


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
    """What was written."""

    rows: dict[str, int]  # of each table
    warnings: list[str] = field(default_factory=list)  # what is damaged or missing in the captures


def export(captures: Sequence[str], folder: str, progress: Callable[[float], None] | None = None) -> Exported:
    """Write the tables of some captures into a folder. Raises UserError; then nothing is written."""
    check_folder(folder)
    for name in captures:
        CaptureReader(name)  # a file that is no capture is refused before anything is written
    warnings: list[str] = []
    with open_tables(folder) as tables:
        for index, name in enumerate(captures):
            reader = CaptureReader(name)
            with without_gc():
                while reader.read(0.2):
                    if progress is not None:
                        progress((index + reader.progress) / len(captures))
            source, records = Source(name, reader.history), reader.history.known
            for table, batch in chain(source.steps(records), source.others(records, reader.warnings)):
                if table in SCHEMAS:
                    tables.add(table, batch)
            warnings += reader.warnings
    return Exported(tables.rows, warnings)
