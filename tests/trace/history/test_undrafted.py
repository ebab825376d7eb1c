"""Why steps drafted nothing, from records made by hand and from the sample captures."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specscope.trace.history.totals import Undrafted, count_undrafted, why_undrafted
from specscope.trace.record.notes import DraftNotes, FormNotes, MethodNotes
from specscope.trace.record.records import Preceded
from specscope.trace.wire.reading import read_capture
from tests.analyze.histories import RUN, record, step

ROOT = Path(__file__).parents[3]
NONE = step()
OURS = replace(RUN, drafter="suffix+eagle", tree="dynamic:16,depth=5,top=4", costs="66d9d06db774")
HEAD = replace(RUN, drafter="eagle", tree="dynamic:16,depth=5,top=4", aux_layers=("1", "2"))
THEIRS = replace(RUN, drafter="ngram", tree="3", versions={"vllm": "0.32.0"})


def notes():
    empty = np.zeros(0, np.float32)
    ids = np.zeros(0, np.int32)
    return DraftNotes(empty, empty, ids, ids, empty)


@pytest.mark.parametrize(
    ("run", "change", "whole", "reason"),
    [
        (replace(RUN, drafter="none"), {}, {"speculation": False, "speculation_off": "x"}, Undrafted.NO_DRAFTER),
        (RUN, {}, {"speculation": False, "speculation_off": "set to off"}, Undrafted.OFF),
        (OURS, {"sizing": "no draft pays"}, {}, Undrafted.COST),
        (OURS, {"sizing": "a probe", "notes": notes()}, {}, Undrafted.NOT_KEPT),
        (THEIRS, {"sizing": "2 invalid drafts left out"}, {}, Undrafted.FORM),
        (RUN, {"form": FormNotes(pruned=2)}, {}, Undrafted.FORM),
        (THEIRS, {"method": MethodNotes(unverified=3)}, {}, Undrafted.BUDGET),
        (THEIRS, {}, {"budget": 0}, Undrafted.BUDGET),
        (HEAD, {"preceded": Preceded.PREFILL}, {}, Undrafted.PROMPT),
        (HEAD, {"prefill_tokens": 3}, {}, Undrafted.PROMPT),
        (THEIRS, {"preceded": Preceded.PREEMPTION}, {}, Undrafted.PROMPT),
        (HEAD, {"context_len": RUN.max_context - 5}, {}, Undrafted.NO_ROOM),
        (OURS, {"context_len": RUN.max_context - 17}, {}, Undrafted.NO_ROOM),  # the text may go 16 deep
        (replace(RUN, drafter="ngram", tree="3"), {"preceded": Preceded.PREFILL}, {}, Undrafted.NO_MATCH),
        (HEAD, {"context_len": 20}, {}, Undrafted.UNKNOWN),
        (None, {}, {}, Undrafted.UNKNOWN),
    ],
)
def test_each_reason(run, change, whole, reason):
    part = replace(NONE, **change)
    assert why_undrafted(run, record(0, [part], **whole), part) is reason


def test_every_step_of_the_samples_without_drafts_has_a_reason_that_is_known():
    found = {}
    for name in ("eagle", "evidence", "ngram", "planted", "sampled"):
        history = read_capture(ROOT / "traces" / f"{name}.jsonl").history
        found[name] = count_undrafted(history.run, history.steps)
        assert found[name].total() == history.acceptance.steps - history.acceptance.drafts
    assert found == {
        "eagle": {Undrafted.PROMPT: 3},
        "evidence": {Undrafted.PROMPT: 3},
        "ngram": {Undrafted.NO_MATCH: 85},
        "planted": {Undrafted.NO_MATCH: 4},
        "sampled": {},
    }
    history = read_capture(ROOT / "tests/data/vllm/spans.jsonl").history
    assert count_undrafted(history.run, history.steps) == {Undrafted.PROMPT: 2}
