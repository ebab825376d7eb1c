"""What the verbs give of one input, as JSON that can be kept and compared.

Verbs and their flags stand in ROWS alone: a verb that is renamed keeps its row's name, so that old results are compared
with new ones. Of text, a result is its figures, ids and places: words may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specscope

MANY = 200  # values of a list that are kept one by one; of more, their number and a digest
DIGITS = 6  # of a figure
CLOSE = 1e-5  # figures that differ by less are the same
FILE, NEXT, PLACE, TABLES = "FILE", "NEXT", "PLACE", "tables"
RUN_ID = re.compile(r"\b[0-9a-f]{32}\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
# A place in a capture, or a figure with its unit
FIGURE = re.compile(r"#?r\d+(?:@\d+)?(?:/\d+)?|[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?%?")
CLOCK = re.compile(r"\b\d\d:\d\d:\d\d\b")  # in text: of a figure that has no time, it is now
BEGAN_NS = time.time_ns()  # and so in JSON
Result = dict[str, Any]


@dataclass(frozen=True)
class VerbRow:
    """A verb as it is called. `gives`: json, text, or the tables that it writes."""

    name: str
    words: tuple[str, ...]
    gives: str = "json"


ROWS = (
    VerbRow("report", ("report", "--json", FILE)),
    VerbRow("verify", ("verify", "--json", FILE)),
    VerbRow("export", ("export", FILE, "-o", TABLES), "tables"),
    VerbRow("why", ("why", "--json", FILE)),
    VerbRow("why of the first rejection", ("why", "--json", PLACE)),  # needs the tables
    VerbRow("diagnose", ("diagnose", "--no-audit", "--json", FILE)),
    VerbRow("tune", ("tune", "--no-costs", "--json", FILE)),
    VerbRow("compare", ("compare", "--json", FILE, NEXT)),
    VerbRow("watch", ("watch", "--headless", FILE), "text"),
)


def results_of(path: str, following: str | None = None, names: Container[str] | None = None) -> Result:
    """What every row, or those of `names`, give of an input. `following`: the next one, which it is compared with."""
    results: Result = {}
    with tempfile.TemporaryDirectory() as tables:
        values = {FILE: path, NEXT: following, TABLES: tables, PLACE: None}
        for row in ROWS:
            words = [values.get(word, word) for word in row.words]
            if all(word is not None for word in words) and (names is None or row.name in names):
                results[row.name] = _result(row, [str(word) for word in words], tables)
            if row.gives == "tables":
                values[PLACE] = _first_rejection(path, Path(tables))
    return results


def _result(row: VerbRow, words: list[str], tables: str) -> Result:
    code, out, err = run_here(words)
    result: Result = {"exit": code}
    if row.gives == "tables":
        result["tables"] = {path.stem: _table(path) for path in sorted(Path(tables).glob("*.parquet"))}
    elif row.gives == "json" and out.strip():
        result["json"] = reduced(json.loads(out))
    elif out.strip():
        result["text"] = figures(out)
    said = [masked(line.replace(tables, TABLES)) for line in err.splitlines() if line.strip()]
    return result | ({"said": said} if said and "json" not in result else {})  # JSON holds errors and warnings


def run_here(words: list[str]) -> tuple[int, str, str]:
    """The exit code and both outputs of the command in this process: torch and the rest are imported once."""
    from specscope.__main__ import main

    out, err, before, code = io.StringIO(), io.StringIO(), sys.argv, 0
    sys.argv = ["specscope", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = before
    return code, out.getvalue(), err.getvalue()


def _table(path: Path) -> Result:
    """A table's length, and the type and a digest of each column."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    columns = {
        field.name: f"{field.type} {_digest(reduced(table.column(field.name).to_pylist(), many=None))}"
        for field in table.schema
    }
    return {"rows": table.num_rows, "columns": columns}


def _first_rejection(path: str, tables: Path) -> str | None:
    """The place of the first node that was rejected, by an export's table; None where none was."""
    from pyarrow import parquet

    file = tables / "nodes.parquet"
    if not file.exists():
        return None
    columns = ["request", "index", "node", "outcome"]
    rows = zip(*(parquet.read_table(file, columns=columns)[name].to_pylist() for name in columns), strict=True)
    return next((f"{path}#{request}@{step}/{node}" for request, step, node, said in rows if said == "rejected"), None)


def masked(text: str) -> str:
    """Text without ids of runs, which may be new each time, and our version; verbs as they were called."""
    text = text.replace("specscope open ", "specscope replay ").replace("specscope debug ", "specscope debug --over ")
    text = text.replace("use open,", "use replay,").replace("diagnose/2", "diagnose/1")
    return RUN_ID.sub("RUN", text).replace(f"specscope {specscope.__version__}", "specscope VERSION")


def figures(text: str) -> list[str]:
    """The figures, ids and places of each line that has some."""
    lines = CLOCK.sub("", masked(text)).splitlines()
    return [" ".join(found) for line in lines if (found := FIGURE.findall(line))]


def reduced(value: object, many: int | None = MANY) -> object:
    """JSON that can be compared: figures of some digits, ids masked, and long lists as a digest."""
    if isinstance(value, Mapping):
        return {str(key): reduced(inner, many) for key, inner in value.items() if key != "stages"}
    if isinstance(value, list):
        inner = [reduced(one, many) for one in value]
        return inner if many is None or len(inner) <= many else {"values": len(inner), "digest": _digest(inner)}
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, int) and value >= BEGAN_NS:
        return "NOW"
    return value if isinstance(value, bool | int | None) else str(value)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(old: object, new: object, *keys: str) -> Iterator[str]:
    """A line for each difference: file, verb and key, what it was and what it is."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key, _MISSING), new.get(key, _MISSING), *keys, key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from differences(*pair, *keys[:-1], f"{keys[-1] if keys else ''}[{number}]")
    elif not _same(old, new):
        yield f"{': '.join(keys[:2])}: {'.'.join(keys[2:])}: {_short(old)} -> {_short(new)}"


_MISSING = object()


def _same(old: object, new: object) -> bool:
    if isinstance(old, int | float) and isinstance(new, int | float) and float in (type(old), type(new)):
        return (math.isnan(old) and math.isnan(new)) or math.isclose(old, new, rel_tol=CLOSE, abs_tol=1e-12)
    return type(old) is type(new) and bool(old == new)


def _short(value: object) -> str:
    text = "nothing" if value is _MISSING else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:120]}... ({len(text):,} characters, {_digest(value)})"
