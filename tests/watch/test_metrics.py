"""Pages of metrics to intervals: as recorded, with restarts, several engines, and pages that are wrong."""

import re

import pytest

from specscope.trace.record.aggregate import Aggregate
from specscope.watch.counts import UnreadableError
from specscope.watch.pages import Intervals, difference, read_metrics
from tests.waiting import ends
from tests.watch.samples import PEOPLE, SGLANG, changed, text


def counts(one):
    return one.drafts, one.drafted, one.accepted, one.emitted, one.accepted_at


def only(page):
    (reading,) = read_metrics(page, 1)
    return difference(None, reading).aggregate


def test_two_recorded_pages_give_what_happened_between_them():
    intervals = Intervals()
    assert intervals.take(read_metrics(text("metrics_before.txt"), 100)) == []
    (told,) = intervals.take(read_metrics(text("metrics_after.txt"), 200))
    assert (told.model, told.start_ns, told.end_ns) == ("smollm2", 100, 200)
    one = told.aggregate
    assert (one.source, one.engine) == ("vLLM /metrics", "0")
    assert (one.drafts, one.drafted, one.accepted, one.emitted) == (155 - 12, 465 - 36, 13 - 12, 174 - 24)
    assert one.accepted_at == (7 - 6, 3 - 3, 3 - 3)
    assert one.proposed_at == (143, 143, 143)  # 429 drafted tokens are 143 drafts of three, and nothing else
    assert (one.running, one.waiting, one.kv_usage) == (1, 0, pytest.approx(0.0057142857))
    assert not one.reset
    assert not one.averages


def test_a_page_alone_counts_since_its_counters_began():
    (reading,) = read_metrics(text("metrics_after.txt"), 2 * 10**18)
    told = difference(None, reading)
    assert told.aggregate.drafts == 155
    assert told.start_ns == pytest.approx(1.795343980561253e18, rel=1e-12)
    several = only(changed(text("metrics_after.txt"), drafted=400))  # drafts of several lengths are not told apart
    assert (several.proposed_at, several.accepted_at) == ((), (7, 3, 3))
    counted_on = only(changed(text("metrics_after.txt"), at=(200, 3, 3)))  # while the page was written
    assert (counted_on.drafts, counted_on.accepted_at) == (155, ())
    ended = 'vllm:request_success_total{{engine="0",finished_reason="{}",model_name="smollm2"}} {}\n'
    assert only(text("metrics_after.txt") + ended.format("stop", 3) + ended.format("length", 2)).requests == 5


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        *(
            ({"drafts": value}, "drafts_total is .*, which is not a count")
            for value in ("-1", "NaN", "+Inf", "1.5", "1e300")
        ),
        ({}, "position 'one'"),
    ],
)
def test_a_number_that_is_none_is_named(changes, why):
    page = changed(text("metrics_after.txt"), **changes)
    with pytest.raises(UnreadableError, match=why):
        read_metrics(page if changes else page.replace('position="1"', 'position="one"'), 1)


def test_a_line_without_end_is_not_parsed():
    labels = ",".join(f'a{n}="x"' for n in range(10**6))
    with pytest.raises(UnreadableError, match="a line has more than 65,536 characters"):
        ends(read_metrics, f"vllm:spec_decode_num_drafts_total{{{labels}}} 1\n", 0)
    page, others = text("metrics_after.txt"), "".join(f'other{{a="{number}"}} {number}\n' for number in range(20_000))
    odd = others + "go_gc{{{ what\nNaN\n" + page  # which is of no engine
    assert [one.counters for one in read_metrics(odd, 1)] == [read_metrics(page, 1)[0].counters]


def test_the_gauges_of_sglang_are_averages_and_nothing_else():
    intervals = Intervals()
    intervals.take(read_metrics(SGLANG, 1))
    (told,) = intervals.take(read_metrics(SGLANG, 2))
    gauges = {"sglang:spec_accept_length": 2.31, "sglang:spec_accept_rate": 0.4367, "sglang:gen_throughput": 812.5}
    assert told.aggregate == Aggregate("SGLang /metrics", averages=gauges, running=12, waiting=3, kv_usage=0.28)
    assert told.aggregate.length == 2.31


def test_of_six_digits_the_positions_are_exact_and_the_others_are_marked():
    """Beyond a million the last of six digits is a ten: what 4 drafts add to it is not a count of these."""
    page = "llamacpp:spec_decode_num_drafts_total {:g}\nllamacpp:spec_decode_num_accepted_tokens_total {:g}\n"
    page += 'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {}\n'
    intervals, told = Intervals(), []
    for time_ns, (drafts, accepted) in enumerate(((2_000_000, 1_000_000), (2_000_504, 1_000_403))):
        told += intervals.take(read_metrics(page.format(drafts, accepted, accepted), time_ns))
    (one,) = (each.aggregate for each in told)
    assert one.drafts == pytest.approx(504, abs=10)
    assert (one.accepted_at, one.accepted, one.rounded) == ((403,), 403, True)


PAGES = {
    "vLLM": text("metrics_after.txt"),
    "SGLang": (PEOPLE / "prom_sglang.txt").read_text(),
    "llama.cpp": (PEOPLE / "llamacpp" / "metrics_after.txt").read_text(),
}


def times(page, factor):
    """A page whose counters are that many times as large."""
    counter = re.compile(r"(?m)^(\w[\w:]*_total(?:\{[^\n]*\})?) ([0-9][0-9.e+]*)$")
    return counter.sub(lambda match: f"{match[1]} {float(match[2]) * factor:.1f}", page)


@pytest.mark.parametrize("engine", PAGES)
def test_the_page_of_each_engine_grows_and_starts_again(engine):
    page, intervals = PAGES[engine], Intervals()
    since_it_began = only(page)
    told = [
        one.aggregate
        for time_ns, factor in enumerate((1, 2, 5, 5, 1))
        for one in intervals.take(read_metrics(times(page, factor), time_ns))
    ]
    grown, more, idle, again = told
    assert since_it_began.drafts
    assert not since_it_began.rounded
    assert counts(grown) == counts(since_it_began)
    assert more.drafts == 3 * since_it_began.drafts
    assert (idle.drafts, idle.reset) == (0, False)
    assert (counts(again), again.reset) == (counts(since_it_began), True)
    gauge = re.compile(r"(?m)^(\w[\w:]*(?<!_total)(?<!_created)(?:\{[^\n]*\})?) [0-9][0-9.e+-]*$")
    one = only(gauge.sub(r"\1 NaN", page))  # of a gauge that is no number yet nothing is told
    assert (one.running, one.waiting, one.kv_usage, one.averages) == (None, None, None, {})
    assert one.drafts == since_it_began.drafts


@pytest.mark.parametrize("engine", [name for name in PAGES if name != "llama.cpp"])  # it serves one model
def test_two_models_on_a_page_are_two_engines(engine):
    page = PAGES[engine]
    other = re.sub(r'model_name="([^"]*)"', r'model_name="other-\1"', page)
    both = page + "".join(line for line in other.splitlines(keepends=True) if not line.startswith("#"))
    readings = read_metrics(both, 1)
    assert len({reading.model for reading in readings}) == len(readings) == 2
    assert {counts(difference(None, reading).aggregate) for reading in readings} == {counts(only(page))}
