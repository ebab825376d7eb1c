"""Wrong numbers are evidence: each is shown as it is, under everything that looks at a capture."""

import json
from pathlib import Path

import pytest

from specscope.trace.wire.reading import read_capture
from tests.support.commands import run_here
from tests.sweep import wrong_with
from tests.trace.damage import SAMPLES, TRACES, small, with_wrong_numbers
from tests.trace.look_at import look_at

COSTS = str(TRACES.parent / "tests" / "data" / "costs.json")
VERBS = (
    *("report FILE --json", "verify FILE", "compare FILE WHOLE", "compare FILE FILE", "compare WHOLE FILE --json"),
    *(f"tune FILE --costs {COSTS}", "export FILE -o tables"),
)


@pytest.mark.parametrize(("name", "seed"), [(name, seed) for seed, name in enumerate(SAMPLES)])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_wrong_numbers_are_shown_nothing_is_left_out_and_every_verb_ends_well(tmp_path, monkeypatch, name, seed):
    monkeypatch.chdir(tmp_path)
    path, whole = Path("FILE"), Path("WHOLE")
    path.write_bytes(with_wrong_numbers(small(name), seed, share=0.2))
    whole.write_text("".join(json.dumps(line) + "\n" for line in small(name)))
    assert look_at(path, page=True) == len(read_capture(whole).history.steps)
    assert not [line for line in read_capture(path).warnings if "left out" in line]
    assert [problem for words in VERBS if (problem := wrong_with(words.split()))] == []
    assert run_here(["verify", "FILE"])[0] == 1
