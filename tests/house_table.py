"""The table that `python -m tests.house` prints. Statements stand beside lines: longer lines are no reduction."""

import ast
from collections import defaultdict
from pathlib import Path

from tests import house


def statements(path):
    """Statements of a file, docstrings left out."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = sum(isinstance(node, bodies) and ast.get_docstring(node) is not None for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def table():
    """Folder by folder: files, lines, statements, bound and budget; then the tests, which have a budget together."""
    tests = defaultdict(list)
    for name, path in house.modules("tests").items():
        tests["/".join(Path(name).parent.parts[:2])].append(path)
        tests["all tests"].append(path)
    rows = [(row, paths, *house.BOUNDS.get(row, ("", ""))) for row, paths in house.folders().items()]
    rows += [(row, tests[row], "", house.TESTS_BUDGET if row == "all tests" else "") for row in sorted(tests)]
    yield "{:<32}{:>7}{:>9}{:>12}{:>9}{:>9}".format("", "files", "lines", "statements", "bound", "budget")
    for row, paths, bound, budget in rows:
        sums = f"{len(paths):>7}{sum(map(house.lines, paths)):>9}{sum(map(statements, paths)):>12}"
        yield f"{row:<32}{sums}{bound:>9}{budget:>9}"


def main():
    """Print the table, then the lists of tests/house.py as they would be now."""
    print(*table(), sep="\n", end="\n\n")
    sizes = {row: sum(map(house.lines, paths)) for row, paths in house.folders().items()}
    now = {row: (max(budget, sizes[row]), budget) for row, (_, budget) in house.BOUNDS.items()}
    print(f"BOUNDS: dict[str, tuple[int, int]] = {now}")
    for name, found in (
        ("CROWDED", house.crowded()),
        ("NAMES", house.names_of_several()),
        ("FRAGMENTS", house.fragments()),
        ("SLEEPS", house.sleeps()),
    ):
        print(f"{name}: dict[str, int] = {dict(sorted(found.items()))}")
