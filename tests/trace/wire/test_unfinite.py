"""Wrong numbers are evidence: each is shown as it is, under everything that looks at a capture."""

import json
import shutil

import pytest

from specscope.trace.wire.reading import read_capture
from tests.support.commands import specscope
from tests.trace.damage import SAMPLES, TRACES, small, with_wrong_numbers
from tests.trace.look_at import look_at


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for seed, name in enumerate(SAMPLES)])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_wrong_numbers_are_shown_and_nothing_is_left_out(tmp_path, name, seed):
    path = tmp_path / "run.jsonl"
    path.write_bytes(with_wrong_numbers(small(name), seed, share=0.2))
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(json.dumps(line) + "\n" for line in small(name)))
    assert look_at(path, page=True) == len(read_capture(whole).history.steps)
    assert not [line for line in read_capture(path).warnings if "left out" in line]


VERBS = {
    "report": ["report", "{}", "--json"],
    "verify": ["verify", "{}"],
    "compare": ["compare", "{}", "{whole}"],
    "compare itself": ["compare", "{}", "{again}"],
    "compare back": ["compare", "{whole}", "{}", "--json"],
    "tune": ["tune", "{}", "--costs", str(TRACES.parent / "tests" / "data" / "costs.json")],
    "export": ["export", "{}", "-o", "{out}"],
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["sampled", "evidence", "eagle"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_every_verb_ends_well(tmp_path, name, verb):
    lines = [json.loads(line) for line in (TRACES / f"{name}.jsonl").read_text().splitlines()]
    path = tmp_path / "run.jsonl"
    path.write_bytes(with_wrong_numbers(lines, 1))
    again = shutil.copy(path, tmp_path / "again.jsonl")
    files = {"whole": TRACES / f"{name}.jsonl", "again": again, "out": tmp_path / "tables"}
    words = [word.format(path, **files) for word in VERBS[verb]]
    done = specscope(*words, COLUMNS="120")
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    if verb == "verify":
        assert done.returncode == 1
