"""Lines of the logs of vLLM, SGLang and llama.cpp: as recorded, worked out again from any counts, cut or changed."""

import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from contextlib import suppress
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specscope.trace.history.interval import notes
from specscope.trace.history.stats import Acceptance, measure
from specscope.trace.record.aggregate import RESTORED
from specscope.watch.counts import UnreadableError
from specscope.watch.logs import LlamaLog, Log, SglangLog, VllmLog, aggregate, unwrapped
from specscope.watch.pages import Intervals, read_metrics
from tests.support.commands import run_here
from tests.waiting import HANG_SECONDS
from tests.watch import samples
from tests.watch.samples import LLAMA, text

NOW = datetime(2026, 11, 22, 12, 0)


def test_the_recorded_log():
    told = read(*text("log.txt").splitlines())
    sums = [(one.aggregate.drafts, one.aggregate.drafted, one.aggregate.accepted) for one in told]
    assert sums == [(4, 12, 3), (4, 12, 3), (106, 318, 6), (45, 135, 1), (22, 66, 0)]
    assert [one.aggregate.accepted_at for one in told][:3] == [(3, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert [one.aggregate.rounded for one in told] == [False, False, True, True, True]
    first = told[0]
    assert datetime.fromtimestamp(first.end_ns / 1e9) == datetime(2026, 11, 22, 10, 39, 47)
    assert (first.end_ns - first.start_ns) / 1e9 == pytest.approx(12 / 1.78)  # drafted over drafted throughput
    busy = told[2].aggregate
    assert (busy.engine, busy.running, busy.waiting, busy.kv_usage) == ("000", 4, 0, pytest.approx(0.023))
    assert busy.averages["generation tokens/s"] == 23.2
    assert busy.emitted is None
    assert measure(one.aggregate for one in told).tau == pytest.approx(1 + 13 / 181)


def read(*lines, now=NOW):
    """What lines tell, to their end."""
    reader = Log(VllmLog, now, [])
    return [told for line in lines for told in reader.take(line)] + reader.rest(last=True)


@st.composite
def drafts(draw):
    """(tokens drafted, tokens accepted) of some drafts of up to `depth` tokens."""
    depth = draw(st.integers(1, 6))
    one = st.integers(1, depth).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
    return depth, draw(st.lists(one, min_size=1, max_size=300))


def counted(depth, made):
    at = [sum(1 for _, accepted in made if accepted >= d) for d in range(1, depth + 1)]
    return Acceptance(
        drafts=len(made),
        drafted=sum(n for n, _ in made),
        accepted=sum(accepted for _, accepted in made),
        accepted_at=at,
        proposed_at=[sum(1 for n, _ in made if n >= d) for d in range(1, depth + 1)],
        tried_at=[0] * depth,
    )


def log_line(counts):
    """As vLLM writes it."""
    rates = ", ".join(f"{count / counts.drafts:.3f}" for count in counts.accepted_at)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {counts.tau:.2f}, "
        f"Accepted: {counts.accepted} tokens, Drafted: {counts.drafted} tokens, Per-position acceptance rate: {rates}"
    )


@given(drafts())
def test_a_line_is_worked_out_to_counts_that_give_the_same_line(made):
    truth = counted(*made)
    line = log_line(truth)
    told = aggregate(line)
    assert (told.drafted, told.accepted) == (truth.drafted, truth.accepted)
    assert told.drafts is not None
    if not told.rounded:
        assert (told.drafts, list(told.accepted_at)) == (truth.drafts, truth.accepted_at)
    again = measure([told])
    assert again.tau == pytest.approx(truth.tau, abs=0.0101)
    if truth.accepted:
        assert log_line(again) == line


LINE = (
    "INFO 11-22 10:40:17 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 1.06, Accepted throughput: "
    "1.20 tokens/s, Drafted throughput: 63.59 tokens/s, Accepted: 6 tokens, Drafted: 318 tokens, Per-position "
    "acceptance rate: 0.019, 0.019, 0.019, Avg Draft acceptance rate: 1.9%"
)


def test_an_older_version_wrote_the_line_in_another_order_and_figures_may_fit_no_count():
    line = (
        "INFO 06-01 08:00:00 [metrics.py:61] SpecDecoding metrics: Draft acceptance rate: 58.3%, Mean acceptance "
        "length: 1.58, Accepted: 67 tokens, Drafted: 115 tokens, Per-position acceptance rate: 0.583"
    )
    told = aggregate(line)
    assert (told.drafts, told.accepted, told.accepted_at, told.rounded) == (115, 67, (67,), False)
    told = aggregate("SpecDecoding metrics: Draft acceptance rate: 75.0%, Accepted: 30 tokens, Drafted: 40 tokens")
    assert (told.drafts, told.drafted, told.accepted, told.length) == (None, 40, 30, None)  # 0.8.3
    told = aggregate(LINE.replace("length: 1.06", "length: 1.60"))  # they are kept as they were told
    assert (told.drafts, told.accepted_at, told.length, told.accepted, told.drafted) == (None, (), 1.6, 6, 318)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (LINE[:120], "without its length|without its accepted"),
        (LINE.replace("Drafted: 318", "Drafted: many"), "without its drafted"),
        (LINE.replace("0.019, 0.019, 0.019", "0.019, 0.900, 0.019"), "rise or are not between 0 and 1"),
        (LINE.replace("0.019, 0.019, 0.019", "1.9, 0.9, 0.1"), "rise or are not between 0 and 1"),
        (LINE.replace("0.019, 0.019, 0.019", "0.019,, 0.019"), "rates are not numbers"),
        (LINE.replace("0.019, 0.019, 0.019", "nan, nan, nan"), "not between 0 and 1"),
        (LINE.replace("length: 1.06", "length: nan"), "that drafted tokens and whose length is not a number"),
        (LINE.partition("19, Avg")[0], "that is cut off"),
        (LINE.partition(", 0.019, Avg")[0] + " (11-22 10:40:17)", "that is cut off"),  # its time stood in its JSON
    ],
)
def test_a_damaged_line_is_named(line, why):
    with pytest.raises(UnreadableError, match=why):
        aggregate(line)


LONG = [f"{' ' * 2**21}x", f"{'0, ' * 2**20}x", "Per-position acceptance rate: " * 2**16, f"0.{'5' * 2**20}, Avg"]
LONG.append(f"{', '.join(['0.5'] * 2**20)}, Avg")


def test_a_long_line_takes_no_longer_than_it_is():
    """In a process of its own: a search that goes on for ever could not be stopped here."""
    code = "import sys; from specscope.watch.logs import aggregate\nfor line in sys.stdin:\n"
    code += " try: aggregate(line)\n except ValueError as error: print(type(error).__name__, error)"
    lines = "\n".join(LINE.replace("0.019, 0.019, 0.019, Avg", rates) for rates in LONG)
    done = subprocess.run(
        [sys.executable, "-c", code], input=lines, text=True, capture_output=True, timeout=HANG_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all("UnreadableError a `SpecDecoding metrics:` line " in line for line in done.stdout.splitlines())


def test_the_engines_and_processes_of_a_log_are_bounded():
    reader, before = Log(VllmLog, NOW, []), 0
    for turn in (1, 20):
        tracemalloc.start()
        for n in range(turn * 1000, turn * 1000 + 1000):
            reader.take(f"(Engine pid={n}) INFO Engine {n}: Avg generation throughput: 9.0 tokens/s")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        before = before or held
    assert before < 400_000
    assert held < 400_000


def test_the_year_is_the_newest_that_fits():
    lines = [LINE.replace("11-22 10:40:17", time) for time in ("12-31 23:59:58", "01-01 00:00:03")]
    ended = [told.end_ns for told in read(*lines, now=datetime(2027, 1, 1, 0, 10))]
    assert [datetime.fromtimestamp(ns / 1e9).year for ns in ended] == [2026, 2027]
    (leap,) = read(LINE.replace("11-22", "02-29"))
    assert datetime.fromtimestamp(leap.end_ns / 1e9) == datetime(2024, 2, 29, 10, 40, 17)
    assert read(LINE.replace("11-22", "13-99"))[0].end_ns == int(NOW.timestamp() * 1e9)


def load(engine):
    return f"INFO 11-22 10:40:17 [loggers.py:335] Engine {engine}: Avg generation throughput: 9.0 tokens/s"


@pytest.mark.parametrize(
    ("lines", "engines"),
    [
        ([load("000"), LINE, load("001"), LINE], ["000", "001"]),
        ([load("000"), LINE, load("001"), LINE, LINE], ["000", "001", ""]),  # the last: nothing says whose
        ([load("000"), LINE, LINE], ["000", "000"]),
        ([LINE, load("000"), LINE, load("000"), LINE], ["000", "000", "000"]),  # it begins between the two lines
        ([LINE, load("000"), LINE, load("001"), LINE, load("000"), LINE], ["", "000", "001", "000"]),
        ([LINE, load("000")], ["000"]),
        ([LINE], [""]),
        ([LINE, LINE, LINE], ["", "", ""]),
    ],
)
def test_whose_a_line_is(lines, engines):
    assert [told.aggregate.engine for told in read(*in_turn(lines))] == engines


@pytest.mark.parametrize(("pids", "engines"), [((1, 2, 1, 2), ["", "pid 2"]), ((1, 1, 1, 2, 2, 2), [""])])
def test_a_server_that_was_started_again_is_the_same_engine_and_one_beside_it_is_another(pids, engines):
    lines = [f"(APIServer pid={pid}) {line}" for pid, line in zip(pids, in_turn([LINE] * len(pids)), strict=True)]
    told = read(*lines)
    assert (len(told), sorted({one.aggregate.engine for one in told})) == (len(pids), engines)


def test_a_line_that_stands_twice_or_is_cut_off_is_left_out_and_named():
    reader = Log(VllmLog, NOW, [])
    for line in in_turn([LINE, LINE]):
        reader.take(line)
    none = LINE.replace("length: 1.06", "length: 1.00").replace("Accepted: 6", "Accepted: 0").partition("Per-pos")[0]
    cut = (LINE.partition("Per-pos")[0], none)
    for line, why in ((LINE, "that the log has twice"), *((line, "that is cut off") for line in cut)):
        with pytest.raises(UnreadableError, match=why):
            reader.take(line)


SGLANG = (
    "[2026-11-25 10:11:12 TP0] Decode batch, #running-req: 4, #token: 1830, token usage: 0.03, accept len: 2.31, "
    "accept rate: 0.44, cap len: 4.10, block accept len: 2.52, cuda graph: True, gen throughput (token/s): 812.50, "
    "#queue-req: 2"
)
TIMING = "0.{:02}.000.000 I slot print_timing: id  1 | task {} | "
BLOCK = (
    "prompt eval time =     256.50 ms /    44 tokens (    5.83 ms per token,   171.63 tokens per second)",
    "       eval time =    1743.50 ms /   120 tokens (   14.53 ms per token,    68.83 tokens per second)",
    "draft acceptance = 0.53333 (   80 accepted /   150 generated), mean acceptance length =  2.60, "
    "acceptance rate per position = (0.800, 0.500, 0.300)",
)
SEVEN = [TIMING.format(5, 7) + line for line in BLOCK]


@pytest.mark.parametrize(("form", "lines"), [(VllmLog, [LINE]), (SglangLog, [SGLANG]), (LlamaLog, SEVEN)])
def test_a_line_that_is_cut_anywhere_tells_no_other_figures_than_the_whole_line(form, lines):
    """Both where it is all that there is, and behind a whole one, where it is left out."""
    before = [line.replace("task 7", "task 6").replace(":17 ", ":16 ") for line in lines]
    (whole,), last = figures_of(form, *lines), lines[-1]
    assert whole[-2]
    for end in range(len(last) - 1):
        for first in ([], before):
            told = figures_of(form, *first, *lines[:-1], last[:end])[len(first) > 0 :]
            assert all(mine in (None, (), its) for one in told for mine, its in zip(one, whole, strict=True)), end


def figures_of(form, *lines):
    """(drafted, accepted, accepted by depth, length, rate) of each interval; lines that cannot be read are left out."""
    reader, told = Log(form, NOW, []), []
    for line in lines:
        with suppress(UnreadableError):
            told += reader.take(line)
    every = [one.aggregate for one in told + reader.rest(last=True)]
    lengths = [one.length and f"{one.length:.2f}" for one in every]
    rates = [one.averages.get(one.rate_name) for one in every]
    counts = [(one.drafted, one.accepted, one.accepted_at) for one in every]
    return [(*each, length, rate) for each, length, rate in zip(counts, lengths, rates, strict=True)]


@pytest.mark.parametrize(
    "line",
    [
        "INFO 2026-11-22 10:40:17,123 [loggers.py:257] {}",
        "2026-11-22T10:40:17 INFO vllm.v1.metrics.loggers:log:257 - {}",
        '{{"asctime": "2026-11-22 10:40:17,123", "level": "INFO", "message": "{}"}}',
        '{{"ts": TS.5, "log": "{}"}}',
        '{{"__REALTIME_TIMESTAMP": "TS500000", "MESSAGE": "{}"}}',
    ],
)
def test_a_line_is_of_the_time_that_stands_before_it_or_in_its_json(line):
    stamp = datetime(2026, 11, 22, 10, 40, 17)
    text = line.replace("TS", str(int(stamp.timestamp()))).format(LINE.partition("] ")[2])
    (told,) = read(unwrapped(text))
    assert (datetime.fromtimestamp(told.end_ns / 1e9), told.aggregate.engine) == (stamp, "")
    assert told.aggregate.accepted_at


def in_turn(lines):
    return [line.replace("10:40:17", f"10:40:{second}") for second, line in enumerate(lines, 17)]


def test_a_line_without_an_engine_waits_for_the_next_or_until_nothing_comes():
    """Those lines alone, from grep: only the first waits, and only for the second."""
    reader = Log(VllmLog, NOW, [])
    assert [len(reader.take(line)) for line in in_turn([LINE, LINE, LINE])] == [0, 2, 1]
    reader = Log(VllmLog, NOW, [])
    first, *lines = in_turn([LINE, load("000"), LINE, load("000"), LINE])
    told = reader.take(first) + reader.rest() + [one for line in lines for one in reader.take(line)]
    assert [one.aggregate.engine for one in told] == ["", "", ""]
    (other,) = reader.take(load("001")) + reader.take(LINE)
    assert other.aggregate.engine == "001"


def test_a_line_of_sglang_with_all_its_parts(tmp_path):
    """As SGLang 0.5.23 formats it for DSpark."""
    (tmp_path / "s.log").write_text("".join(SGLANG.replace("TP0", f"DP{rank} TP0") + "\n" for rank in (0, 1, 0)))
    one, *others = (told.aggregate for told in samples.read(tmp_path / "s.log")[1])
    assert (one.length, one.running, one.waiting, one.kv_usage) == (2.31, 4, 2, 0.03)
    assert one.averages == {
        "sglang:spec_accept_length": 2.31,
        "sglang:spec_accept_rate": 0.44,
        "sglang:spec_cap_length": 4.1,
        "sglang:spec_block_accept_length": 2.52,
        "sglang:gen_throughput": 812.5,
    }
    assert [each.engine for each in (one, *others)] == ["DP0", "DP1", "DP0"]


def test_a_log_with_lines_of_two_forms_is_read_whole_and_what_an_example_prints_counts_once(tmp_path):
    """Two engines that are tried against each other, in one `compose logs`; and an example with its log."""
    sglang = "[2026-11-25 10:11:12] Decode batch, #running-req: 1, accept len: 2.31, accept rate: 0.44, #queue-req: 2"
    again = LINE.replace("Accepted: 6", "Accepted: 5")
    (tmp_path / "two.log").write_text("\n".join([load("000"), LINE, sglang, load("000"), again, sglang]))
    source, told = samples.read(tmp_path / "two.log")
    assert source.recognised == "vLLM's log and SGLang's log"
    assert Counter(each.aggregate.engine for each in told) == {"000": 2, "SGLang log": 2}
    (tmp_path / "example.log").write_text("\n".join([load("000"), LINE, "num_drafts: 10", "num_accepted_tokens: 9"]))
    assert [each.aggregate.source for each in samples.read(tmp_path / "example.log")[1]] == ["vLLM log"]


def figures(path):
    """(request, accepted, drafted, drafts) of each."""
    every = (told.aggregate for told in samples.read(path)[1])
    return [(one.request, one.accepted, one.drafted, one.drafts) for one in every]


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
    page, log = measure([told.aggregate]), measure(one.aggregate for one in samples.read(LLAMA / "steps.log")[1])
    for counted in (page, log):
        assert (counted.drafts, counted.drafted, counted.accepted, counted.emitted) == (71, 278, 206, 280)
        assert counted.accepted_at == [59, 54, 49, 44]
    assert (log.proposed_at[0], sum(log.proposed_at)) == (71, 278)


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
    "blocks alone, as they are pasted": (
        [*BLOCK[:2], *BLOCK, BLOCK[-1]],
        [(0, 0, 0, ()), *[(50, 150, 80, (40, 25, 15))] * 2],
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


def test_a_request_whose_beginning_is_not_there_took_as_long_as_its_lines_say(tmp_path):
    """Without a clock nothing says whether two of them were at once; and each alone is recognised by every verb."""
    path, lines = tmp_path / "pasted.log", [*SEVEN, *(TIMING.format(15, 8) + line for line in BLOCK)]
    for pasted, seconds in ((lines, "4.0"), ([*BLOCK, *BLOCK], "0.0"), (BLOCK[-1:], "0.0")):
        path.write_text("\n".join(pasted))
        code, out, err = run_here(["report", str(path)])
        rows = dict(line.rsplit(maxsplit=1) for line in out.splitlines() if len(line.split()) > 1)
        assert (code, rows["seconds"]) == (0, seconds), err
        assert rows["output tokens/s"] == ("60.0" if seconds == "4.0" else "–")
        assert rows["accepted tokens"] == str(80 * -(-len(pasted) // 3))


def test_a_block_in_dockers_json_is_of_its_request(tmp_path):
    lines = ["slot print_timing: id  3 | task 9 | ", *BLOCK, "slot      release: id  3 | task 9 | stop processing"]
    texts = [{"log": f"{line}\n", "stream": "stderr", "time": "2026-11-26T10:00:10.5Z"} for line in lines]
    (tmp_path / "docker.log").write_text("".join(f"{json.dumps(each)}\n" for each in texts))
    assert figures(tmp_path / "docker.log") == [("task 9", 80, 150, 50)]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted), max_size=40))
def test_drafts_are_counted_as_they_were(drafts):
    one = measure(taken([STEP.format(*pair) for pair in drafts]))
    real = [pair for pair in drafts if pair[1]]
    assert (one.drafts, one.accepted, one.drafted) == (len(real), sum(a for a, _ in real), sum(d for _, d in real))
    assert (one.accepted, one.drafted) == (sum(one.accepted_at), sum(one.proposed_at))
    for wrong in (STEP.format(5, 4), STEP.format(1, 9999), END.format(5, 4, "1.00")):
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


def test_where_a_number_of_drafts_is_not_known_the_sum_is_a_dash(tmp_path):
    (tmp_path / "m.log").write_text("\n".join(in_turn([LINE, LINE.replace("length: 1.06", "length: 1.60")])))
    for command in (["watch", str(tmp_path / "m.log"), "--headless"], ["report", str(tmp_path / "m.log")]):
        row = next(line.split() for line in run_here(command)[1].splitlines() if line.startswith("drafts "))
        assert row == ["drafts", "–"], command
