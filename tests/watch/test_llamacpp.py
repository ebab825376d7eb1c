"""llama.cpp's log: what a real llama-server wrote, and what may be wrong with it."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.history.interval import notes
from specscope.trace.history.stats import measure
from specscope.trace.record.aggregate import RESTORED
from specscope.watch.counts import UnreadableError
from specscope.watch.logs import LlamaLog, Log
from specscope.watch.pages import Intervals, read_metrics
from tests.support.commands import run_here
from tests.watch import samples
from tests.watch.samples import LLAMA

NOW = datetime(2026, 11, 26, 12)


def read(path):
    return samples.read(path)[1]


def figures(path):
    """(request, accepted, drafted, drafts) of each."""
    return [(one.request, one.accepted, one.drafted, one.drafts) for one in (told.aggregate for told in read(path))]


def taken(lines, last=True):
    reader = Log(LlamaLog, NOW, [])
    told = [one for line in lines for one in reader.take(line)]
    return [one.aggregate for one in [*told, *reader.rest(last=last)]]


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("steps.log", [("task 1", 95, 95, 24), ("task 27", 64, 136, 35), ("task 64", 47, 47, 12)]),
        ("trace_two_slots.log", [("task 0", 63, 63, 16), ("task 1", 40, 76, 19)]),
        ("log.jsonl", [("task 1", 72, 72, 7), ("task 0", 40, 76, 19)]),
        ("synthetic.log", [("task 1", 67, 200, 51), ("task 55", 59, 152, 39), ("task 97", 34, 93, 24)]),
        ("loop.log", [("task 1", 90, 90, 2), ("task 32", 0, 0, 0), ("task 133", 0, 0, 0)]),
        ("../llamacpp.log", [("task 0", 167, 259, 87)]),
    ],
)
def test_the_requests_of_a_log(name, requests):
    assert figures(LLAMA / name) == requests


def test_the_page_and_the_log_of_the_same_requests_agree():
    before, after = ((LLAMA / f"metrics_{name}.txt").read_text() for name in ("before", "after"))
    intervals = Intervals()
    intervals.take(read_metrics(before, 1))
    (told,) = intervals.take(read_metrics(after, 2))
    page, log = measure([told.aggregate]), measure(one.aggregate for one in read(LLAMA / "steps.log"))
    for counted in (page, log):
        assert (counted.drafts, counted.drafted, counted.accepted, counted.emitted) == (71, 278, 206, 280)
        assert counted.accepted_at == [59, 54, 49, 44]
    assert log.proposed_at[0] == 71
    assert sum(log.proposed_at) == 278


STEP = "0.02.344.025 I slot   operator(): id  1 | task 1 | accepted  {}/ {} draft tokens"
END = (
    "0.05.541.504 I slot print_timing: id  1 | task 1 | draft acceptance = 0.5 ( {} accepted / {} generated), "
    "mean len =  {}"
)


LAUNCH = "0.01.716.605 I slot launch_slot_: id  1 | task 1 | processing task, is_child = 0"
RESTORE = STEP.format(2, 4) + " (restore checkpoint)"
OLDER = END.format(5, 12, "2.67").replace("acceptance", "acceptance rate").partition(", mean")[0]
LOGS = {
    "a draft that is judged again": ([RESTORE, STEP.format(2, 2), STEP.format(1, 4)], [(2, 6, 3, (2, 1, 0, 0))]),
    "lines are missing: the server's sums": ([STEP.format(2, 4), END.format(5, 12, "2.67")], [(3, 12, 5, ())]),
    "of an older server": ([OLDER], [(None, 12, 5, ())]),
    "a request that has not ended": ([STEP.format(2, 4)], [(1, 4, 2, (1, 1, 0, 0))]),
    "a server that starts again uses its numbers again": (
        [STEP.format(2, 4), LAUNCH, STEP.format(1, 4)],
        [(1, 4, 2, (1, 1, 0, 0)), (1, 4, 1, (1, 0, 0, 0))],
    ),
    # without LLAMA_TRACE, at verbosity 4
    "positions on a line of their own": (
        [line for line in (LLAMA / "trace_two_slots.log").read_text().splitlines() if "draft tokens" not in line],
        [(16, 63, 63, (16, 16, 16, 15)), (19, 76, 40, (13, 11, 9, 7))],
    ),
    "no drafts": ([line for line in (LLAMA / "steps.log").read_text().splitlines() if "draft" not in line], []),
}


@pytest.mark.parametrize(("lines", "figures"), LOGS.values(), ids=LOGS)
def test_what_a_log_tells(lines, figures):
    told = taken(lines)
    assert [(one.drafts, one.drafted, one.accepted, one.accepted_at) for one in told] == figures
    assert taken([STEP.format(2, 4)], last=False) == []  # more may come
    assert [one.accepted for one in taken([END.format(2, 4, "3.00")], last=False)] == [2]
    restored = RESTORE in lines
    assert [(one.averages, notes(one)) for one in told if restored] == [({RESTORED: 1}, [f"1 {RESTORED}"])] * restored


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted), max_size=40))
def test_drafts_are_counted_as_they_were(drafts):
    one = measure(taken([STEP.format(*pair) for pair in drafts]))
    real = [pair for pair in drafts if pair[1]]
    assert (one.drafts, one.accepted, one.drafted) == (len(real), sum(a for a, _ in real), sum(d for _, d in real))
    assert one.accepted == sum(one.accepted_at)
    assert one.drafted == sum(one.proposed_at)
    for wrong in (STEP.format(5, 4), STEP.format(1, 9999), END.format(5, 4, "1.0")):
        with pytest.raises(UnreadableError, match="tokens accepted"):
            Log(LlamaLog, NOW, []).take(wrong)


def test_a_count_that_was_worked_out_is_marked_wherever_it_is_told(tmp_path):
    path = tmp_path / "m.log"
    path.write_text("\n".join((STEP.partition("accepted")[0] + "processing task", END.format(1, 633, "1.00"))))
    for command in (
        ["watch", str(path), "--headless"],
        ["report", str(path)],
        ["compare", str(path), str(LLAMA / "steps.log")],
    ):
        row = next(line.split() for line in run_here(command)[1].splitlines() if line.startswith("drafts "))
        assert row[1].startswith("~"), command
