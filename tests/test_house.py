"""What keeps the house readable: lengths of files, files in a folder, one name for one class.

The lists in tests/house.py are of what broke a rule when the rule was made. They may only shrink: what is mended leaves
its list, and nothing new comes in. `python -m tests.house` prints them as they would be now.
"""

import re

import pytest

from tests import house, house_table


def test_folders_stay_within_their_bounds():
    """A bound falls with what it bounds: what was deleted does not grow back."""
    sizes = {row: sum(map(house.lines, paths)) for row, paths in house.folders().items()}
    assert set(sizes) == set(house.BOUNDS)
    above = {row: size for row, size in sizes.items() if size > house.BOUNDS[row][0]}
    room = {row: max(budget, sizes[row]) + house.SLACK for row, (_, budget) in house.BOUNDS.items()}
    loose = {row: bound for row, (bound, _) in house.BOUNDS.items() if bound > room[row]}
    assert above == {}, "over its bound, or over its budget"
    assert loose == {}, "well done: lower the bound (`python -m tests.house` prints it)"


def test_statements_are_counted_without_docstrings(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"""Module."""\nx = 1; y = 2\nif x:\n    def f():\n        """Function."""\n        return y\n')
    assert (house.lines(path), house_table.statements(path)) == (6, 5)


def test_no_file_is_too_long():
    assert house.too_long() == {}


@pytest.mark.parametrize(
    ("now", "known"),
    [
        (house.crowded(), house.CROWDED),
        (house.names_of_several(), house.NAMES),
        (house.fragments(), house.FRAGMENTS),
        (house.sleeps(), house.SLEEPS),
    ],
    ids=["files of a folder", "public classes of one name", "files below 60 lines", "sleeps in tests"],
)
def test_exceptions_only_shrink(now, known):
    """Each one by itself: a folder's files, a name's files, a fragment."""
    grown = {name: now[name] for name in now if now[name] > known.get(name, 0)}
    shrunk = {name: known[name] for name in known if known[name] > now.get(name, 0)}
    assert grown == {}, "mend it: the list may only shrink"
    assert shrunk == {}, "well done: take it from the list in tests/house.py"


def test_files_that_comments_name_are_there():
    """Ours, by their folder: others' sources are named too."""
    ours = "|".join(path.name for path in (house.ROOT / "specscope").iterdir() if path.is_dir())
    cited = re.compile(rf"(?<![\w/])(?:specscope/)?((?:{ours}|history|record|wire)/[\w/]+\.py)")
    found = {(name, match[1]) for name, path in house.modules().items() for match in cited.finditer(path.read_text())}
    assert {pair for pair in found if not [*house.ROOT.glob(f"specscope/**/{pair[1]}")]} == set()
