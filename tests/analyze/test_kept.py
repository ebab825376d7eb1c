"""What verbs say of the samples, as it was held against the records by hand: a change is meant, or it is a fault.

Where it is meant: `python -m benchmarks freeze FOLDER`, and its files of the samples go into tests/data/kept.tar.xz.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.freeze.results import differences, results_of
from benchmarks.freeze.run import read_frozen

DATA = Path(__file__).parents[1] / "data"
KEPT = read_frozen(DATA / "kept.tar.xz")


@pytest.mark.parametrize("path", KEPT)
def test_a_sample_gives_what_it_gave(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of report and why; of export each column's type and a digest of its values."""
    (tmp_path / "traces").symlink_to(DATA / "samples")
    monkeypatch.chdir(tmp_path)
    found = results_of(path, names=KEPT[path])
    assert list(differences(KEPT[path], found)) == []
