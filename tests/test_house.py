"""What keeps the house readable: lengths of files, files in a folder, one name for one class.

The lists in tests/house.py are of what broke a rule when the rule was made. They may only shrink: what is mended leaves
its list, and nothing new comes in. `python -m tests.house` prints them as they would be now.
"""

import pytest

from tests import house


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
