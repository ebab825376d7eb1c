"""The measures of tests/test_house.py, and what breaks them today. `python -m tests.house` prints both.

A folder's bound is its budget, or its lines where it is still above that. It may only fall, except by lines that an
issue grants by number. Lines are of Python, __init__.py included.
"""

import ast
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES, FEWEST_LINES = 600, 60
MOST_FILES = 15  # of a folder
SLACK = 50  # what may be gained before a bound is lowered
BOUNDS: dict[str, tuple[int, int]] = {  # of each row: (bound, budget)
    "trace": (10039, 9300),
    "remote": (1700, 1700),
    "watch": (2005, 1850),
    "analyze": (18982, 15700),
    "measure": (3740, 3300),
    "engine": (2358, 2350),
    "plans": (879, 850),
    "speculate": (3120, 2700),
    "model": (3053, 2800),
    "kernels": (2200, 2200),
    "inside": (1850, 1850),
    "vllm, transformers, sglang": (4067, 4050),
    "debug, live": (3200, 3200),
    "tui": (5500, 5500),
    "cli": (3210, 3100),
    "serve": (1600, 1600),
    "page": (948, 700),
    "testing": (813, 320),
    "bench, train": (0, 0),
    "top level": (897, 600),
    "all": (69930, 64500),
    "benchmarks": (3316, 3300),
}
TESTS_BUDGET = 40_500
CROWDED: dict[str, int] = {
    "benchmarks": 17,
}
NAMES: dict[str, int] = {
    "Level": 2,
}
FRAGMENTS: dict[str, int] = {
    "specscope/analyze/audit/options.py": 1,
    "specscope/analyze/plain.py": 1,
    "specscope/envelope.py": 1,
    "specscope/errors.py": 1,
    "specscope/speculate/changes.py": 1,
    "specscope/terminal.py": 1,
    "specscope/trace/history/same.py": 1,
    "specscope/vllm/launch.py": 1,
}

SLEEPS: dict[str, int] = {}


def sources():
    """Every source file but __init__.py, by its name from the root."""
    return {name: path for name, path in modules().items() if path.name != "__init__.py"}


def modules(*tops):
    """Every Python file, by its name from the root. specscope/kernels is a link, which is not followed."""
    files = (path for top in tops or ("specscope", "kernels", "benchmarks") for path in (ROOT / top).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path for path in files}


def lines(path):
    return len(path.read_text().splitlines())


def row_of(name):
    """The row of BOUNDS that counts a file. A folder without one states its budget first."""
    top, *inner = Path(name).parent.parts
    if top != "specscope":
        return top
    if not inner:
        return "top level"
    folder = "inside" if inner[:2] == ["trace", "inside"] else inner[0]
    return next((row for row in BOUNDS if folder in row.split(", ")), f"no row of BOUNDS: {folder}")


def folders():
    """The files of each row; `all` is the program, without what measures it."""
    rows = defaultdict(list)
    for name, path in modules().items():
        row = row_of(name)
        rows[row].append(path)
        if row != "benchmarks":
            rows["all"].append(path)
    return {row: rows[row] for row in (*BOUNDS, *rows)}


def too_long():
    return {name: lines(path) for name, path in sources().items() if lines(path) > MOST_LINES}


def crowded():
    """Files of each folder that has too many."""
    counts = Counter(str(Path(name).parent) for name in sources())
    return {folder: count for folder, count in counts.items() if count > MOST_FILES}


def names_of_several():
    """Public classes at the top of a file whose name stands in several files, with how many files."""
    names = Counter()
    for path in sources().values():
        classes = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
        names.update(name for name in classes if not name.startswith("_"))
    return {name: count for name, count in names.items() if count > 1}


def fragments():
    """Files that are too short for one idea: 1 each."""
    return {name: 1 for name, path in sources().items() if lines(path) < FEWEST_LINES}


def sleeps():
    """Where a test waits for a while instead of for what happens (tests/waiting.py): sleeps of each file."""
    counts = {path: len(re.findall(r"\bsleep\(", path.read_text())) for path in (ROOT / "tests").rglob("*.py")}
    names = {path.relative_to(ROOT).as_posix(): count for path, count in counts.items() if count}
    return {name: count for name, count in names.items() if name not in ("tests/house.py", "tests/waiting.py")}


if __name__ == "__main__":
    from tests.house_table import main

    main()
