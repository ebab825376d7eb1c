"""What verbs say of the samples is what it was, and their work grows with the capture and not with its square."""

import sys
from pathlib import Path

import pytest

from benchmarks.freeze.results import differences, results_of
from benchmarks.freeze.run import read_frozen
from benchmarks.replay import lengthen
from specscope.analyze.compare.comparison import compare
from specscope.analyze.compare.side import from_history
from specscope.analyze.export.exporting import export
from specscope.analyze.report import build_report
from specscope.analyze.verify.trial import judge
from specscope.trace.wire.reading import read_capture

DATA = Path(__file__).parents[1] / "data"
KEPT = read_frozen(DATA / "kept.tar.xz")


@pytest.mark.parametrize("path", KEPT)
def test_a_sample_gives_what_it_gave(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of report and why; of export each column's type and a digest of its values."""
    (tmp_path / "traces").symlink_to(DATA / "samples")
    monkeypatch.chdir(tmp_path)
    found = results_of(path, names=KEPT[path])
    assert list(differences(KEPT[path], found)) == []


SHORT, LONG = 4, 12  # laps of a sample of a few requests
VERBS = {
    "report": lambda history: build_report(history, source="a").to_dict(),
    "verify": lambda history: judge(history, source="a"),
    "compare": lambda history: compare(from_history(history, "a"), from_history(history, "b")),
}


def calls(work, *arguments):
    """How many functions and steps of generators it runs."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture(scope="module")
def captures(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("long"), {}
    steps = len(read_capture("traces/ngram.jsonl").history.steps)
    for laps in (1, SHORT, LONG):
        made[laps] = folder / f"{laps}.jsonl"
        lengthen("traces/ngram.jsonl", made[laps], laps * steps)
    return made


def grows_by(work, *sizes):
    """How much more work the long one is than the short one; what is done once, whatever the length, is left out."""
    once, short, long = (calls(work, *size) for size in sizes)
    return (long - once) / (short - once)


@pytest.mark.parametrize("verb", VERBS)
def test_judging(verb, captures):
    histories = [(read_capture(path).history,) for path in captures.values()]
    VERBS[verb](*histories[0])  # what is imported and cached
    assert grows_by(VERBS[verb], *histories) < 1.3 * (LONG - 1) / (SHORT - 1)


def test_reading(captures):
    assert grows_by(read_capture, *((path,) for path in captures.values())) < 1.3 * (LONG - 1) / (SHORT - 1)


def test_export(captures, tmp_path):
    """Columns go by the chunk, and the short one fills none: so twice as much; a square is four times."""
    folders = [([str(path)], str(tmp_path / str(laps))) for laps, path in captures.items()]
    assert grows_by(export, *folders) < 2 * (LONG - 1) / (SHORT - 1)
