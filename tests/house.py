"""The measures of tests/test_house.py, and what breaks them today."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES, FEWEST_LINES = 700, 60
MOST_FILES = 20  # of a folder
# In more files than one, and rightly: what a library calls by its name, and what is private to its file
CROWDED: dict[str, int] = {}
NAMES: dict[str, int] = {}
FRAGMENTS: dict[str, int] = {}


def sources():
    """Every source file but __init__.py, by its name from the root."""
    files = (path for top in ("specscope", "kernels", "benchmarks") for path in (ROOT / top).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path for path in files if path.name != "__init__.py"}


def lines(path):
    return len(path.read_text().splitlines())


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


if __name__ == "__main__":
    for name, found in (("CROWDED", crowded()), ("NAMES", names_of_several()), ("FRAGMENTS", fragments())):
        print(f"{name}: dict[str, int] = {dict(sorted(found.items()))}")
