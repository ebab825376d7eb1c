"""Pages of metrics, answers of servers and what tools leave of a run to intervals, also of several servers in one."""

import copy
import json
import re

import pytest

from specscope.errors import UserError
from specscope.trace.history.stats import measure
from specscope.trace.record.aggregate import Aggregate
from specscope.watch.counts import UnreadableError
from specscope.watch.pages import Intervals, difference, read_metrics
from specscope.watch.results import read_json
from specscope.watch.source import Server
from tests.support.commands import run_here, said
from tests.waiting import ends
from tests.watch.samples import PEOPLE, SGLANG, Page, changed, read, text


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


COUNTED = [
    changed(
        text("metrics_before.txt"),
        drafts=100 * n,
        drafted=300 * n,
        accepted=150 * n,
        emitted=250 * n,
        at=(150 * n, 0, 0),
    )
    for n in (1, 2, 3)
]
ACCEPTED = re.compile(r"(?m)^vllm:spec_decode_num_accepted_tokens_(?:total|per_pos_total).*\n")


def test_a_page_that_lacks_a_counter_is_passed_over_and_one_that_begins_to_have_it_says_nothing_of_it():
    first, middle, last = COUNTED
    intervals = Intervals()
    told = [one for page in (first, ACCEPTED.sub("", middle), last) for one in intervals.take(read_metrics(page, 1))]
    assert [counts(one.aggregate)[:3] for one in told] == [(200, 600, 300)]
    intervals = Intervals()
    told = [one for page in (ACCEPTED.sub("", first), middle) for one in intervals.take(read_metrics(page, 1))]
    assert [(one.aggregate.drafts, one.aggregate.accepted, one.aggregate.length) for one in told] == [(100, None, None)]
    with pytest.raises(UnreadableError, match="more tokens accepted than drafted"):
        read_metrics(changed(first, accepted=301), 1)


def test_readings_are_in_the_order_of_their_times_and_openmetrics_counts_seconds():
    first, middle, _ = (re.sub(r"(?m)^(vllm:[^#\n]* \S+)$", r"\1 AT", page) for page in COUNTED)
    for at, scale in ((1790000000, 1), (1790000000000, 1000)):
        page = middle.replace("AT", f'{at + 60 * scale} # {{trace_id="a"}} 1.0 17.5') + first.replace("AT", str(at))
        times = [(reading.counters["drafts"], reading.time_ns / 1e9) for reading in read_metrics(page, 1)]
        assert times == [(100, 1790000000), (200, 1790000060)]


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


CHAT = json.loads(text("chat_greedy.json"))


def single(value):
    (told,) = read_json(value, 7)
    return told


def test_a_recorded_response():
    told = single(CHAT)
    one = told.aggregate
    assert (told.model, told.end_ns, one.request) == ("smollm2", CHAT["created"] * 10**9, "chatcmpl-8c7946b0c7c72083")
    assert (one.accepted_at, one.proposed_at) == ((3, 0, 0), (4, 4, 4))
    figures = CHAT["metrics"]["speculative_decoding"]
    sums = measure([one])
    assert (sums.tau, sums.rate) == (figures["mean_acceptance_length"], figures["draft_acceptance_rate"])
    assert single(broken(per_step_accepted=None, per_step_drafted=None)) == told  # the histogram is enough


def broken(**changes):
    """The recorded response with other figures, None for none."""
    value = copy.deepcopy(CHAT)
    figures = value["metrics"]["speculative_decoding"] | changes
    value["metrics"]["speculative_decoding"] = {name: each for name, each in figures.items() if each is not None}
    return value


ANSWER = {"question_id": 81, "category": "writing", "model_id": "m", "choices": [{"new_tokens": [5, 4]}]}
STEPS = {"accept_lengths": [2, 3, 1, 3], "decoding_steps": [2, 2]}
ACCEPTANCE = {"acceptance_histogram": {"0": 2, "3": 1}, "num_draft_tokens": 9, "num_spec_steps": 3}
RESULTS = {
    "Spec-Bench": (ANSWER | {"choices": [ANSWER["choices"][0] | STEPS]}, (4, None, 5, 9), (3, 2), "per decoding step"),
    "EAGLE": (ANSWER | {"choices": [{"new_tokens": [5, 4], "idxs": [1, 1]}]}, (4, None, 5, 9), (), "decoding steps"),
    "specdec_bench": (
        {"Average_AL": 2.5, "Acceptance_Length_Histogram": {"1": 60, "2": 40, "3": 50, "4": 50}},
        (200, None, 290, None),
        (140, 100, 50),
        "Average_AL is the mean over requests",
    ),
    "AIPerf": (
        {"metadata": {"x_request_id": "u0"}, "spec_decode_acceptance": ACCEPTANCE, "error": None},
        (3, 9, 3, None),
        (1, 1, 1),
        "of each request",
    ),
    "AIPerf of all requests": (
        {
            "total_spec_decode_steps": {"unit": "count", "avg": 100.0},
            "total_draft_tokens": {"avg": 300.0},
            "total_accepted_draft_tokens": {"avg": 120},
            "spec_decode_acceptance_length": {"avg": 2.3, "min": 1.0},
        },
        (100, 300, 120, None),
        (),
        "of each request",
    ),
    "SGLang response": (
        {"id": "r0", "completion_tokens": 54, "spec_verify_ct": 25, "spec_num_correct_drafts": 29},
        (25, None, 29, 54),
        (),
        "SGLang's verifications",
    ),
    "vLLM example": (
        {"num_drafts": 10, "num_draft_tokens": 20, "num_accepted_tokens": 9, "total_num_output_tokens": 19},
        (10, 20, 9, 19),
        (),
        "1 + accepted / drafts",
    ),
    "mlx-vlm response": (
        {"model": "m", "timings": {"predicted_n": 60, "draft_rounds": 20, "draft_n": 60, "draft_n_accepted": 40}},
        (20, 60, 40, 60),
        (),
        "mean acceptance length",
    ),
    "list of accepted tokens": ({"accepted_lengths": [0, 2, 1]}, (3, None, 3, None), (2, 1), "without its bonus"),
}


@pytest.mark.parametrize("source", RESULTS)
def test_a_result_with_counts_and_what_its_tool_means(tmp_path, source):
    value, counts, accepted_at, means = RESULTS[source]
    (told,) = read_json(value, 7)
    one = told.aggregate
    assert (one.drafts, one.drafted, one.accepted, one.emitted) == counts
    assert one.source == source.removesuffix(" of all requests")
    assert one.accepted_at == accepted_at
    (tmp_path / "a.json").write_text(json.dumps(value))
    (tmp_path / "b.json").write_text(json.dumps(value) + "\n")
    for command in (["report"], ["compare", str(tmp_path / "b.json")]):
        code, out, err = run_here([command[0], str(tmp_path / "a.json"), *command[1:]])
        assert (code, means in out, f"{1 + one.accepted / one.drafts:.2f}" in out) == (0, True, True), err


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"spec_verify_ct": 3, "spec_num_correct_drafts": 9, "spec_num_proposed_drafts": 6}, "more tokens accepted"),
        ({"spec_decode_acceptance": ACCEPTANCE | {"num_spec_steps": 4}}, "does not count the 4 steps"),
        ({"accept_lengths": [0, 1]}, "steps of 0 to 1 tokens"),
        ({"spec_decode_acceptance": ACCEPTANCE, "metadata": {"benchmark_phase": "warmup"}}, "of the warm-up"),
        ({"num_drafts": "many"}, "num_drafts: Expected `int`, got `str`"),
        ({"spec_verify_ct": 3}, "without a count of accepted tokens"),
        ({"Acceptance_Length_Histogram": {"one": 1}}, "invalid lengths"),
        ({"request_throughput": 8.0}, "no figures of acceptance under known names"),
        ({"error": {"code": 400}, "num_drafts": 3}, "a server error"),
        ({"choices": [], "object": "chat.completion", "timings": {"predicted_n": 4}}, "in which nothing was drafted"),
        (json.loads(text("chat_n2.json")), "no figures of acceptance under known names"),
        (json.loads(text("chat_minp.json")), "a server error"),
        (broken(per_step_accepted=[0, 1, 1]), "acceptance_histogram does not match per_step_accepted"),
        (broken(per_step_drafted=[3, 3, 0, 6]), "more than was drafted|contradict each other"),
        (broken(per_step_drafted=[3, 3, 3, 9]), "contradict each other"),
        (broken(acceptance_histogram=[]), "contradict each other"),
        (broken(num_draft_tokens=-1), "num_draft_tokens: Expected `int` >= 0"),
        ([1, 2], "not a response"),
        ({"outputs": [3]}, "Expected `object`, got `int`"),
        ([{"name": "vllm:num_requests_running", "value": 1.0}], "no metrics of speculation among these"),
        ([{"name": "vllm:spec_decode_num_drafts", "value": 0.5}], "is not a count"),
    ],
)
def test_what_cannot_be_read_says_why(value, why):
    with pytest.raises(UnreadableError, match=why):
        read_json(value, 7)


BLOCK = """\
--------------------------------------------------
total_num_output_tokens: 20480
num_drafts: 11242
num_draft_tokens: 33726
num_accepted_tokens: {}
mean acceptance length: {}
--------------------------------------------------
acceptance at token 0: {}
acceptance at token 1: {}
acceptance at token 2: {}
"""
BEFORE, AFTER = BLOCK.format(9243, 1.82, 0.56, 0.19, 0.07), BLOCK.format(12366, 2.10, 0.65, 0.30, 0.15)


BENCH = """\
============ Serving Benchmark Result ============
Successful requests:                     200
Benchmark duration (s):                  40.00
Total input tokens:                      51200
Total generated tokens:                  {}
Total generated tokens (retokenized):    99
-------------------{}-------------------
"""
VLLM_BENCH = (
    BENCH.format(18000, "Speculative Decoding")
    + """\
Acceptance rate (%):                     40.00
Acceptance length:                       1.80
Drafts:                                  10000
Draft tokens:                            20000
Accepted tokens:                         8000
Per-position acceptance (%):
  Position 0:                            55.00
  Position 1:                            25.00
==================================================
"""
)
SGLANG_BENCH = BENCH.format(6000, "") + "Accept length:                           2.40\n"


def test_the_blocks_that_serving_benches_print(tmp_path):
    """One after the other, in a log of a container; and what a person copied of one."""
    lines = (VLLM_BENCH + SGLANG_BENCH).splitlines()
    (tmp_path / "a.txt").write_text("".join(f"bench-1  | {line}   \n" for line in lines))
    _, told = read(tmp_path / "a.txt")
    one, other = (each.aggregate for each in told)
    assert (one.source, one.drafts, one.drafted, one.accepted) == ("serving bench", 10000, 20000, 8000)
    assert (one.accepted_at, one.proposed_at) == ((5500, 2500), (10000, 10000))
    assert (other.drafts, other.accepted, other.length) == (None, None, 2.4)
    assert [(each.aggregate.emitted, each.aggregate.requests) for each in told] == [(18000, 200), (6000, 200)]
    assert [(each.end_ns - each.start_ns) / 1e9 for each in told] == [40, 40]
    (tmp_path / "b.txt").write_text("Mean TTFT (ms): 21.5\nAcceptance length: 3.06\nPosition 0: 76.56\n")
    assert "3.06 (n not given)" in said(["report", str(tmp_path / "b.txt")])[0]


def test_the_block_of_vllms_example_before_and_after_a_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(f"Processed prompts: 100%\n{BEFORE}")
    (tmp_path / "b.txt").write_text(AFTER)
    (tmp_path / "both.txt").write_text(BEFORE + AFTER)
    out = said(["compare", "a.txt", "b.txt", "--fail-if", "tau drops > 1%"])[0]
    rows = [line.split() for line in out.splitlines()]
    assert ["mean", "acceptance", "length", "τ", "1.82", "2.10", "+0.28"] in [row[:7] for row in rows]
    assert "65.0% of 11,242" in out
    (report,) = json.loads(run_here(["report", "both.txt", "--json"])[1])["captures"]
    assert [one["told"]["accepted"] for one in report["intervals"]] == [9243, 12366]


LOAD = "{}INFO 11-26 10:0{}:10 [loggers.py:257] Engine 000: Avg generation throughput: 56.0 tokens/s, Running: {} reqs"
METRICS = (
    "{}INFO 11-26 10:0{}:10 [metrics.py:125] SpecDecoding metrics: Mean acceptance length: {}, Accepted: {} tokens, "
    "Drafted: 600 tokens, Per-position acceptance rate: {}, Avg Draft acceptance rate: 60.0%"
)
REPLICAS = (("2.80", 360, "0.800, 0.600, 0.400", 8), ("1.26", 52, "0.200, 0.050, 0.010", 2))
OWN = "(APIServer pid=1) "
WRITERS = {
    "kubectl": (f"[pod/vllm-{{}}/server] {OWN}", "pod/vllm-{}/server 000"),
    "kubectl with times": (f"[pod/v-{{}}/s] 2026-11-26T10:00:10.123456789Z {OWN}", "pod/v-{}/s 000"),
    "stern": (f"vllm-{{}} server {OWN}", "vllm-{} server 000"),
    "compose": (f"\x1b[36mvllm-{{}}  |\x1b[0m {OWN}", "vllm-{} 000"),
    "swarm": (f"s_vllm.{{}}.abc@node    | {OWN}", "s_vllm.{}.abc@node 000"),
    "srun -l": (f"{{}}: {OWN}", "{} 000"),
    "mpirun": (f"[1,{{}}]<stderr>: {OWN}", "1,{} 000"),
    "tail of files": (f"==> {{}}.log <==\n{OWN}", "{}.log 000"),
    "Ray": ("(ServeReplica:default:LLM pid=1{}, ip=10.0.0.1) ", "ServeReplica:default:LLM pid=1{}, ip=10.0.0.1 000"),
    "journald": (f"Nov 26 10:00:10 host{{}} vllm[12]: {OWN}", "host{} vllm 000"),
    "grep": (f"{{}}.log:12:{OWN}", "{}.log 000"),
    "fluent": ('{{"kubernetes": {{"pod_name": "v-{}"}}, "level": "x", "message": "', "v-{} 000"),
    "stern as JSON": ('{{"podName": "v-{}", "message": "', "v-{} 000"),
    "Loki": ('{{"labels": {{}}, "pod": "v-{}", "line": "', "v-{} 000"),
    "logcli": ('{{"labels": {{"pod": "v-{}"}}, "timestamp": "2026-11-26T10:00:10Z", "line": "', "v-{} 000"),
    "Google's pods": ('{{"resource": {{"labels": {{"pod_name": "v-{}"}}}}, "textPayload": "', "v-{} 000"),
    "Google": ('{{"resource": {{}}, "host": "v-{}", "textPayload": "', "v-{} 000"),
    "CloudWatch": (f'1795597210000,"s{{}} {OWN}', "s{} 000"),
    "ts": (f"1795597210.123 s{{}} {OWN}", "s{} 000"),
    "multilog": (f"@4000000065a1b2c30f1e2d3c s{{}} {OWN}", "s{} 000"),
    "nl": (f"     7 s{{}} {OWN}", "s{} 000"),
}


@pytest.mark.parametrize("form", WRITERS)
def test_each_server_in_a_stream_of_logs_is_an_engine(tmp_path, form):
    prefix, name = WRITERS[form]
    end = '"}' if prefix.startswith("{") else ""
    each = [(prefix.format(at), *replica) for at, replica in enumerate(REPLICAS)]
    lines = [line for minute in range(3) for line in (
        *(LOAD.format(before, minute, running) + end for before, *_, running in each),
        *(METRICS.format(before, minute, *figures) + end for before, *figures, _ in each),
    )]  # fmt: skip
    path = tmp_path / "two.log"
    path.write_text("\n".join(lines) + "\n")
    out = said(["report", str(path), "--json"])[0]
    told = [capture["intervals"] for capture in json.loads(out)["captures"]]
    assert [{one["told"]["engine"] for one in side} for side in told] == [{name.format(at)} for at in (0, 1)]
    assert [{one["told"]["running"] for one in side} for side in told] == [{8}, {2}]
    assert [round(side[0]["mean_acceptance_length"], 2) for side in told] == [2.8, 1.26]
    assert "length fell: 2.80 → 1.26 (-1.54, " in run_here(["compare", str(path)])[1]  # one beside the other


def test_a_log_may_be_one_array_of_json(tmp_path):
    """As gcloud writes it: two pods that reported the same figures at the same time."""
    texts = [LOAD.format("", 1, 8), METRICS.format("", 1, *REPLICAS[0][:3])]
    lines = [{"resource": {"labels": {"pod_name": pod}}, "textPayload": text} for text in texts for pod in ("a", "b")]
    (tmp_path / "log.json").write_text(json.dumps(lines, indent=2))
    source, told = read(tmp_path / "log.json")
    assert [(one.aggregate.engine, one.aggregate.accepted) for one in told] == [("a 000", 360), ("b 000", 360)]
    assert source.faults.total == 0
    loki = {"data": {"resultType": "streams", "result": [{"stream": {"pod": "a"}, "values": [["1", texts[1]]]}]}}
    (tmp_path / "loki.json").write_text(json.dumps(loki))
    with pytest.raises(UserError, match="is an answer of Loki, whose log `jq"):
        read(tmp_path / "loki.json")


PAGE = text("metrics_after.txt")
UNDER_RAY = "".join(line for line in PAGE.splitlines(True) if line.startswith("vllm:")).replace(
    "{engine", '{WorkerId="a1",engine'
)
COPIED = {
    "with the headers of its answer": ("HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n" + PAGE, "0"),
    "quoted": ("".join(f"> {line}\n" for line in PAGE.splitlines()), "0"),
    "under Ray": (UNDER_RAY.replace("vllm:", "ray_vllm_"), "0 WorkerId a1"),
    "under an older Ray": (UNDER_RAY.replace("vllm:", "ray_vllm:"), "0 WorkerId a1"),
}


@pytest.mark.parametrize("how", COPIED)
def test_a_page_as_people_have_it(tmp_path, how):
    page, engine = COPIED[how]
    (tmp_path / "page.txt").write_text(page)
    (told,) = read(tmp_path / "page.txt")[1]
    assert (counts(told.aggregate), told.aggregate.engine) == (counts(only(PAGE)), engine)


def test_a_count_of_many_digits_has_a_space_before_it(tmp_path):
    (tmp_path / "page.txt").write_text(changed(text("metrics_after.txt"), emitted=7557572))
    out = said(["watch", str(tmp_path / "page.txt"), "--headless"])[0]
    (row,) = (line.split() for line in out.splitlines() if line.endswith("0.045 0.019 0.019"))
    assert "7,557,572" in row


def test_two_pages_of_one_server_are_the_interval_between_them(tmp_path, monkeypatch):
    """Beside each other, one after the other in a file, and as Prometheus answers."""
    monkeypatch.chdir(tmp_path)
    before = changed(
        text("metrics_before.txt"), drafts=1000, drafted=3000, accepted=1450, emitted=2480, at=(700, 450, 300)
    )
    after = changed(
        text("metrics_before.txt"), drafts=3000, drafted=9000, accepted=2670, emitted=5700, at=(1500, 750, 420)
    )
    counts = (("drafts", "1000", "3000"), ("accepted_tokens", "1450", "2670"))
    names = [(f"vllm:spec_decode_num_{name}_total", *values) for name, *values in counts]
    series = [{"metric": {"__name__": name, "pod": "a"}, "values": [[1, a], [2, b]]} for name, a, b in names]
    files = {
        "a": before,
        "b": after,
        "ab": before + after,
        "p": json.dumps({"data": {"resultType": "matrix", "result": series}}),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.txt").write_text(content)
    for command, tau in ((["report", "b.txt"], 1.89), (["report", "ab.txt"], 1.61), (["report", "p.txt"], 1.61)):
        assert f"τ {tau}" in " ".join(run_here(command)[1].split())
    code, out, err = run_here(["compare", "a.txt", "b.txt"])
    assert (code, "length fell: 2.45 → 1.61 (-0.84" in out, "B  b.txt since a.txt" in out) == (0, True, True)
    assert "the counters of b.txt continue those of a.txt: the figures are the difference" in err
    for one, other in (("b.txt", "a.txt"), ("a.txt", "a2.txt")):  # it went back; it is another server's
        (tmp_path / "a2.txt").write_text(after.replace('engine="0"', 'engine="1"'))
        assert "since" not in run_here(["compare", one, other])[1]


META = {"id": "a", "completion_tokens": 106, "spec_accept_rate": 0.293, "spec_accept_length": 2.4651}


HISTOGRAM = [11, 14, 11, 4, 0, 3]


KEYS = {
    "0.5.10": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
    "0.5.11": ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    "0.5.12": ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
}


@pytest.mark.parametrize("version", KEYS)
def test_an_answer_of_sglang_under_the_names_of_its_version(version):
    figures = dict(zip(KEYS[version], (63, 215, HISTOGRAM), strict=True))
    (told,) = read_json({"text": "hi", "meta_info": META | {"spec_verify_ct": 43} | figures}, 7)
    one = told.aggregate
    assert (one.drafts, one.drafted, one.accepted, one.emitted) == (43, 215, 63, 106)
    assert one.accepted_at == (32, 18, 7, 3, 3)
    assert one.proposed_at == ()  # its drafts may be trees
    in_chat = {"object": "chat.completion", "choices": [{"meta_info": META | {"spec_verify_ct": 43} | figures}]}
    assert read_json(in_chat, 7)[0].aggregate.accepted_at == (32, 18, 7, 3, 3)
    of_each = {"spec_tokens_details": [META | {"spec_verify_ct": 43} | figures] * 2}
    two = read_json({"id": "f00d", "object": "chat.completion", "choices": [], "sglext": of_each}, 7)
    assert [(each.aggregate.request, each.aggregate.emitted) for each in two] == [("f00d 0", None), ("f00d 1", None)]


def test_what_a_server_of_sglang_says_of_itself(tmp_path):
    state = {"last_gen_throughput": 100.0, "avg_spec_accept_length": 2.45}
    info = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "internal_states": [state]}
    (tmp_path / "info.json").write_text(json.dumps(info))
    out = said(["report", str(tmp_path / "info.json")])[0]
    assert "2.45 (n not given)" in out
    assert "SGLang's average since the server started" in out


def test_what_reports_drafted_and_accepted_tokens_alone(tmp_path):
    """LM Studio, in two versions, and the end of what llama-speculative prints."""
    draft = {"total_draft_tokens_count": 60, "accepted_draft_tokens_count": 45, "rejected_draft_tokens_count": 15}
    answer = {"choices": [], "object": "chat.completion", "usage": {"completion_tokens": 80}}
    printed = "n_draft   = 8\nn_predict = 80\nn_drafted = 60\nn_accept  = 45\naccept    = 75.000%\n"
    for content in (
        json.dumps(answer | {"stats": draft}),
        json.dumps(answer | {"usage": answer["usage"] | draft}),
        printed,
    ):
        (tmp_path / "a.txt").write_text(content)
        (capture,) = json.loads(said(["report", str(tmp_path / "a.txt"), "--json"])[0])["captures"]
        (told,) = (each["told"] for each in capture["intervals"])
        assert [told[name] for name in ("drafts", "drafted", "accepted", "emitted")] == [None, 60, 45, 80]


def test_where_a_count_of_vllm_may_stand():
    """At a choice, as one version had it, and as llama-swap captured it."""
    figures = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 5}
    usage = {"usage": {"completion_tokens": 9}}
    stats = figures | {"acceptance_histogram": {"0": 1, "1": 1, "2": 2}}
    at_choice = {"choices": [{"speculative_decoding_stats": stats}]}
    captured = {"data": usage | {"metrics": {"speculative_decoding": figures | {"acceptance_histogram": [1, 1, 2]}}}}
    for value in (at_choice | usage, captured):
        (told,) = read_json(value, 7)
        assert counts(told.aggregate) == (4, 12, 5, 9, (3, 2))


def test_the_timings_of_an_answer_of_llamacpp_alone(tmp_path):
    """As jq .timings leaves them."""
    whole = json.loads((PEOPLE / "llamacpp" / "chat.json").read_text())
    (tmp_path / "t.json").write_text(json.dumps(whole["timings"], indent=2))
    assert "78.3%" not in said(["report", str(tmp_path / "t.json")])[0]
    one, other = (read_json(each, 7)[0].aggregate for each in (whole, whole["timings"]))
    assert (one.drafted, one.accepted, one.emitted) == (other.drafted, other.accepted, other.emitted)


def test_what_has_no_counts_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"a list of llama\.cpp's slots, which counts no drafts"):
        read(PEOPLE / "llamacpp" / "slots.json")
    (tmp_path / "other.json").write_text('{"performance": {"latency": 3}}')
    assert (
        "nor acceptance figures under names that report knows" in run_here(["report", str(tmp_path / "other.json")])[2]
    )
    (tmp_path / "error.json").write_text('{"status": "error", "errorType": "bad_data", "error": "parse error"}')
    assert "is an error from Prometheus's API" in run_here(["report", str(tmp_path / "error.json")])[2]
    with Page((PEOPLE / "llamacpp" / "slots.json").read_text()) as served, pytest.raises(UserError, match="slots"):
        Server(served.url, 1).open()
